"""Rollouts of an earlier start: which count, in which order, and where a gap ends them. `test_kill_ppo.py` trains on them."""

import dataclasses
import json
import math
import os

import pytest
from datasets import Dataset

from trainer.methods.ppo_state import EntropyCoef, PPOOptions, RLState
from trainer.rollout.prompt_order import PromptOrder
from trainer.rollout.resumed_rollouts import AheadFiles, find_resumed, history_after, link_of, origin_of
from trainer.rollout.rollouts_file import as_row, read_rollouts
from trainer.rollout.samples import Sample

PROMPTS, BATCH, GROUP, FIRST = 12, 2, 2, 3


pytestmark = pytest.mark.usefixtures("world")


def run_state(curriculum: str = "none", origin: str = "a") -> RLState:
    """Of a run that has trained three rollouts of nothing."""
    prompts = Dataset.from_list([{"row": row, "prompt_ids": [row], "digest": str(row)} for row in range(PROMPTS)])
    order = PromptOrder(prompts, batch_size=BATCH, seed=0, shuffle=True, curriculum=curriculum)
    state = RLState(order, 0.0, origin=origin, num_histories=3)
    for _ in range(FIRST):
        order.take(BATCH)
        state.go_on([])
    return state


def test_a_checkpoint_keeps_the_weight_of_the_entropy():
    state, options = run_state(), PPOOptions(None, None, None, 0, entropy_target=1.0, entropy_coef_delta=0.5)
    for entropy in (0.9, 0.8, math.nan):
        state.entropy.after_step(entropy, options)
    later = run_state()
    later.load_state_dict(json.loads(json.dumps(state.state_dict())))
    assert later.entropy == state.entropy == EntropyCoef(1.0, 0.8) and later.entropy.now(options) == 1.0
    later.load_state_dict(json.loads(json.dumps(run_state().state_dict())))  # of a run without it


def rollouts_from(state, count: int) -> tuple[dict[int, list[Sample]], dict[int, str]]:
    """The rollouts that follow and the links of all versions. By the scores, a curriculum sorts the next episode."""
    state, found = run_state(state.prompts.curriculum, state.origin), {}
    links = {version: link_of(history, state.origin) for version, history in state.histories.items()}
    for rollout in range(FIRST, FIRST + count):
        rows = [prompt["row"] for prompt in state.prompts.take(BATCH) for _ in range(GROUP)]
        ids = [[rollout, row, number] for number, row in enumerate(rows)]
        found[rollout] = [
            Sample(n, row, [row], ids[n], [-0.5] * 3, True, None, row / PROMPTS, versions=[[0, rollout - 1]])
            for n, row in enumerate(rows)
        ]
        links[rollout] = state.link()
        state.prompts.note(found[rollout])
        state.go_on(found[rollout])
    return found, links


def lines_of(rollout: int, samples: list[Sample], link: str) -> str:
    return "".join(json.dumps(as_row(sample, rollout, None) | {"origin": link}) + "\n" for sample in samples)


@pytest.mark.parametrize("curriculum", ["none", "easy_first", "learnable"])
def test_logged_and_ahead_rollouts_follow_each_other(tmp_path, curriculum):
    """Over an episode's end: with a curriculum, the scores of the rollouts decide which prompts come then."""
    state = run_state(curriculum)
    rollouts, links = rollouts_from(state, 5)
    earlier = [dataclasses.replace(sample, score=0.25) for sample in rollouts[3]]
    log = lines_of(1, rollouts[3], links[3]) + lines_of(3, earlier, links[3])
    log += "".join(lines_of(r, rollouts[r], links[r]) for r in (3, 4, 5))
    torn = lines_of(6, rollouts[6], links[6])[:-20]  # by the kill
    (tmp_path / "rollouts.jsonl").write_text(log + torn)
    AheadFiles(str(tmp_path)).write(6, rollouts[6], links)
    AheadFiles(str(tmp_path)).write(7, rollouts[7], links)
    found = find_resumed(str(tmp_path), state, GROUP)
    assert dict(found) == rollouts and state.prompts.position() == run_state(curriculum).prompts.position()
    after = run_state(curriculum).prompts
    for rollout in range(3, 8):
        assert found(state) == rollouts[rollout]
        state.go_on(rollouts[rollout])
        after.take(BATCH), after.note(rollouts[rollout])
    assert found(state) is None and state.prompts.position() == after.position()
    restored = run_state(curriculum)
    restored.load_state_dict(json.loads(json.dumps(state.state_dict())))
    assert restored.histories == state.histories and list(state.histories) == [6, 7, 8]


def test_what_the_checkpoint_already_knew_of_counts(tmp_path):
    """A thread drew rollout 3 from version 2, before the checkpoint at version 3."""
    state = run_state()
    rollouts, links = rollouts_from(state, 1)
    AheadFiles(str(tmp_path)).write(3, rollouts[3], links)
    assert dict(find_resumed(str(tmp_path), state, GROUP)) == rollouts
    state.histories.pop(2)
    assert not find_resumed(str(tmp_path), state, GROUP)


