"""train_ppo and the number of its prompts: one pass with dynamic filtering, and rollouts smaller than an optimizer step."""

import json

import pytest
from launch import read_rows, read_steps, train_many
from test_ppo_command import flags

from trainer.cli.ppo_models import count_steps
from trainer.cli.train_ppo import parse
from trainer.datasets.demo import make_demo
from trainer.errors import UserError
from trainer.rollout.prompt_order import PromptOrder

# samples of a prompt get different scores if its first digit is 4 or less, else equal ones inside the range
DIFFERENT = """
def reward_func(prompts, responses, labels):
    return [0.5 + (0.1 * (number % 2) if label[0] <= "4" else 0) for number, label in enumerate(labels)]
"""
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


@pytest.mark.parametrize("prompts, more, largest", [(60, [], 8), (3, [], 6), (60, ["--max_steps", "5"], 8)])
def test_an_optimizer_step_larger_than_a_rollout_is_one_line(tmp_path, prompts, more, largest):
    args, _ = parse(flags(tmp_path, "x", "--train_batch_size", str(largest + 1), *more))
    order = PromptOrder([{}] * prompts, batch_size=args.rollout_batch_size, seed=0, shuffle=True)
    with pytest.raises(UserError, match=f"--train_batch_size: {largest + 1}, but a rollout has {largest} responses"):
        count_steps(args, order, None)
    args.train_batch_size = largest
    assert count_steps(args, order, None) > 0
