"""train_ppo and the number of its prompts: one pass with dynamic filtering, and rollouts smaller than an optimizer step."""

import json
from collections import Counter
from types import SimpleNamespace

import pytest
from datasets import Dataset
from launch import read_rows, read_steps, train_many
from test_ppo_command import flags

from trainer.cli.train_ppo import parse
from trainer.datasets.demos.demo import make_demo
from trainer.errors import UserError
from trainer.rollout.prompt_order import PromptOrder
from trainer.runs.rl.rl_checks import validate
from trainer.runs.rl.rl_run import count_steps, note_first_rollout

# samples of a prompt get different scores if its first digit is 4 or less, else equal ones inside the range
DIFFERENT = """
def reward_func(prompts, responses, labels):
    return [0.5 + (0.1 * (number % 2) if label[0] <= "4" else 0) for number, label in enumerate(labels)]
"""
# the pass rate of a prompt is a tenth of its label
BY_LABEL = """
def reward_func(prompts, responses, labels):
    return [int(label) / 10 for label in labels]
"""
RESUME = "--load_checkpoint {}/learnable/checkpoints/step_6"
CURRICULA = {
    "easy": "--curriculum easy_first",
    "learnable": "--curriculum learnable --save_steps 6",
    "learnable-half": f"--curriculum learnable {RESUME}",  # from the middle of the second pass
}
NAMES = {"one": [], "two": ["--num_episodes", "2"], "steps": ["--max_steps", "16"]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prompts")
    make_demo(str(folder / "demo"))
    (folder / "dense.py").write_text(DIFFERENT)
    rows = [{"q": f"sort {n}", "label": str(n % 10)} for n in range(30)]
    (folder / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = []
    for name, more in NAMES.items():
        line = [*flags(folder, name), "--dataset", f"{folder}/q.jsonl", "--input_key", "q", "--max_samples", "30"]
        line += ["--advantage_estimator", "dr_grpo", "--dynamic_filtering", "--eval_dataset", f"{folder}/q.jsonl"]
        lines.append(["train_ppo", *line, *more])
    (folder / "by_label.py").write_text(BY_LABEL)
    for name, more in CURRICULA.items():
        line = [*flags(folder, name), "--dataset", f"{folder}/q.jsonl", "--input_key", "q", "--max_samples", "8"]
        line += ["--advantage_estimator", "dr_grpo", "--reward_func", f"{folder}/by_label.py", "--max_steps", "12"]
        lines.append(["train_ppo", *line, *more.format(folder).split()])
    output = train_many(1, lines, folder, timeout=300)
    return folder, output


@pytest.mark.parametrize("name, passes", [("one", 1), ("two", 2)])
def test_dynamic_filtering_ends_after_the_passes_over_the_prompts(runs, name, passes):
    """Of 30 prompts, the 15 with a label up to 4 pass, less those that came after a rollout was full."""
    folder, output = runs
    rows = read_steps(folder / name)
    assert sum({row["rollout"]: row["prompts_drawn"] for row in rows}.values()) <= 30 * passes
    samples = [json.loads(line) for line in (folder / name / "rollouts.jsonl").read_text().splitlines()]
    kept = len(samples) // 2
    assert 10 * passes <= kept <= 15 * passes and all(sample["label"] <= "4" for sample in samples)
    planned = {1: 15, 2: 30}[passes]  # 7 rollouts of 4 prompts and one of 2, in steps of 2 prompts, per pass
    told = f"dynamic filtering kept {kept} of {30 * passes} prompts"
    assert f"{told}: the passes over the prompts end after {len(rows)} of {planned} steps" in output
    assert any("eval_reward" in row and row["step"] == len(rows) for row in read_rows(folder / name)), "evaluated last"
    assert read_rows(folder / name)[-1]["steps"] == len(rows)


def test_a_number_of_steps_goes_over_the_prompts_as_often_as_it_needs(runs):
    rows = read_steps(runs[0] / "steps")
    assert len(rows) == 16 and sum({row["rollout"]: row["prompts_drawn"] for row in rows}.values()) > 30


def rows_of(folder, name: str) -> list[list[int]]:
    """The rows of the prompts of each rollout."""
    samples = [json.loads(line) for line in (folder / name / "rollouts.jsonl").read_text().splitlines()]
    rows: dict[int, list[int]] = {}
    for sample in samples[::2]:
        rows.setdefault(sample["rollout"], []).append(sample["row"])
    return [rows[rollout] for rollout in sorted(rows)]


def test_a_curriculum_orders_the_prompts_after_the_first_pass(runs):
    folder, _ = runs
    easy, learnable, half = (rows_of(folder, name) for name in CURRICULA)
    assert easy[:2] == learnable[:2] and sorted(easy[0] + easy[1]) == list(range(8))  # in the plain order
    assert easy[2:4] == easy[4:6] == [[7, 6, 5, 4], [3, 2, 1, 0]]  # row n has the rate n / 10
    assert learnable[3:] == half and len(learnable) == 6
    whole, again = (read_steps(folder / name) for name in ("learnable", "learnable-half"))
    keys = ("loss", "grad_norm", "weights_checksum", "batch_hash")
    assert [[row[key] for key in keys] for row in again] == [[row[key] for key in keys] for row in whole[6:]]


def test_learnable_draws_prompts_by_their_weights():
    """2000 prompts of five rates: each rate comes as often as p (1 - p) + 1/40 says, and positions can be saved."""
    prompts = Dataset.from_dict({"row": list(range(2000)), "digest": ["x"] * 2000})
    order = PromptOrder(prompts, batch_size=100, seed=3, shuffle=True, curriculum="learnable")
    scores = [-1.0, 0.25, 0.5, 0.75, 7.0]  # clipped to 0 and 1
    assert {prompt["row"] for prompt in order.take(2000)} == set(range(2000))
    order.note([SimpleNamespace(row=row, failed="", score=scores[row % 5]) for row in range(2000)])
    first = order.take(700)
    order.note([SimpleNamespace(row=row, failed="", score=0.0) for row in range(2000)])  # counts from the next pass on
    copy = PromptOrder(prompts, batch_size=100, seed=3, shuffle=True, curriculum="learnable")
    copy.go_to(json.loads(json.dumps(order.position())))
    rest = order.take(1300)
    assert [prompt["row"] for prompt in copy.take(1300)] == [prompt["row"] for prompt in rest]
    counts = Counter(prompt["row"] % 5 for prompt in first + rest)
    weights = [min(max(p, 0), 1) * (1 - min(max(p, 0), 1)) + 1 / 40 for p in scores]
    for kind, weight in enumerate(weights):
        assert counts[kind] == pytest.approx(2000 * weight / sum(weights), abs=4 * (2000 * 0.2) ** 0.5)
    assert order.episode == 2


def test_a_pass_rate_is_a_share_of_the_reward_range():
    prompts = Dataset.from_dict({"row": [0, 1], "digest": ["x"] * 2})
    order = PromptOrder(prompts, batch_size=2, seed=0, shuffle=True, curriculum="learnable", reward_range=(-1, 3))
    order.note(
        [SimpleNamespace(row=row, failed="", score=score) for row, score in ((0, -1.0), (0, 1.0), (1, 3.0), (1, 5.0))]
    )
    assert order.rates == {0: 0.25, 1: 1.0}


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["--max_steps", "9", "--rollouts_from", "r"],
    ],
)
def test_a_curriculum_that_would_do_nothing_is_refused(tmp_path, more):
    args, _ = parse([*flags(tmp_path, "x"), "--reward_func", "exact_match", "--advantage_estimator", "dr_grpo", *more])
    args.rollout.curriculum = "learnable"
    with pytest.raises(UserError, match="curriculum"):
        validate(args)


