"""Measure SFT speed on one machine: train_sft on both backends against a loop written by hand and TRL's SFTTrainer.

    python scripts/bench/sft_speed.py --data ../shared/data [--jobs fixed lengths] [--rounds 5]
        [--update docs/benchmarks.md]
    python scripts/bench/sft_speed.py --data ../shared/data --jobs real --pretrain my_smollm2 --max_ranks 1 --steps 6

The job "real" trains the model of --pretrain. Every contender saves it at the end, so the seconds outside the steps
count imports, loading and saving. The other jobs train a small random model and save nothing.

Every round runs every contender once, in its own process, one after the other. A figure is the median over the rounds
of the median step. tokens/s counts the tokens of samples, without padding. Ratios compare runs of the same round.
"""

import argparse
import json
import os
import platform
import resource
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent.parent
HERE = Path(__file__).resolve().parent
BACKENDS = {"FSDP2": ["--backend", "fsdp2"], "DeepSpeed": ["--backend", "deepspeed", "--zero_stage", "1"]}
TITLES = {
    "fixed": "256 tokens per sample, batches of 8 in one forward pass",
    "lengths": "GSM8K, real lengths, batches of 64; padded: 16 samples per forward pass, packed: as many tokens",
    "real": "GSM8K, real lengths, batches of 8; padded: 4 samples per forward pass, packed: as many tokens",
}
WARM_UP = 3  # first steps, which no figure counts
WARM_UP_REAL = 1  # a step takes 10 s there


