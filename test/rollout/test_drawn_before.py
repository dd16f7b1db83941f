"""Rollouts of an earlier start: which count, in which order, and where a gap ends them. `test_kill_ppo.py` trains on them."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from datasets import Dataset

from trainer.rollout.drawn_before import AheadFiles, drawn_before, origin_of
from trainer.rollout.experience import Sample, as_row
from trainer.rollout.prompt_order import PromptOrder
from trainer.rollout.rollouts_file import read_rollouts

PROMPTS, BATCH, GROUP, FIRST = 12, 2, 2, 3


@pytest.fixture(autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def run_state(curriculum: str = "none"):
    """Of a run that has trained three rollouts."""
    prompts = Dataset.from_list([{"row": row, "prompt_ids": [row], "digest": str(row)} for row in range(PROMPTS)])
    order = PromptOrder(prompts, batch_size=BATCH, seed=0, shuffle=True, curriculum=curriculum)
    for _ in range(FIRST):
        order.take(BATCH)
    return SimpleNamespace(prompts=order, rollout=FIRST)


def rollouts_from(state, count: int) -> dict[int, list[Sample]]:
    """The rollouts that follow, with scores by which a curriculum sorts the next episode."""
    order, found = run_state(state.prompts.curriculum).prompts, {}
    for rollout in range(FIRST, FIRST + count):
        rows = [prompt["row"] for prompt in order.take(BATCH) for _ in range(GROUP)]
        ids = [[rollout, row, number] for number, row in enumerate(rows)]
        found[rollout] = [
            Sample(n, row, [row], ids[n], [-0.5] * 3, True, None, row / PROMPTS, version=rollout - 1)
            for n, row in enumerate(rows)
        ]
        order.note(found[rollout])
    return found


def lines_of(rollout: int, samples: list[Sample], origin: str = "a") -> str:
    return "".join(json.dumps(as_row(sample, rollout, None) | {"origin": origin}) + "\n" for sample in samples)


@pytest.mark.parametrize("curriculum", ["none", "easy_first", "learnable"])
def test_logged_and_ahead_rollouts_follow_each_other(tmp_path, curriculum):
    """Over an episode's end: with a curriculum, the scores of the rollouts decide which prompts come then."""
    state = run_state(curriculum)
    rollouts = rollouts_from(state, 5)
    earlier = [dataclasses.replace(sample, score=0.25) for sample in rollouts[3]]
    log = lines_of(1, rollouts[3]) + lines_of(3, earlier) + "".join(lines_of(r, rollouts[r]) for r in (3, 4, 5))
    (tmp_path / "rollouts.jsonl").write_text(log + lines_of(6, rollouts[6])[:-20])  # the kill tore the last row
    AheadFiles(str(tmp_path), "a").write(6, rollouts[6])
    AheadFiles(str(tmp_path), "a").write(7, rollouts[7])
    found = drawn_before(str(tmp_path), state, GROUP, "a")
    assert dict(found) == rollouts and state.prompts.position() == run_state(curriculum).prompts.position()
    for rollout in range(3, 8):
        assert found(state) == rollouts[rollout]
        state.rollout += 1
    after = run_state(curriculum).prompts
    for samples in rollouts.values():
        after.take(BATCH), after.note(samples)
    assert found(state) is None and state.prompts.position() == after.position()


def test_a_gap_or_another_origin_or_another_prompt_ends_them(tmp_path):
    state = run_state()
    rollouts, log = rollouts_from(state, 4), tmp_path / "rollouts.jsonl"
    whole = {rollout: lines_of(rollout, samples) for rollout, samples in rollouts.items()}
    others = [dataclasses.replace(sample, row=sample.row + 1) for sample in rollouts[4]]
    for text in (lines_of(4, rollouts[4][:-1]), lines_of(4, rollouts[4], "b"), lines_of(4, others), "", "{\n"):
        log.write_text(whole[3] + text + whole[5])
        assert set(drawn_before(str(tmp_path), state, GROUP, "a")) == {3}, text
    assert not drawn_before(str(tmp_path), state, GROUP, "b")
    assert not drawn_before(str(tmp_path / "new"), state, GROUP, "a")


def test_files_of_trained_rollouts_go(tmp_path):
    files, rollouts = AheadFiles(str(tmp_path), "a"), rollouts_from(run_state(), 3)
    for rollout, samples in rollouts.items():
        files.write(rollout, samples)
    files.forget(wanted=lambda rollout: rollout > 3)
    assert sorted(path.name for path in (tmp_path / "ahead").iterdir()) == ["4-0.jsonl", "5-0.jsonl"]
    assert read_rollouts(str(tmp_path / "ahead/5-0.jsonl")) == [rollouts[5]]
    files.forget()
    assert not list((tmp_path / "ahead").iterdir())


def test_the_origin_is_of_all_that_decides_samples(tmp_path):
    reward = tmp_path / "reward.py"
    reward.write_text("first")
    flags = {"temperature": 1.0, "reward_func": [f"{reward}:score", "math"], "output_dir": "a", "load_checkpoint": None}
    origin = origin_of(flags)
    assert origin_of(flags | {"output_dir": "b", "load_checkpoint": "latest"}) == origin
    assert origin_of(flags | {"temperature": 0.9}) != origin
    reward.write_text("second")
    assert origin_of(flags) != origin