@pytest.mark.parametrize("prompts, more, largest", [(60, [], 8), (3, [], 6), (60, ["--max_steps", "5"], 8)])
def test_an_optimizer_step_larger_than_a_rollout_is_one_line(tmp_path, prompts, more, largest):
    args, _ = parse(flags(tmp_path, "x", "--train_batch_size", str(largest + 1), *more))
    order = PromptOrder([{}] * prompts, batch_size=args.rollout.rollout_batch_size, seed=0, shuffle=True)
    with pytest.raises(UserError, match=f"--train_batch_size: {largest + 1}, but a rollout has {largest} responses"):
        count_steps(args, order, None)
    args.batch.train_batch_size = largest
    assert count_steps(args, order, None) > 0


@pytest.mark.parametrize(
    ("step", "prompts", "evaluates", "recorded", "said"),
    [
        (0, 9, False, None, "step 1: generating 32 responses to 8 prompts"),
        (0, 1, True, None, "step 1: evaluating, then generating 4 responses to 1 prompt"),
        (3, 20, True, None, "step 4: rollout 2, from prompt 17 of 20 on: generating 16 responses to 4 prompts"),
        (3, 20, True, {2: []}, ""),  # resumed, and generated before
        (9, 20, True, None, ""),  # nothing is left to do
        (0, 9, False, [], "step 1: generating 32 responses to 8 prompts"),
    ],
)
@pytest.mark.parametrize("is_ahead", [False, True])
def test_the_time_before_the_first_step_is_told(step, prompts, evaluates, recorded, said, is_ahead):
    printed: list[str] = []
    order = SimpleNamespace(prompts=range(prompts), next_index=16 if step else 0)
    run = SimpleNamespace(
        progress=SimpleNamespace(step=step),
        total_steps=9,
        order=order,
        args=SimpleNamespace(rollout=SimpleNamespace(rollout_batch_size=8, n_samples_per_prompt=4)),
        roles=SimpleNamespace(ahead=SimpleNamespace(resumed=recorded) if is_ahead else None),
        ppo=SimpleNamespace(
            evaluation=object(), recorded=None if is_ahead else recorded, state=SimpleNamespace(rollout=2)
        ),
        setup=SimpleNamespace(strategy=SimpleNamespace(print=printed.append)),
    )
    note_first_rollout(run, evaluates)
    assert printed == [said] * bool(said)
