"""--curriculum with --max_staleness K: batch b depends on the scores of the batches up to b - K - 1, at any speed."""

import json
import random
from types import SimpleNamespace

import pytest
from datasets import Dataset
from fake_engine import FakeServer
from launch import read_steps, train_many

from trainer.datasets.batches.global_batches import epoch_order
from trainer.datasets.demos.demo import make_demo
from trainer.rollout.prompt_order import PromptOrder

BOUND, STEPS, ROWS, BATCH = 2, 10, 24, 8  # 3 batches are a pass


def expected_order(num_rows: int, size: int, delay: int, scores: list[dict[int, float]], seed: int) -> list[list[int]]:
    """The batches of easy_first, from the scores of each batch by row: the simple model."""
    batches: list[list[int]] = []
    for episode in range(99):
        rates: dict[int, float] = {}
        for known in scores[: max(len(batches) - delay, 0)]:
            rates.update(known)
        order = sorted(epoch_order(num_rows, seed, episode, True).tolist(), key=lambda row: -rates.get(row, 0.5))
        for start in range(0, num_rows, size):
            batches.append(order[start : start + size])
            if len(batches) > len(scores):
                return batches[: len(scores)]
    raise AssertionError("too many batches")


def order_of(delay: int, curriculum: str) -> PromptOrder:
    prompts = Dataset.from_dict({"row": list(range(ROWS)), "digest": ["x"] * ROWS})
    return PromptOrder(prompts, batch_size=5, seed=7, shuffle=True, curriculum=curriculum, delay=delay)


def handed_out(delay: int, curriculum: str, chance: random.Random, copied: bool = False) -> tuple[list, list]:
    """The batches, and their scores by row. Batches are taken up to `delay` ahead of the notes, as `chance` has it.

    With `copied`, a resumed run goes on after each note.
    """
    saved, batches, scores = order_of(delay, curriculum), [], []
    ahead = order_of(delay, curriculum)
    for number in range(23):
        while len(batches) <= number or (len(batches) <= number + delay and chance.random() < 0.6):
            batches.append([prompt["row"] for prompt in ahead.take(5)])
        assert [prompt["row"] for prompt in saved.take(5)] == batches[number]
        of_row = {row: (row * 7 + number * 5) % 9 / 8 for row in batches[number]}
        scores.append(of_row)
        samples = [SimpleNamespace(row=row, failed="", score=score) for row, score in of_row.items()]
        samples += [SimpleNamespace(row=batches[number][0], failed=why, score=float("nan")) for why in ("", "lost")]
        saved.note(samples)
        ahead.note(samples)
        if copied:  # what was taken ahead and not noted is taken again
            resumed = order_of(delay, curriculum)
            resumed.go_to(json.loads(json.dumps(saved.position())))
            assert resumed.position() == saved.position()
            saved = resumed
            ahead = order_of(delay, curriculum)
            ahead.go_to(json.loads(json.dumps(saved.position())))
            del batches[number + 1 :]
    return batches[:23], scores


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_an_order_is_that_of_the_simple_model_however_far_ahead_it_is_taken(delay):
    batches, scores = handed_out(delay, "easy_first", random.Random(0))
    assert batches == expected_order(ROWS, 5, delay, scores, 7)
    plain = [epoch_order(ROWS, 7, episode, True).tolist() for episode in range(5)]
    taken = [row for batch in batches for row in batch]
    assert taken[:ROWS] == plain[0] and taken[ROWS : 2 * ROWS] != plain[1]


@pytest.mark.parametrize("curriculum", ["easy_first", "learnable"])
@pytest.mark.parametrize("delay", [0, 2])
def test_neither_the_lead_nor_a_resume_changes_an_order(delay, curriculum):
    found = [handed_out(delay, curriculum, random.Random(seed), copied) for seed in (1, 2) for copied in (False, True)]
    assert all(one == found[0] for one in found)


def test_in_lock_step_a_position_is_what_it_was():
    order = order_of(0, "easy_first")
    [*samples] = [SimpleNamespace(row=prompt["row"], failed="", score=1.0) for prompt in order.take(5)]
    order.note(samples)
    rates = [[sample.row, 1.0] for sample in samples]
    assert json.loads(json.dumps(order.position())) == {"episode": 0, "next_index": 5, "rates": [rates, []]}


# --- runs of two ranks

REWARD = """
def reward_func(prompts, responses, labels):
    return [sum(map(ord, prompt)) % 10 / 10 + 0.01 * (number % 2) for number, prompt in enumerate(prompts)]
"""
FILTERED = """
def reward_func(prompts, responses, labels):
    of_prompt = [sum(map(ord, prompt)) % 10 for prompt in prompts]
    return [one / 10 + (0.01 * (number % 2) if one > 2 else 0) for number, one in enumerate(of_prompt)]
"""