def test_a_gap_or_another_prompt_ends_them(tmp_path):
    state = run_state()
    rollouts, links = rollouts_from(state, 4)
    whole = {rollout: lines_of(rollout, samples, links[rollout]) for rollout, samples in rollouts.items()}
    others = [dataclasses.replace(sample, row=sample.row + 1) for sample in rollouts[4]]
    for text in (lines_of(4, rollouts[4][:-1], links[4]), lines_of(4, others, links[4]), "", "{\n"):
        (tmp_path / "rollouts.jsonl").write_text(whole[3] + text + whole[5])
        assert set(find_resumed(str(tmp_path), state, GROUP)) == {3}, text
    assert not find_resumed(str(tmp_path / "new"), state, GROUP)


def test_samples_of_weights_that_do_not_come_again_are_left(tmp_path):
    """A start with other flags went on from the same checkpoint, and a later one has the first flags again."""
    (first, links), (second, others) = (rollouts_from(run_state(origin=origin), 4) for origin in "ab")
    log = "".join(lines_of(r, first[r], links[r]) for r in (3, 4, 5)) + lines_of(3, second[3], others[3])
    (tmp_path / "rollouts.jsonl").write_text(log)
    AheadFiles(str(tmp_path)).write(6, first[6], links)
    assert set(find_resumed(str(tmp_path), run_state(), GROUP)) == {3, 4, 5, 6}
    assert set(find_resumed(str(tmp_path), run_state(origin="b"), GROUP)) == {3}
    state = run_state(origin="b")
    state.prompts.take(BATCH)
    state.go_on(second[3])  # and saved a checkpoint
    state.origin = "a"
    assert not find_resumed(str(tmp_path), state, GROUP)


def test_the_history_is_of_tokens_scores_and_order():
    samples = rollouts_from(run_state(), 1)[0][3]
    history = history_after("link", samples)
    assert history == history_after("link", [dataclasses.replace(sample) for sample in samples])
    ids = [samples[0].with_response([1]), *samples[1:]]
    score = [dataclasses.replace(samples[0], score=0.9), *samples[1:]]
    others = [history_after("b", samples), *(history_after("link", each) for each in (ids, score, samples[::-1], []))]
    assert len({history, *others}) == 6


def test_files_of_trained_rollouts_go(tmp_path):
    files, (rollouts, links) = AheadFiles(str(tmp_path)), rollouts_from(run_state(), 3)
    for rollout, samples in rollouts.items():
        files.write(rollout, samples, links)
    (tmp_path / "ahead/4-1.jsonl.tmp").touch()  # another rank writes it now
    files.forget(before=4)
    names = ["4-0.jsonl", "4-1.jsonl.tmp", "5-0.jsonl"]
    assert sorted(path.name for path in (tmp_path / "ahead").iterdir()) == names
    assert read_rollouts(str(tmp_path / "ahead/5-0.jsonl")) == [rollouts[5]]
    files.forget(before=6)
    assert not list((tmp_path / "ahead").iterdir())


def test_a_disk_that_takes_no_file_costs_a_warning(tmp_path, capsys):
    rollouts, links = rollouts_from(run_state(), 1)
    (tmp_path / "ahead").touch()
    AheadFiles(str(tmp_path)).write(3, rollouts[3], links)
    assert "a resumed run will generate these samples again" in capsys.readouterr().out


def test_the_origin_is_of_all_that_decides_samples(tmp_path):
    reward, data, model = tmp_path / "reward.py", tmp_path / "data.jsonl", tmp_path / "model"
    reward.write_text("first")
    data.write_text("{}")
    model.mkdir()
    (model / "weights").write_text("1")
    flags = {"temperature": 1.0, "reward_func": f"math, {reward}:score", "dataset": str(data), "pretrain": str(model)}
    flags |= {"output_dir": "a", "load_checkpoint": None, "stop": "", "sync_folder": str(tmp_path / "sync")}
    found = [origin_of(flags)]
    (tmp_path / "sync/engine_weights").mkdir(parents=True)  # a run fills this folder
    assert origin_of(flags | {"output_dir": "b", "load_checkpoint": "latest"}) == found[0]
    found.append(origin_of(flags | {"temperature": 0.9}))
    reward.write_text("second")
    found.append(origin_of(flags))
    data.write_text("[]")
    os.utime(data, ns=(1, 1))
    found.append(origin_of(flags))
    (model / "weights").write_text("12")
    found.append(origin_of(flags))
    assert len(set(found)) == 5


@pytest.mark.parametrize("flag, name", [("reward_func", "words_math/code.py:score"), ("env", "words_math.code")])
def test_a_module_that_code_needs_is_a_part_of_the_origin(tmp_path, monkeypatch, flag, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words_math").mkdir()
    for file, text in {"code": "import helper\nfrom . import helper", "helper": "a = 1", "unused": ""}.items():
        (tmp_path / f"words_math/{file}.py").write_text(text)
    first = origin_of({flag: name})
    (tmp_path / "words_math/unused.py").write_text("a = 2")
    assert origin_of({flag: name}) == first
    (tmp_path / "words_math/helper.py").write_text("a = 2")
    assert origin_of({flag: name}) != first
