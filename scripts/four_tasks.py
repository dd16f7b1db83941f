"""Does reinforcement learning learn? Four small tasks, both backends, one table.

python scripts/four_tasks.py FOLDER

One short SFT shows the tiny demo model the form of all tasks. Its answers are careless: most of them are wrong. GRPO then learns each
task from its reward alone. The table has the mean reward of held-out prompts, sampled at temperature 1, before and after.
The command fails if a task gains less than 0.3.
"""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import calculator_env

NUM_ROWS = {"sft": 1500, "prompts": 2000, "eval": 100}
RIGHT = 0.4  # the share of right answers in the data of SFT
GAIN = 0.3
SFT_STEPS, STEPS = 400, 80
BACKENDS = ("fsdp2", "deepspeed")


def larger(rng: random.Random) -> tuple[str, str, str]:
    """A question, its answer, and a wrong answer: the larger of two numbers."""
    low, high = sorted(rng.sample(range(10, 100), 2))
    first, second = rng.sample((low, high), 2)
    return f"larger {first} {second}", str(high), str(low)


def parity(rng: random.Random) -> tuple[str, str, str]:
    """Whether a number of three digits is even (0) or odd (1)."""
    number = rng.randint(100, 999)
    return f"parity {number}", str(number % 2), str(1 - number % 2)


def tags(rng: random.Random) -> tuple[str, str, str]:
    """A digit, which the built-in reward `answer` only sees in tags."""
    digit = str(rng.randint(0, 9))
    return f"tags {digit} of {rng.randint(100, 999)}", digit, digit


# name: (what makes a question, flags of the reward)
QUESTIONS = {
    "larger": (larger, ("--reward_func", "exact_match", "--label_key", "label")),
    "parity": (parity, ("--reward_func", "exact_match", "--label_key", "label")),
    "tags": (tags, ("--reward_func", "answer", "--label_key", "label")),
}
TOOL = ("--env", "scripts/calculator_env.py", "--env_max_turns", "2")
TASKS = {name: flags for name, (_, flags) in QUESTIONS.items()} | {"tool": TOOL}


def talk(name: str, rng: random.Random) -> dict:
    """A conversation of a careless assistant."""
    if name == "tool":
        return calculator_env.talk(calculator_env.row(rng), rng)
    question, right, wrong = QUESTIONS[name][0](rng)
    answer = right if rng.random() < RIGHT else wrong
    if name == "tags" and rng.random() < RIGHT:
        answer = f"<answer>{answer}</answer>"
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def prompt(name: str, rng: random.Random) -> dict:
    if name == "tool":
        return calculator_env.row(rng)
    question, right, _ = QUESTIONS[name][0](rng)
    return {"messages": [{"role": "user", "content": question}], "label": right}


def write_data(folder: Path) -> None:
    """Write SFT conversations of all tasks, and prompts of each. No held-out prompt is trained on by reinforcement learning."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    talks = [talk(name, rng) for name in TASKS for _ in range(NUM_ROWS["sft"])]
    rng.shuffle(talks)
    write(folder / "sft.jsonl", talks)
    for name in TASKS:
        asked = {json.dumps(row["messages"]): row for row in (prompt(name, rng) for _ in range(NUM_ROWS["prompts"]))}
        rows = list(asked.values())
        write(folder / f"{name}_eval.jsonl", rows[: NUM_ROWS["eval"]])
        write(folder / f"{name}.jsonl", rows[NUM_ROWS["eval"] :])


def write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def launch(command: str, *flags: str) -> float:
    """Run a training command on two ranks. Returns its seconds."""
    start = time.monotonic()
    torchrun = ("torchrun", "--standalone", "--nproc_per_node", "2", "-m", f"trainer.cli.{command}")
    subprocess.run((*torchrun, *flags, "--param_dtype", "fp32", "--lr_scheduler", "constant"), check=True)
    return time.monotonic() - start


def learn(name: str, backend: str, folder: Path) -> dict:
    """Train one task on one backend. Returns its row of the table."""
    data, output = folder / "data", folder / f"{name}-{backend}"
    sizes = ["--rollout_batch_size", "16", "--n_samples_per_prompt", "8", "--train_batch_size", "128"]
    sizes += ["--micro_rollout_batch_size", "64", "--micro_train_batch_size", "64"]
    sizes += ["--prompt_max_len", "64", "--generate_max_len", "64"]
    flags = ["--pretrain", f"{folder}/sft/model", "--dataset", f"{data}/{name}.jsonl", *TASKS[name], *sizes]
    flags += ["--eval_dataset", f"{data}/{name}_eval.jsonl", "--eval_temperature", "1", "--eval_samples", "2"]
    flags += ["--advantage_estimator", "group_norm", "--learning_rate", "5e-4"]
    flags += ["--max_steps", str(STEPS), "--eval_steps", str(STEPS), "--logging_steps", "20"]
    seconds = launch("train_ppo", "--backend", backend, *flags, "--output_dir", str(output))
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["eval_reward"] for line in lines if "eval_reward" in line]
    return {"task": name, "backend": backend, "start": rewards[0], "end": rewards[-1], "seconds": seconds}


def main(folder: Path) -> None:
    subprocess.run((sys.executable, "-m", "trainer.cli.make_demo", "--output_dir", f"{folder}/demo"), check=True)
    write_data(folder / "data")
    flags = ["--multiturn", "--max_len", "96", "--train_batch_size", "32", "--micro_train_batch_size", "16"]
    flags += ["--learning_rate", "2e-3"]
    flags += ["--pretrain", f"{folder}/demo/model", "--dataset", f"{folder}/data/sft.jsonl", "--logging_steps", "100"]
    launch("train_sft", "--backend", "fsdp2", *flags, "--max_steps", str(SFT_STEPS), "--output_dir", f"{folder}/sft")
    rows = [learn(name, backend, folder) for name in TASKS for backend in BACKENDS]
    write(folder / "table.jsonl", rows)
    print("| task | backend | start | end | steps | seconds |\n|---|---|---|---|---|---|")
    for row in rows:
        print("| {task} | {backend} | {start:.3g} | {end:.3g} | {steps} | {seconds:.0f} |".format(steps=STEPS, **row))
    short = [f"{row['task']} on {row['backend']}" for row in rows if row["end"] - row["start"] < GAIN]
    if short:
        sys.exit(f"gained less than {GAIN}: {', '.join(short)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
