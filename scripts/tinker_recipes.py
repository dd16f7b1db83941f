"""Run two recipes of tinker-cookbook unchanged against `serve_train`, then the same by `train_sft` and `train_ppo`.

Run it in an environment with `pip install tinker "tinker_cookbook[math-rl]"`. Name the command `trainer` of the server's environment:

    python scripts/tinker_recipes.py .venv/bin/trainer FOLDER [--nproc 2]

The recipes are `chat_sl` on a file of conversations and `math_rl` on sums. The script only keeps what they send and get.
"""

import argparse
import json
import os
import random
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import tinker
from tinker_cookbook.recipes.math_rl.arithmetic_env import ArithmeticDataset
from transformers import AutoTokenizer

ROWS, STEPS, RATE, RANK, ALPHA, SEED = 32, 10, 1e-3, 8, 32, 7
GROUPS, GROUP, ROUNDS, UPDATES = 8, 8, 4, 2


def conversation(x: int, y: int) -> dict:
    """A question and its answer, in the words of the recipe's environment."""
    texts = ("What is 4 + 5?", "9", f"What is {x} + {y}?", str(x + y))
    roles = ("user", "assistant", "user", "assistant")
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, texts)]}


def write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def train(trainer: str, command: str, folder: Path, *flags: object) -> list[dict]:
    """Run a command of ours, and read its steps."""
    line = [trainer, command, "--device", "cpu", "--param_dtype", "fp32", "--output_dir", folder, *flags]
    subprocess.run([str(part) for part in line], check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "grad_norm" in row]


def recorded(recipe: str, **options: object) -> list[tuple[list, float, float]]:
    """Run a recipe. Returns (rows, sum of the losses, gradient norm) of each of its steps."""
    found, original = {"forward_backward": [], "optim_step": []}, {}
    for name, calls in found.items():
        original[name] = getattr(tinker.TrainingClient, name)

        def call(client, *values, _own=original[name], _calls=calls, **named):
            future = _own(client, *values, **named)
            _calls.append((values[0], future))
            return future

        setattr(tinker.TrainingClient, name, call)
    sys.argv = [recipe, *(f"{name}={value}" for name, value in options.items())]
    try:
        runpy.run_module(recipe, run_name="__main__")
    finally:
        for name, own in original.items():
            setattr(tinker.TrainingClient, name, own)
    sums = [future.result().metrics["loss:sum"] for _, future in found["forward_backward"]]
    norms = [future.result().metrics["grad_norm"] for _, future in found["optim_step"]]
    return list(zip([rows for rows, _ in found["forward_backward"]], sums, norms))


def tokens_of(datum) -> list[int]:
    return [*datum.model_input.to_ints(), int(datum.loss_fn_inputs["target_tokens"].data[-1])]


