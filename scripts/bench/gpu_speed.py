"""Measure SFT speed on one GPU: train_sft on both backends and TRL's SFTTrainer, against plain bf16 matrix products.

    python scripts/bench/gpu_speed.py [--data ../shared/data] [--rounds 5] [--update docs/benchmarks.md]

The model is random and has the shape of Qwen3 1.7B, in bf16 with fp32 master weights; on a GPU with less than 60 GiB,
that of Qwen3 0.6B. A sample has 4096 tokens, and gradient checkpointing is off. Without --data, the texts are random
digits and the tokenizer is that of the demo: the speed is the same. TRL takes part where it is installed. The training FLOP/s (see `trainer.metrics.flops_per_token`) are divided by the FLOP/s of
products of 8192 x 8192 matrices in the same round. `--tiny` only tests the script, in seconds on a CPU. Its figures
have no meaning.
"""

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import torch
from sft_speed import BACKENDS, HERE, command_line, environment, machine, make_long_rows, ratio, run, update

QWEN3_1_7B = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "head_dim": 128,
    "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 40960, "tie_word_embeddings": True,
}  # fmt: skip
QWEN3_0_6B = {**QWEN3_1_7B, "hidden_size": 1024, "intermediate_size": 3072}
MIN_BYTES_OF_1_7B = 60 << 30
TINY = {**QWEN3_1_7B, "vocab_size": 2048, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
TRL = "TRL SFTTrainer"


def make_model(folder: Path, tokenizer_folder: Path, shape: dict, length: int) -> float:
    """Save a random model in bf16. Returns its training FLOPs per token in rows of `length` tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

    from trainer.metrics import flops_per_token

    config = Qwen3Config(**shape)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer_folder).save_pretrained(folder)
    return flops_per_token(config, model.num_parameters(), length)


def matmul_rate(device: str, size: int, repeats: int = 50) -> float:
    """FLOP/s of products of square bf16 matrices."""
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(5):
        left @ right
    wait()
    started = time.perf_counter()
    for _ in range(repeats):
        left @ right
    wait()
    return repeats * 2 * size**3 / (time.perf_counter() - started)


def contenders(folder: Path, args, length: int) -> dict[str, list[str]]:
    """The command of each contender, without its --output_dir."""
    flags = ["--pretrain", str(folder / "model"), "--param_dtype", "bf16", "--no_save", "--learning_rate", "1e-4"]
    flags += ["--dataset", str(folder / "long.jsonl"), "--pretrain_mode", "--input_key", "text", "--no_shuffle"]
    flags += ["--max_len", str(length), "--train_batch_size", "8", "--logging_steps", "1000"]
    flags += ["--device", "cpu" if args.tiny else "cuda"]
    steps, micro = str(args.steps), str(args.micro)
    ours = [sys.executable, "-m", "trainer.cli.train_sft", *flags, "--max_steps", steps]
    ours += ["--micro_train_batch_size", micro]
    found = {f"train_sft {name}": [*ours, *backend] for name, backend in BACKENDS.items()}
    if find_spec("trl") is not None:
        found[TRL] = [sys.executable, str(HERE / "trl_loop.py"), steps, micro, *flags]
    found |= {f"{name}, compiled": [*command, "--compile"] for name, command in found.items()}
    found["train_sft FSDP2, --deterministic false"] = [*ours, *BACKENDS["FSDP2"], "--deterministic", "false"]
    return {name: command for name, command in found.items() if re.search(args.only, name)}


def make_random_rows(target: Path, length: int, num_rows: int = 512) -> None:
    """Write texts of at least `length` tokens. The demo's tokenizer makes one token of a digit."""
    digits = random.Random(0)
    rows = (" ".join(str(digits.randrange(10)) for _ in range(length)) for _ in range(num_rows))
    target.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with gsm8k/ and models/stories260K-hf/")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--micro", type=int, default=2, help="samples in one forward pass; a step has 8")
    parser.add_argument("--only", default="", metavar="REGEX", help="only contenders with a name that matches")
    parser.add_argument("--json", type=Path, help="write the figures of all rounds")
    parser.add_argument("--tiny", action="store_true", help="test this script on a CPU")
    parser.add_argument(
        "--matmul", action="store_true", help=argparse.SUPPRESS
    )  # in its own process, so that no memory stays
    parser.add_argument("--update", type=Path, help="Markdown file to write the table into")
    args = parser.parse_args()
    if args.matmul:
        print(matmul_rate("cpu", 512) if args.tiny else matmul_rate("cuda", 8192))
        return
    if not args.tiny and not torch.cuda.is_available():
        sys.exit("error: no CUDA device here (allowed: --tiny, to test this script)")
    name = "a CPU, to test the script" if args.tiny else torch.cuda.get_device_name()
    shape, length = (TINY, 256) if args.tiny else (QWEN3_1_7B, 4096)
    if not args.tiny and torch.cuda.get_device_properties(0).total_memory < MIN_BYTES_OF_1_7B:
        shape = QWEN3_0_6B
    rates: list[float] = []
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        if args.data:
            make_long_rows(args.data / "gsm8k/train.jsonl", folder / "long.jsonl", per_row=length // 64)
        else:
            from trainer.datasets.demos.demo import make_demo

            make_demo(str(folder / "demo"))
            make_random_rows(folder / "long.jsonl", length, num_rows=8 * args.steps)
        tokenizer = args.data / "models/stories260K-hf" if args.data else folder / "demo/model"
        flops = make_model(folder / "model", tokenizer, shape, length)
        commands = contenders(folder, args, length)
        found: dict[str, list[dict]] = {name: [] for name in commands}
        matmul = [sys.executable, __file__, *sys.argv[1:], "--matmul"]
        for number in range(args.rounds):
            rates.append(float(subprocess.check_output(matmul, env=environment(1))))
            for contender, command in commands.items():
                found[contender].append(run(command, False, folder / "run"))
                speed = found[contender][-1]["tokens_per_second"]
                print(f"round {number + 1}: {contender}: {speed:.0f} tokens/s", flush=True)
    lines = ["## SFT speed on one GPU", "", f"`{command_line()}`, {args.rounds} rounds: {name}; {machine()}."]
    lines += [f"bf16 products reach {statistics.median(rates) / 1e12:.1f} TFLOP/s (median).", ""]
    lines += ["| | tokens/s | TFLOP/s | / bf16 products | / TRL | / TRL compiled | step p90/p10 | peak MiB |"]
    lines += ["|---|---:|---:|---:|---:|---:|---:|---:|"]
    if args.json:
        args.json.write_text(json.dumps({"matmul": rates, "flops_per_token": flops, "found": found}))
    for contender, figures in found.items():
        keys = ("tokens_per_second", "step_time_p90_over_p10", "peak_memory_mib")
        speed, spread, peak = (statistics.median(f[key] for f in figures) for key in keys)
        share = statistics.median(flops * f["tokens_per_second"] / rate for f, rate in zip(figures, rates))
        others = [f"{ratio(found, contender, o):.2f}" if o in found else "" for o in (TRL, f"{TRL}, compiled")]
        lines.append(
            f"| {contender} | {speed:.0f} | {flops * speed / 1e12:.1f} | {share:.2f} | {' | '.join(others)} | "
            f"{spread:.2f} | {peak:.0f} |"
        )
    print("\n".join(lines))
    if args.update:
        update(args.update, "gpu_speed", "\n".join(lines))


if __name__ == "__main__":
    main()