def flags(folder, name: str, servers: list[FakeServer], *more: str) -> list[str]:
    line = ["--backend", "fsdp2", "--pretrain", f"{folder}/demo/model", "--dataset", f"{folder}/demo/prompts.jsonl"]
    line += ["--label_key", "label", "--param_dtype", "fp32", "--no_save", "--max_samples", str(ROWS)]
    line += [] if "--reward_func" in more else ["--reward_func", f"{folder}/reward.py"]
    line += ["--advantage_estimator", "group_norm", "--n_samples_per_prompt", "2", "--tis_cap", "2"]
    line += ["--prompt_max_len", "64", "--generate_max_len", "8", "--rollout_batch_size", str(BATCH)]
    line += ["--train_batch_size", str(2 * BATCH), "--micro_train_batch_size", "8", "--micro_rollout_batch_size", "4"]
    line += ["--learning_rate", "1e-3", "--lr_scheduler", "constant"]
    if servers:
        line += ["--rollout_engine", "vllm_server", "--engine_urls", ",".join(server.url for server in servers)]
        line += ["--max_logprob_diff", "inf"]  # they invent their log-probs
    return ["train_ppo", *line, "--output_dir", str(folder / name), *more]


SPEEDS = {"fast": 0.001, "slow": 0.05}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """With refilled slots and engines of two speeds: plain, with partial rollouts, filtered; resumed, and replayed."""
    folder = tmp_path_factory.mktemp("curriculum")
    make_demo(str(folder / "demo"))
    (folder / "reward.py").write_text(REWARD)
    (folder / "filtered.py").write_text(FILTERED)
    usual = ["--max_steps", str(STEPS), "--num_episodes", "4"]
    ahead = [*usual, "--max_staleness", str(BOUND), "--curriculum", "easy_first", "--save_steps", "6"]
    filtered = [*ahead, "--dynamic_filtering", "--num_episodes", "9", "--reward_func", f"{folder}/filtered.py"]
    kinds = {"plain": ahead, "partial": [*ahead, "--partial_rollouts"], "filtered": filtered}
    lines = []
    for kind, more in kinds.items():
        for speed, seconds in SPEEDS.items():
            servers = [FakeServer(seconds=seconds), FakeServer(seconds=seconds * 2)]
            lines.append(flags(folder, f"{kind}-{speed}", servers, *more))
    for kind in ("plain", "filtered"):  # the same command goes on from its checkpoint
        [line] = [line for line in lines if f"{folder}/{kind}-slow" in line]
        saved = ["--load_checkpoint", f"{folder}/{kind}-slow/checkpoints/step_6"]
        lines.append([*line, *saved])
    again = [*usual, "--rollouts_from", f"{folder}/partial-slow/rollouts.jsonl"]
    lines.append(flags(folder, "replay", [], *again))
    lines.append(flags(folder, "lockstep", [FakeServer()], *usual, "--curriculum", "easy_first"))
    output = train_many(2, lines, folder, timeout=250)
    return folder, output


def starts_of(folder, name: str) -> list[list[dict]]:
    """The lines of rollouts.jsonl, of each start of the run."""
    found: list[list[dict]] = [[]]
    for line in map(json.loads, (folder / name / "rollouts.jsonl").open()):
        if found[-1] and line["rollout"] < found[-1][-1]["rollout"]:
            found.append([])
        found[-1].append(line)
    return found


def rows_of(lines: list[dict]) -> dict[int, list[int]]:
    rows: dict[int, list[int]] = {}
    for line in lines[::2]:
        rows.setdefault(line["rollout"], []).append(line["row"])
    return rows


@pytest.mark.parametrize("kind", ["plain", "partial", "filtered"])
def test_the_speed_of_the_engines_does_not_change_the_order(runs, kind):
    folder, _ = runs
    fast, slow = (rows_of(starts_of(folder, f"{kind}-{speed}")[0]) for speed in SPEEDS)
    assert fast == slow and len(fast) == STEPS
    assert any(row["staleness_max"] > 0 for speed in SPEEDS for row in read_steps(folder / f"{kind}-{speed}"))


@pytest.mark.parametrize(("name", "delay"), [("plain-slow", BOUND), ("partial-fast", BOUND), ("lockstep", 0)])
def test_the_order_of_a_run_is_that_of_the_simple_model(runs, name, delay):
    folder, _ = runs
    lines = starts_of(folder, name)[0]
    rows, scores = rows_of(lines), []
    for rollout in sorted(rows):
        of_row: dict[int, list[float]] = {}
        for line in (line for line in lines if line["rollout"] == rollout):
            of_row.setdefault(line["row"], []).append(line["score"])
        scores.append({row: sum(found) / len(found) for row, found in of_row.items()})
    assert [rows[rollout] for rollout in sorted(rows)] == expected_order(ROWS, BATCH, delay, scores, 42)
    assert rows != dict(enumerate(expected_order(ROWS, BATCH, 99, scores, 42))), "no scores change the order"


@pytest.mark.parametrize("kind", ["plain", "filtered"])
def test_a_resumed_run_takes_the_prompts_of_the_first_start(runs, kind):
    folder, output = runs
    first, again = starts_of(folder, f"{kind}-slow")
    rows, rows_again = rows_of(first), rows_of(again)
    assert rows_again and rows_again == {rollout: rows[rollout] for rollout in rows_again}
    assert output.count("rollouts 6 to 9 were generated before the resume") == 1, "of the run without a filter"


def test_a_replay_is_the_run_to_the_bit(runs):
    folder, _ = runs
    for row, other in zip(read_steps(folder / "partial-slow"), read_steps(folder / "replay"), strict=True):
        assert all(row[key] == other[key] for key in ("loss", "grad_norm", "batch_hash", "staleness"))