def as_rollout(data: list, rollout: int, end: int) -> list[dict]:
    """The samples of a round of the recipe, as lines of rollouts.jsonl. A score is an advantage, whose mean is 0."""
    rows = []
    for number, datum in enumerate(data):
        given = {name: np.array(datum.loss_fn_inputs[name].data) for name in ("logprobs", "advantages")}
        start = 1 + int(np.flatnonzero(given["logprobs"])[0])  # a prompt has zeros
        ids, log_probs = tokens_of(datum), given["logprobs"][start - 1 :].tolist()
        own = {"rollout": rollout, "number": number, "row": number // GROUP, "prompt_ids": ids[:start]}
        own |= {"response_ids": ids[start:], "log_probs": log_probs, "finished": ids[-1] == end, "label": ""}
        rows.append(own | {"score": float(given["advantages"][-1]), "metrics": {}})
    return rows


def compared(name: str, recipe: list[tuple[float, float]], ours: list[tuple[float, float]]) -> str:
    assert len(recipe) == len(ours), (len(recipe), len(ours))
    (losses, norms), (own_losses, own_norms) = np.array(recipe).T, np.array(ours).T
    loss, norm = np.abs(losses - own_losses).max(), np.abs(norms - own_norms).max() / norms.max()
    return f"| {name} | {len(recipe)} | {losses.min():.4f} to {losses.max():.4f} | {loss:.1e} | {norm:.1e} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trainer")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--nproc", type=int, default=1, help="ranks of the server")
    given = parser.parse_args()
    trainer, folder = given.trainer, given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([trainer, "make_demo", "--output_dir", str(folder / "demo")], check=True, stdout=subprocess.DEVNULL)
    # the first model has seen the questions of the rounds to come, so that some of its answers are right
    asked = ArithmeticDataset(GROUPS, None, GROUP)
    asked = [group.env_thunk.args for number in range(ROUNDS) for group in asked.get_batch(number)]
    write(folder / "first.jsonl", [conversation(*random.Random(n).choice(asked)) for n in range(3200)])
    first = ("--pretrain", folder / "demo/model", "--dataset", folder / "first.jsonl", "--apply_chat_template")
    first += ("--train_batch_size", 32, "--micro_train_batch_size", 32, "--learning_rate", 3e-3)
    train(trainer, "sft", folder / "first", *first)
    model = folder / "first/model"
    tokenizer = AutoTokenizer.from_pretrained(model)
    of_adapter = ("--pretrain", model, "--lora_rank", RANK, "--lora_alpha", ALPHA, "--seed", SEED)
    line = [trainer, "serve_train", "--nproc", given.nproc, *of_adapter, "--port", 0, "--device", "cpu"]
    line += ["--param_dtype", "fp32", "--max_len", 256, "--output_dir", folder / "server"]
    with subprocess.Popen([str(part) for part in line], stdout=subprocess.PIPE, text=True) as server:
        try:
            lines = iter(server.stdout.readline, "")
            url = next(found.group(1) for text in lines if (found := re.search(r"training at (\S+)", text)))
            os.environ["TINKER_API_KEY"] = "tml-any"
            same = {"base_url": url, "model_name": model, "renderer_name": "qwen3_instruct", "lora_rank": RANK}
            same |= {"learning_rate": RATE, "behavior_if_log_dir_exists": "delete"}
            # sums of three digits, so each row has as many tokens with a loss
            rows = [conversation(x, 100 + 7 * n - x) for n in range(10) for x in range(7 * n, 7 * n + 32)]
            write(folder / "sums.jsonl", rows)
            own = {"dataset": folder / "sums.jsonl", "batch_size": ROWS, "max_length": 256, "lr_schedule": "constant"}
            own["train_on_what"] = "last_assistant_message"
            sft = recorded("tinker_cookbook.recipes.chat_sl.train", **same, **own, log_path=folder / "chat_sl")
            own = {"env": "arithmetic", "groups_per_batch": GROUPS, "group_size": GROUP, "max_steps": ROUNDS}
            own |= {"max_tokens": 6, "loss_fn": "importance_sampling", "num_substeps": UPDATES, "eval_every": 0}
            rl = recorded("tinker_cookbook.recipes.math_rl.train", **same, **own, log_path=folder / "math_rl")
        finally:
            server.terminate()
    table = [f"recipes of tinker-cookbook against serve_train on {given.nproc} ranks", "", HEAD]

    def of_batch(size: int) -> tuple:
        """Flags that give a mean over rows the step of a sum over rows: AdamW's epsilon is the only difference."""
        own = ("--train_batch_size", size, "--micro_train_batch_size", 8, "--adam_eps", 1e-8 / size, "--max_norm", 0)
        return (*of_adapter, *own, "--learning_rate", RATE, "--lr_scheduler", "constant", "--no_shuffle", "--no_save")

    texts = {tuple(tokenizer.apply_chat_template(row["messages"], return_dict=False)[:-1]): row for row in rows}
    write(folder / "order.jsonl", [texts[tuple(tokens_of(datum))] for data, _, _ in sft for datum in data])
    own = ("--dataset", folder / "order.jsonl", "--apply_chat_template")
    steps = train(trainer, "sft", folder / "sft", *of_batch(ROWS), *own)
    ours = [(row["loss"], row["grad_norm"]) for row in steps]
    table.append(compared("`chat_sl`, `train_sft`", [(loss / ROWS, norm / ROWS) for _, loss, norm in sft], ours))

    size = GROUPS * GROUP // UPDATES
    rounds = [[row for data, _, _ in rl[n : n + UPDATES] for row in data] for n in range(0, len(rl), UPDATES)]
    write(
        folder / "rollouts.jsonl",
        [row for number, data in enumerate(rounds) for row in as_rollout(data, number, tokenizer.eos_token_id)],
    )
    write(folder / "prompts.jsonl", [{"messages": [{"role": "user", "content": "What is 1 + 1?"}], "label": "2"}] * GROUPS * ROUNDS)  # fmt: skip
    own = ("--dataset", folder / "prompts.jsonl", "--label_key", "label", "--rollouts_from", folder / "rollouts.jsonl")
    own += (
        "--apply_chat_template",
        "--reward_func",
        "exact_match",
        "--n_samples_per_prompt",
        GROUP,
        "--init_kl_coef",
        0,
    )
    own += (
        "--rollout_batch_size",
        GROUPS,
        "--advantage_estimator",
        "dr_grpo",
        "--loss_agg",
        "sum",
        "--eps_clip",
        0.999,
    )
    own += ("--prompt_max_len", 128, "--generate_max_len", 6)
    steps = train(trainer, "ppo", folder / "ppo", *of_batch(size), *own, "--eps_clip_high", 1e6)
    ours = [(row["policy_loss"], row["grad_norm"]) for row in steps]
    table.append(compared("`math_rl`, `train_ppo`", [(loss / size, norm / size) for _, loss, norm in rl], ours))
    print("\n".join(table))


HEAD = "| Recipe and command | Steps | Losses | Largest difference | of the gradient norms, relative |\n|---|---|---|---|---|"


if __name__ == "__main__":
    main()
