"""train_ppo --env: several turns on several layouts against the plain formula, replay, resume, and an environment that fails."""

import json
import math
import statistics
import sys
from itertools import pairwise

import pytest
import torch
from launch import ROOT, read_steps, run_process, train_many
from test_ppo_command import train_alone

from trainer.datasets.demos.demo import make_demo

# words of digits are rewarded, so that a model that knows nothing learns; the answer depends on what it wrote
# the third turn reads a new history
TALKER = """
from trainer.rollout.envs.environments import History

class Environment:
    def reset(self, task):
        self.turn, self.metrics = 0, {}
        return task["messages"]

    async def step(self, response):
        self.turn += 1
        reward = sum(character in "0123456789" for character in response) / 8
        self.metrics["length"] = len(response)
        if self.turn == 3:
            return reward, True
        if self.turn == 2:
            said = {"role": "assistant", "content": "yes"}
            return History([{"role": "user", "content": str(len(response))}, said, {"role": "user", "content": "on"}]), reward
        return [{"role": "tool", "content": str(len(response))}, {"role": "user", "content": "go on"}], reward, False
"""
# three tries of `reset` fail for one of two prompts, and a connection in some first turns
LOSSY = TALKER.replace(
    "    def reset(self, task):\n",
    "    def reset(self, task):\n"
    "        if int(task['messages'][-1]['content'][-1]) % 2:\n            raise KeyError('no sum')\n",
).replace(
    "        self.turn += 1\n",
    "        self.turn += 1\n        if len(response) % 3 == 0:\n            raise ConnectionResetError('gone')\n",
)
# another part of the score: 1 for some episodes that came to their ends, if all of their group are there
EVEN = """
def reward_func(prompts, responses, labels, finished, groups):
    rows = zip(responses, finished, groups)
    return [groups.count(group) / 4 if done and len(text) % 2 == 0 else None for text, done, group in rows]
"""
GAMMA = 0.9
TURNS = ["--advantage_estimator", "reinforce", "--gamma", str(GAMMA), "--turn_rewards"]
GROUP = ["--advantage_estimator", "group_norm", "--loss_agg", "token"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("env")
    make_demo(str(folder / "demo"))
    (folder / "talker.py").write_text(TALKER)
    (folder / "lossy.py").write_text(LOSSY)
    (folder / "even.py").write_text(EVEN)
    takes_turns = "class Environment:\n    def __init__(self, turns):\n        self.turns = turns\n\n"
    short = TALKER.replace("class Environment:\n", takes_turns).replace("== 3", "== self.turns")
    (folder / "short.py").write_text(short)
    return folder


def flags(folder, name: str, *more: str) -> list[str]:
    line = ["--pretrain", f"{folder}/demo/model", "--dataset", f"{folder}/demo/prompts.jsonl", "--max_samples", "24"]
    line += ["--env", f"{folder}/talker.py", "--param_dtype", "fp32", "--no_save", "--prompt_max_len", "64"]
    line += [
        "--generate_max_len",
        "96",
        "--rollout_batch_size",
        "4",
        "--learning_rate",
        "1e-3",
        "--lr_scheduler",
        "constant",
    ]
    line += [
        "--n_samples_per_prompt",
        "4",
        "--train_batch_size",
        "16",
        "--micro_train_batch_size",
        "4",
        "--max_steps",
        "4",
    ]
    line += ["--stop", *"aeiou135"]  # so that turns of a model that knows nothing end
    return [*line, "--output_dir", str(folder / name), *more]


def of_groups(rows: list[dict]) -> list[list[float]]:
    """Advantages of the generated tokens of each row: equation 3 of GRPO, from the scores of its group of 4."""
    found = []
    for place, row in enumerate(rows):
        start = place - place % 4
        scores = [other["score"] for other in rows[start : start + 4] if not other.get("failed")]
        deviation = statistics.stdev(scores) if len(scores) > 1 else 0.0
        lead = 0.0 if row.get("failed") else row["score"] - statistics.fmean(scores)
        found.append([lead / (deviation + 1e-6)] * len(row["log_probs"]))
    return found


def of_turns(rows: list[dict]) -> list[list[float]]:
    """Discounted sums of the rewards of this turn and of later ones, whitened over all tokens."""
    found = []
    for row in rows:
        lengths = [end - start for start, end in row["turns"]]
        rewards = [r for n, reward in zip(lengths, row["turn_rewards"]) for r in [0.0] * (n - 1) + [reward]]
        found.append([sum(GAMMA ** (k - t) * rewards[k] for k in range(t, len(rewards))) for t in range(len(rewards))])
    everything = [value for values in found for value in values]
    mean, variance = statistics.fmean(everything), statistics.pvariance(everything)
    return [[(value - mean) / math.sqrt(variance + 1e-8) for value in values] for values in found]


def plain_first_step(folder, rows: list[dict], advantages_of=of_groups) -> tuple[float, float]:
    """Loss and gradient norm of the first step, by the formula: minus the mean over generated tokens of A log p."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "demo/model", dtype=torch.float32)
    surrogate, total, count = 0.0, 0.0, 0
    for row, advantages in zip(rows, advantages_of(rows), strict=True):
        if row.get("failed"):
            continue
        ids, shift = row["prompt_ids"] + row["response_ids"], len(row["prompt_ids"])
        bounds = [0, *(shift + start for start in row.get("starts", [])), len(ids)]
        histories = [torch.tensor([ids[start:end]]) for start, end in pairwise(bounds)]
        log_probs = torch.cat([model(history).logits[0].double().log_softmax(-1) for history in histories])
        generated = [shift + i for start, end in row["turns"] for i in range(start, end)]
        assert len(generated) == len(row["log_probs"])
        surrogate = surrogate - sum(a * log_probs[i - 1, ids[i]] for a, i in zip(advantages, generated, strict=True))
        total, count = total - sum(advantages), count + len(generated)
    (surrogate / count).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    return total / count, norm.item()


def test_layouts_replay_and_resume(folder):
    frozen, steps = ["--rollouts_from", f"{folder}/fsdp2/rollouts.jsonl"], f"{folder}/fsdp2/checkpoints/step_2"
    tp2, ring = ["--tensor_parallel_size", "2"], ["--ring_attn_size", "2"]
    runs = {
        "fsdp2": ["--save_steps", "2"],
        "resumed": ["--load_checkpoint", steps],
        "zero3": ["--backend", "deepspeed", "--zero_stage", "3"],
        "tp2": [*tp2, *frozen],
        "packed": ["--packing_samples", *frozen],
        "ring": [*ring, *frozen],
        "shared": ["--share_prompts", *frozen],
        "zero1-tp2": ["--backend", "deepspeed", "--zero_stage", "1", *tp2, *frozen],
        "sandbox": ["--env_sandbox", "--sample_pages", "2", "--max_steps", "2"],
        "lossy": ["--env", f"{folder}/lossy.py", "--max_failed_share", "0.9", "--max_steps", "1"],
        "lossy-lockstep": ["--env", f"{folder}/lossy.py", "--max_failed_share", "0.9", "--max_steps", "1"],
        "chosen": ["--dataset", f"{folder}/chosen.jsonl", "--env_key", "kind", "--env_last_turn_text", "Last turn."],
        "turns": [*TURNS, "--max_steps", "1"],
        "turns-zero1-tp2": [*TURNS, "--backend", "deepspeed", "--zero_stage", "1", *tp2, "--max_steps", "1"],
        "scored": [*TURNS, "--reward_func", f"{folder}/even.py", "--reward_weights", "0.5", "--max_steps", "1"],
        "gae": ["--advantage_estimator", "gae", "--critic_learning_rate", "1e-3", "--max_steps", "2"],
    }
    runs["lossy-lockstep"].append("--env_lockstep")
    prompts = [json.loads(line) for line in (folder / "demo/prompts.jsonl").read_text().splitlines()]
    rows = [json.dumps(row | {"kind": ("long", "short")[n % 2]}) for n, row in enumerate(prompts)]
    (folder / "chosen.jsonl").write_text("\n".join(rows))
    several = f"long={folder}/talker.py,short={folder}/short.py"
    runs["chosen"] += ["--env", several, "--env_args", "{short: {turns: 2}}", "--env_sandbox", "--max_steps", "1"]
    lines = [["train_ppo", *flags(folder, name, *GROUP, *more)] for name, more in runs.items()]
    for line in lines:
        if frozen[0] in line:
            at = line.index("--env")
            del line[at : at + 2]
    train_many(2, lines, folder, timeout=600)
    first = read_steps(folder / "fsdp2")
    rows = [json.loads(line) for line in (folder / "fsdp2/rollouts.jsonl").read_text().splitlines()]
    assert {len(row["turns"]) for row in rows} == {2, 3}, "some have no room for a turn"
    assert all(row["finished"] == (len(row["turns"]) == 3) for row in rows)
    assert all(row.get("starts", []) == [end for _, end in row["turns"][1:-1]] for row in rows)
    loss, norm = plain_first_step(folder, [row for row in rows if row["rollout"] == 0])
    assert first[0]["loss"] == pytest.approx(loss, abs=1e-5) and first[0]["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert first[0]["rollout_logprob_diff_max"] < 1e-4 and first[0]["ratio_deviation"] == 0
    assert (
        1.5 < first[0]["histories"] <= 2 < first[0]["turns"]
        and first[0]["env_tokens"] > 10
        and first[0]["reward_length"] > 0
    )
    assert first[0]["tokens"] == sum(len(row["log_probs"]) for row in rows if row["rollout"] == 0)
    assert [row["loss"] for row in read_steps(folder / "resumed")] == [row["loss"] for row in first[2:]]
    for row, other in zip(read_steps(folder / "sandbox"), first[:2], strict=True):
        assert (row["loss"], row["reward"], row["batch_hash"]) == (other["loss"], other["reward"], other["batch_hash"])
        page = (folder / "sandbox" / row["sample_page"]).read_text()
        assert page.count("<h2>Sample") == 2 and "training -" in page and row["reward_lost"] == 0
    for name in ("zero3", "tp2", "packed", "ring", "shared", "zero1-tp2"):
        found = read_steps(folder / name)
        assert [row["loss"] for row in found] == pytest.approx([row["loss"] for row in first], abs=1e-5), name
        assert [row["grad_norm"] for row in found] == pytest.approx([row["grad_norm"] for row in first], rel=1e-4), name
    assert len(read_steps(folder / "gae")) == 2
    for name in ("turns", "turns-zero1-tp2", "scored"):
        [step] = read_steps(folder / name)
        rows = [json.loads(line) for line in (folder / name / "rollouts.jsonl").read_text().splitlines()]
        assert all(row["score"] == pytest.approx(sum(row["turn_rewards"])) for row in rows)
        assert any(row["score"] for row in rows)
        loss, norm = plain_first_step(folder, rows, of_turns)
        assert step["loss"] == pytest.approx(loss, abs=1e-5) and step["grad_norm"] == pytest.approx(norm, rel=1e-4)
    added = [row["score"] - row["metrics"]["env"] for row in rows]
    assert added == pytest.approx([0.5 * row["metrics"].get("even", 0.0) for row in rows])
    assert {row["metrics"].get("even") for row in rows} == {None, 1.0}
    assert step["reward"] == pytest.approx(step["reward_env"] + statistics.fmean(added))
    rows = [json.loads(line) for line in (folder / "chosen/rollouts.jsonl").read_text().splitlines()]
    for row in rows:
        most = (3, 2)[row["row"] % 2]
        assert len(row["turns"]) <= most and row["end"] in (
            ("done",) if len(row["turns"]) == most else ("answer", "tokens")
        )
    assert {(row["row"] % 2, row["end"]) for row in rows} >= {(0, "done"), (1, "done")}
    shares = {name: value for name, value in read_steps(folder / "chosen")[0].items() if name.startswith("end_")}
    assert shares["end_done"] == sum(row["end"] == "done" for row in rows) / 16 and sum(shares.values()) == 1
    for name in ("lossy", "lossy-lockstep"):
        [step] = read_steps(folder / name)
        rows = [json.loads(line) for line in (folder / name / "rollouts.jsonl").read_text().splitlines()]
        causes = {row["failed"].split(": ")[1] for row in rows if "failed" in row}
        assert len(rows) == 16 and causes == {"reset raised KeyError", "step raised ConnectionResetError"}, causes
        assert step["failed_fraction"] == sum("failed" in row for row in rows) / 16 < 0.9
        loss, norm = plain_first_step(folder, rows)
        assert step["loss"] == pytest.approx(loss, abs=1e-5) and step["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_an_environment_that_fails_ends_the_run_with_a_checkpoint(folder):
    """In the second rollout. A resumed run with a sound environment goes on from there."""
    count = folder / "count"
    count.write_text("")
    check = f"        open({str(count)!r}, 'a').write('x')\n        1 // (len(open({str(count)!r}).read()) < 50)\n"
    (folder / "failing.py").write_text(TALKER.replace("        self.turn += 1\n", "        self.turn += 1\n" + check))
    line = flags(folder, "failing", *GROUP)
    line[line.index("--env") + 1] = f"{folder}/failing.py"
    code, output = train_alone(line)
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert code == 2 and len(errors) == 1 and "Traceback" not in output, output[-3000:]
    assert "failing.py: step raised ZeroDivisionError" in errors[0]
    assert [path.name for path in (folder / "failing/checkpoints").glob("step_*")] == ["step_1"]


@pytest.mark.parametrize(
    "error, more",
    [
        ("--env .* with --remote_rm_url: ", ["--remote_rm_url", "http://127.0.0.1:1"]),
        (
            "--env_max_turns 3 without --env: ",
            ["--env", "", "--reward_func", "exact_match", "--label_key", "label", "--env_max_turns", "3"],
        ),
        ("--env: ", ["--env", "nowhere.py"]),
    ],
)
def test_flags_that_do_not_go_together(error, more, tmp_path):
    from trainer.cli.train_ppo import parse
    from trainer.errors import UserError
    from trainer.runs.rl.rl_checks import validate

    args, _ = parse(flags(tmp_path, "wrong", *GROUP, *more))
    with pytest.raises(UserError, match=error):
        validate(args)


def test_the_calculator_of_the_demo(tmp_path):
    code, output = run_process([sys.executable, str(ROOT / "scripts/calculator_env.py"), str(tmp_path)])
    assert code == 0, output
    from trainer.rollout.envs.environments import load_environment

    row = json.loads((tmp_path / "prompts_eval.jsonl").read_text().splitlines()[0])
    a, b = row["numbers"]
    env = load_environment(str(ROOT / "scripts/calculator_env.py"))()
    assert env.reset(row) == row["messages"]
    assert env.step(f"calc {a} + {b}") == ([{"role": "tool", "content": str(a + b)}], 0.5, False)
    assert env.step(f" {a + b}") == (0.5, True) and env.metrics == {"calls": 1}


def test_the_tool_of_the_demo(tmp_path):
    """A call in the template of the demo is read as one, and its result is the next message."""
    code, output = run_process([sys.executable, str(ROOT / "scripts/adder_env.py"), str(tmp_path)])
    assert code == 0, output
    from trainer.datasets.conversations.tool_formats import tool_calls
    from trainer.rollout.envs.environments import Response, load_environment

    row = json.loads((tmp_path / "prompts_eval.jsonl").read_text().splitlines()[0])
    a, b = row["numbers"]
    env = load_environment(str(ROOT / "scripts/adder_env.py"))()
    assert env.reset(row) == row["messages"]
    for text, found in {
        f"[add(a={a}, b={b})]": ([{"role": "tool", "name": "add", "content": str(a + b)}], 0.5),
        f"[add(a={a}, b=)]": (0.0, True),
        f"{a + b}": (0.0, True),
    }.items():
        env.reset(row)
        assert env.step(Response(text, text, tool_calls(text, env.tools), True)) == found
    env.reset(row)
    env.step(Response("", "", [{"name": "add", "arguments": {"a": a, "b": b}}], True))
    assert env.step(Response(f" {a + b}", "", [], True)) == (0.5, True) and env.metrics == {"calls": 1}