def make_model(folder: Path, tokenizer_folder: Path) -> None:
    """Save a random Qwen3 of 5 million parameters."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=256, intermediate_size=768, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_long_rows(source: Path, target: Path, per_row: int = 4) -> None:
    """Join several GSM8K rows into each text, so that every text fills 256 tokens."""
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    texts = [f"{row['question']}\n{row['answer']}\n\n" for row in rows]
    joined = ["".join(texts[first : first + per_row]) for first in range(0, len(texts) - per_row, per_row)]
    target.write_text("".join(json.dumps({"text": text}) + "\n" for text in joined))


def contenders(job: str, steps: int, folder: Path, data: Path, max_ranks: int) -> dict[str, list[str]]:
    """The command of each contender, without its --output_dir."""
    flags = ["--pretrain", str(folder / "model"), "--param_dtype", "fp32", "--learning_rate", "1e-4"]
    flags += ["--logging_steps", "1000", "--no_shuffle", "--weight_decay", "0.1"]
    flags += [] if job == "real" else ["--no_save"]
    if job == "fixed":
        flags += ["--dataset", str(folder / "long.jsonl"), "--pretrain_mode", "--input_key", "text"]
        flags += ["--max_len", "256", "--train_batch_size", "8"]
        micro, packed = 8, []
    else:
        flags += ["--dataset", str(data / "gsm8k/train.jsonl"), "--input_key", "question", "--output_key", "answer"]
        size, micro, tokens = (8, 4, 1024) if job == "real" else (64, 16, 8192)
        flags += ["--max_len", "1024", "--train_batch_size", str(size)]
        packed = ["--packing_samples", "--max_tokens_per_micro_batch", str(tokens)]
    ours = [*flags, "--max_steps", str(steps), *(packed or ["--micro_train_batch_size", str(micro)])]
    own = {
        f"train_sft {name}": [sys.executable, "-m", "trainer.cli.train_sft", *ours, *b] for name, b in BACKENDS.items()
    }
    if not packed:
        ours[ours.index("--micro_train_batch_size") + 1] = str(micro // 2)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "trainer.cli.train_sft"]
    two = {f"train_sft {name}, 2 ranks": [sys.executable, *torchrun, *ours, *b] for name, b in BACKENDS.items()}
    others = {"plain loop": ("plain_loop.py", []), "TRL SFTTrainer": ("trl_loop.py", [])}
    if packed:
        others["TRL SFTTrainer, packed"] = ("trl_loop.py", packed)
    by_hand = {
        name: [sys.executable, str(HERE / script), str(steps), str(micro), *flags, *more]
        for name, (script, more) in others.items()
    }
    if job == "fixed":  # there is one shape, which is compiled in the first step; no figure counts it
        for commands, names in ((own, list(own)), (by_hand, ["TRL SFTTrainer"])):
            commands |= {f"{name}, compiled": [*commands[name], "--compile"] for name in names}
    return {**own, **by_hand, **(two if max_ranks > 1 else {})}


def environment(threads: int, **env: str) -> dict[str, str]:
    """The environment of a measured process with this number of threads."""
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **env}


def processor_seconds() -> float:
    """Seconds that the processor has worked for the children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def timed(command: list[str], threads: int, clock=time.perf_counter, **env: str) -> float:
    """Seconds of a whole process with this number of threads. If it fails, the script ends with its output."""
    started = clock()
    done = subprocess.run(command, env=environment(threads, **env), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return clock() - started


def run(command: list[str], two_ranks: bool, folder: Path, warm_up: int = WARM_UP) -> dict[str, float]:
    """Figures of one process: median tokens/s of a step, spread of the step time, seconds outside the steps, memory."""
    shutil.rmtree(folder, ignore_errors=True)
    threads = max(1, (os.cpu_count() or 1) // (2 if two_ranks else 1))
    wall = timed([*command, "--output_dir", str(folder)], threads)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "step_time" in row]
    # train_sft writes the speed itself; its "tokens" counts only tokens with a loss
    speeds = [row.get("tokens_per_second") or row["tokens"] / row["step_time"] for row in rows[warm_up:]]
    tenths = statistics.quantiles([row["step_time"] for row in rows[warm_up:]], n=10, method="inclusive")
    return {
        "tokens_per_second": statistics.median(speeds),
        "step_time_p90_over_p10": tenths[-1] / tenths[0],
        "seconds_around_steps": wall - sum(row["step_time"] for row in rows),
        "peak_memory_mib": rows[-1]["peak_memory_bytes"] / 2**20,
    }


def measure(job: str, rounds: int, steps: int, data: Path, max_ranks: int, pretrain: Path) -> dict[str, list[dict]]:
    """The figures of every round by contender."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if job == "real":
            (folder / "model").symlink_to(pretrain.resolve())
        else:
            make_model(folder / "model", data / "models/stories260K-hf")
        make_long_rows(data / "gsm8k/train.jsonl", folder / "long.jsonl")
        commands = contenders(job, steps, folder, data, max_ranks)
        found: dict[str, list[dict]] = {name: [] for name in commands}
        warm_up = WARM_UP_REAL if job == "real" else WARM_UP
        for number in range(rounds):
            for name, command in commands.items():
                found[name].append(run(command, "2 ranks" in name, folder / "run", warm_up))
                print(
                    f"{job} round {number + 1}: {name}: {found[name][-1]['tokens_per_second']:.0f} tokens/s", flush=True
                )
    return found


def ratio(found: dict[str, list[dict]], name: str, other: str) -> float:
    pairs = zip(found[name], found[other])
    return statistics.median(a["tokens_per_second"] / b["tokens_per_second"] for a, b in pairs)


def table(found: dict[str, list[dict]]) -> list[str]:
    lines = [
        "| | tokens/s (median, min to max) | / plain loop | / TRL | / TRL packed | / TRL compiled | step time p90/p10 | "
        "outside the steps, s | peak MiB |"
    ]
    lines.append("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for name, figures in found.items():
        speeds = sorted(f["tokens_per_second"] for f in figures)
        others = [
            f"{ratio(found, name, other):.2f}" if other in found else ""
            for other in ("plain loop", "TRL SFTTrainer", "TRL SFTTrainer, packed", "TRL SFTTrainer, compiled")
        ]
        rest = [
            statistics.median(f[key] for f in figures)
            for key in ("step_time_p90_over_p10", "seconds_around_steps", "peak_memory_mib")
        ]
        lines.append(
            f"| {name} | {statistics.median(speeds):.0f} ({speeds[0]:.0f} to {speeds[-1]:.0f}) | "
            f"{' | '.join(others)} | {rest[0]:.2f} | {rest[1]:.1f} | {rest[2]:.0f} |"
        )
    return lines


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if os.path.exists("/proc/cpuinfo") else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    packages = [name for name in ("torch", "transformers", "deepspeed", "trl") if find_spec(name)]
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    return (
        f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores; "
        f"Python {platform.python_version()}, {versions}"
    )


def command_line() -> str:
    """The command line of this script, without the flags for its results."""
    words = [f"scripts/bench/{Path(sys.argv[0]).name}", *sys.argv[1:]]
    for flag in {"--update", "--json"} & set(words):
        del words[words.index(flag) : words.index(flag) + 2]
    return shlex.join(["python", *words])


def plot(results: dict[str, dict[str, list[dict]]], path: Path) -> None:
    figure = Figure(figsize=(9, 2.6 * len(results)), layout="constrained")
    for axes, (job, found) in zip(figure.subplots(len(results), squeeze=False)[:, 0], results.items()):
        medians = [statistics.median(f["tokens_per_second"] for f in figures) for figures in found.values()]
        axes.barh(list(found), medians, color=["C0" if name.startswith("train_sft") else "C7" for name in found])
        axes.invert_yaxis()
        axes.set_title(TITLES[job], fontsize="medium")
        axes.set(xlabel="tokens/s")
    figure.savefig(path, dpi=110)


def update(path: Path, name: str, text: str) -> None:
    """Put `text` between the two comments with this name. Without them, both go to the end of the file."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    content = path.read_text()
    if begin not in content:
        content = f"{content.rstrip()}\n\n{begin}\n{end}\n"
    before, rest = content.split(begin)
    path.write_text(f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with gsm8k/ and models/stories260K-hf/")
    parser.add_argument("--jobs", nargs="+", choices=TITLES, default=["fixed", "lengths"])
    parser.add_argument("--pretrain", type=Path, help="the model of the job real; the others make one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--max_ranks", type=int, choices=[1, 2], default=2)
    parser.add_argument("--json", type=Path, default=Path("sft_speed.json"))
    parser.add_argument("--update", type=Path, help="Markdown file to write the tables into, with a picture next to it")
    args = parser.parse_args()
    if (args.jobs == ["real"]) != bool(args.pretrain):
        parser.error("--jobs real stands alone and needs --pretrain, which no other job takes")
    results = {
        job: measure(job, args.rounds, args.steps, args.data.resolve(), args.max_ranks, args.pretrain)
        for job in args.jobs
    }
    args.json.write_text(json.dumps({"machine": machine(), "results": results}, indent=1))
    model = args.pretrain.name if args.pretrain else "A random Qwen3 of 5 million parameters"
    lines = ["## SFT speed" if not args.pretrain else f"### {model}", ""]
    lines += [f"`{command_line()}`, {args.rounds} rounds: {machine()}.", f"{model}, fp32. A ratio compares runs of the"]
    lines += ["same round; the table shows medians.", ""]
    for job, found in results.items():
        lines += [f"**{TITLES[job]}**", "", *table(found), ""]
    print("\n".join(lines))
    if args.update and args.pretrain:
        update(args.update, "sft_speed_real", "\n".join(lines))
    elif args.update:
        picture = args.update.parent / "sft_speed.png"
        plot(results, picture)
        update(args.update, "sft_speed", "\n".join([*lines, f"![SFT speed]({picture.name})", ""]))


if __name__ == "__main__":
    main()
