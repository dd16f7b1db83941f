"""Check the trainer on the GPUs of this machine: scripts/check_gpu.sh [--tiny] [--out FILE] [--part NAME ...]

doctor    what is missing on this machine
kernels   the tests of attention on a GPU: each kernel against the formula; the fixed tiles of --exact against plain loops
parity    layouts in fp32 and bf16, on as many GPUs as there are, against the plain loop on the CPU
resume    --verify_resume on both backends: a loaded checkpoint continues bitwise the same
memory    the memory of each backend and stage against its prediction
features  options for speed or memory, and other methods: their losses against a plain bf16 run
speed     training against plain bf16 matrix products, and against TRL where it is installed

Each part takes at most ten minutes. FILE gets a table of each part that ran; the tables of other parts stay.
Exit code: 0 if nothing is wrong, 1 if something is, 2 if there is no GPU. `--tiny` checks this script on a CPU.
"""

import argparse
import json
import math
import os
import re
import statistics
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from trainer.compare.runs.comparison_report import configuration_line
from trainer.compare.runs.launch import Job, free_port, run_jobs
from trainer.compare.runs.matrix import Configuration, full_matrix, matrix_thresholds
from trainer.compare.runs.run_matrix import run_matrix
from trainer.datasets.demos.demo import make_demo
from trainer.errors import UserError
from trainer.flags.names.word_parser import OneLineParser
from trainer.metrics import counted
from trainer.planning.predicted_memory import predict

ROOT = Path(__file__).resolve().parents[1]
PART_SECONDS = 600
KERNEL_TESTS = ("test_cuda_kernels.py", "test_flash.py", "test_signatures.py")
PARITY = r"^(fsdp2|deepspeed-z[0-3])-(\dr-mb4|tp2|sp2|dp2-tp2|dp2-sp2|hsdp2x2|dp2-tp2-sp2)(-packed)?$"
TINY_PARITY = r"^(fsdp2-1r-mb4-packed|deepspeed-z2-1r-mb4|fsdp2-2r-mb4-packed)$"
MEMORY_TOLERANCE = 0.1  # over the prediction, plus what a step needs besides weights and states:
MEMORY_ALLOWANCE = 256 << 20  # activations, workspaces of cuBLAS and the buffers of libraries
MIN_MATMUL_SHARE, MIN_TRL_RATIO = 0.4, 1.0  # slower than that is a fault
LOSS_TOLERANCE = 1e-2  # of features, relative to the plain run: bf16 is compared with bf16 or fp16
GOALS = "goals: 0.60 of the products with --compile, 1.2 x TRL"


@dataclass(frozen=True)
class Feature:
    """A run of the part `features`. Its first loss, or every loss, must equal the plain run's, or `first_loss`."""

    flags: str
    command: str = "train_sft"
    data: str = "sft.jsonl"
    every_step: bool = True
    first_loss: float | None = None
    tolerance: float = LOSS_TOLERANCE
    needs: str | None = None  # a package


ZERO = "--backend deepspeed --zero_stage"
PPO = "--label_key label --reward_func exact_match --prompt_max_len 64 --generate_max_len 16 --rollout_batch_size 8"
PPO += " --n_samples_per_prompt 2 --advantage_estimator group_norm"
FEATURES = {
    "plain": Feature("--backend fsdp2"),
    "packed": Feature("--packing_samples"),
    "packed, FA2": Feature("--packing_samples --attn_implementation flash_attention_2", needs="flash_attn"),
    "gradient checkpointing": Feature("--gradient_checkpointing"),
    "selective checkpointing": Feature("--packing_samples --selective_checkpointing"),
    "activation offload": Feature("--gradient_checkpointing --activation_offload"),
    "Adam offload, FSDP2": Feature("--adam_offload"),
    "Adam offload, ZeRO 2": Feature(f"{ZERO} 2 --adam_offload"),
    "Adam offload, ZeRO 3": Feature(f"{ZERO} 3 --adam_offload"),
    "8-bit Adam": Feature("--optim adamw_8bit", tolerance=5e-2),
    "compiled": Feature("--packing_samples --compile"),
    "fp8": Feature("--packing_samples --fp8 rowwise", tolerance=5e-2, needs="torchao"),
    "fp8, compiled": Feature("--packing_samples --fp8 tensorwise --compile", tolerance=5e-2, needs="torchao"),
    "fp16, FSDP2": Feature("--param_dtype fp16", every_step=False),  # its scale may skip the first steps
    "fp16, ZeRO 2": Feature(f"{ZERO} 2 --param_dtype fp16", every_step=False),
    "LoRA, FSDP2": Feature("--lora_rank 8", every_step=False, needs="peft"),
    "LoRA, ZeRO 3": Feature(f"{ZERO} 3 --lora_rank 8", every_step=False, needs="peft"),
    "QLoRA": Feature(f"{ZERO} 2 --lora_rank 8 --load_in_4bit", every_step=False, tolerance=0.2, needs="bitsandbytes"),
    "QLoRA, FSDP2": Feature("--lora_rank 8 --load_in_4bit", every_step=False, tolerance=0.2, needs="bitsandbytes"),
    "Muon": Feature("--optim muon", every_step=False),
    "not deterministic": Feature("--packing_samples --deterministic false"),  # FlashAttention 3, where it is installed
    "compiled, lengths differ": Feature("--compile --max_tokens_per_micro_batch 256"),
    "DPO": Feature("", "train_dpo", "pairs.jsonl", every_step=False, first_loss=math.log(2)),
    "DPO, reference offloaded": Feature("--ref_offload", "train_dpo", "pairs.jsonl", False, math.log(2)),
    "GRPO": Feature(PPO, "train_ppo", "prompts.jsonl", every_step=False, first_loss=math.nan),
    "GRPO, vLLM": Feature(f"{PPO} --rollout_engine vllm", "train_ppo", "prompts.jsonl", False, math.nan, needs="vllm"),
}
TINY_FEATURES = ("packed",)


@dataclass(frozen=True)
class Row:
    """One line of a table. `fault` says that it is wrong."""

    what: str
    found: str
    expected: str
    fault: bool


@dataclass(frozen=True)
class Machine:
    """Where the parts run. `tiny` is a CPU, to check the checks."""

    tiny: bool
    num_ranks: int
    scratch: Path

    @property
    def device(self) -> str:
        return "cpu" if self.tiny else "cuda"

    def run(self, name: str, command: list[str], until: float, **env: str) -> tuple[str | None, str]:
        """Run a command in the checkout. Returns (why it failed, or None; its output)."""
        log = self.scratch / f"{name}.log"
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), **env}
        job = Job(name, lambda: command, log, environment)
        outcome = next(iter(list(run_jobs([job], ROOT, 1, until - time.monotonic()))))[1]
        return outcome.error, log.read_text(errors="replace")

    def launch(self, name: str, num_ranks: int, words: list[str], until: float, **env: str) -> tuple[str | None, str]:
        launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(num_ranks), "--master_port"]
        env = {"OMP_NUM_THREADS": "1", **env}
        return self.run(name, [sys.executable, *launcher, str(free_port()), "-m", *words], until, **env)

    def rank_counts(self) -> list[int]:
        return sorted({1, self.num_ranks})

    def demo(self) -> Path:
        make_demo(str(self.scratch / "demo"))
        return self.scratch / "demo"

    def training_flags(self) -> list[str]:
        demo = self.demo()
        data = ["--pretrain", str(demo / "model"), "--dataset", str(demo / "sft.jsonl"), "--max_len", "128"]
        return [*data, "--train_batch_size", "16", "--device", self.device]


def doctor(machine: Machine, until: float) -> Iterator[Row]:
    error, output = machine.launch("doctor", machine.num_ranks, ["trainer.cli.doctor"], until)
    found = [line for line in output.splitlines() if line.startswith(("ok ", "note ", "FAIL "))]
    for line in found:
        yield Row(line[6:21].strip(), line[21:].strip(), "", line.startswith("FAIL"))
    if error and not any(line.startswith("FAIL") for line in found):
        yield Row("doctor", error, "", True)


def kernels(machine: Machine, until: float) -> Iterator[Row]:
    if not machine.tiny:  # a CPU takes other products
        error, output = machine.launch("tiles", machine.num_ranks, ["trainer.exact.tile_test"], until)
        passes = "fixed tiles: " in output and not error
        yield Row(
            "fixed tiles of --exact", "the self-test passes" if passes else error or output, "it passes", not passes
        )
    results = machine.scratch / "kernels.xml"
    files = KERNEL_TESTS[: 1 if machine.tiny else None]
    tests = [f"test/models/attention/{name}" for name in files]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={results}", *tests]
    error, _ = machine.run("kernels", command, until)
    if not results.exists():
        yield Row("tests of kernels", error or "no results", "all pass", True)
        return
    cases = list(ElementTree.parse(results).iter("testcase"))
    for file in files:
        own = [case for case in cases if case.get("classname", "").endswith(file.removesuffix(".py"))]
        wrong = [case.get("name") for case in own if case.find("failure") is not None or case.find("error") is not None]
        skipped = sum(case.find("skipped") is not None for case in own)
        text = f"{len(own) - len(wrong) - skipped} pass, {skipped} skipped" + (
            f"; wrong: {', '.join(wrong)}" * bool(wrong)
        )
        yield Row(file, text, "none fails", bool(wrong) or not own)


def parity(machine: Machine, until: float) -> Iterator[Row]:
    """The plain loop is always in fp32 and on the CPU, so a GPU is never compared with itself."""
    wanted = re.compile(TINY_PARITY if machine.tiny else PARITY)
    layouts = [c for c in full_matrix() if wanted.search(c.name) and c.nproc <= machine.num_ranks]
    chosen = [
        Configuration(f"{c.name}-{dtype}", c.nproc, (*c.args, "--param_dtype", dtype))
        for dtype in ("fp32", "bf16")
        for c in layouts
    ]
    flags = [*machine.training_flags(), "--max_steps", "3" if machine.tiny else "10", "--no_save"]
    folder = machine.scratch / "parity"
    thresholds = partial(matrix_thresholds, loss=None, grad_norm=None, dump=None)
    limit = (until - time.monotonic()) / (1 + len(chosen))  # a shared launch gets it once per configuration
    options = {"cwd": ROOT, "output_dir": folder, "num_parallel": 1, "timeout": limit, "share_launch": True}
    run_matrix(chosen, flags, thresholds, **options)
    for entry in json.loads((folder / "report.json").read_text())["configurations"]:
        found = configuration_line(entry).partition(" s): ")[2]
        expected = f"loss within {thresholds(entry['param_dtype']).loss:g}"
        yield Row(f"{entry['name']}, {counted(entry['nproc'], 'rank')}", found, expected, not entry["passed"])


def resume(machine: Machine, until: float) -> Iterator[Row]:
    layouts = {"fsdp2": ["--backend", "fsdp2"]}
    layouts |= {f"deepspeed-z{n}": ["--backend", "deepspeed", "--zero_stage", str(n)] for n in (1, 2, 3)}
    for num_ranks in machine.rank_counts():
        for name, flags in layouts.items():
            if machine.tiny and name != "fsdp2":
                continue
            folder = machine.scratch / f"resume-{name}-{num_ranks}"
            words = [*machine.training_flags(), *flags, "--packing_samples", "--micro_train_batch_size", "4"]
            words += ["--verify_resume", "2", "--output_dir", str(folder)]
            error, output = machine.launch(folder.name, num_ranks, ["trainer.cli.train_sft", *words], until)
            proof = re.search(r"verify_resume: (\d+ steps) .*(replayed, bitwise the same)", output)
            found = error or (f"{proof[1]} {proof[2]}" if proof else "no proof in the output")
            yield Row(
                f"{name}, {counted(num_ranks, 'rank')}, bf16", found, "bitwise the same", proof is None or bool(error)
            )


def memory(machine: Machine, until: float) -> Iterator[Row]:
    # not at the top: it imports torch, which --help does not need
    from scripts.measured_memory import GLIBC, RUNS, make_model

    names = ["fsdp2-3-fp32"] if machine.tiny else RUNS
    num_params, layer = make_model(machine.scratch / "memory", *((384, 27) if machine.tiny else (1024, 24)))
    for num_ranks in machine.rank_counts():
        words = ["scripts.measured_memory", str(machine.scratch / "memory"), machine.device, *names]
        error, _ = machine.launch(f"memory-{num_ranks}", num_ranks, words, until, **GLIBC)
        path = machine.scratch / f"memory/peaks-{num_ranks}.json"
        measured = json.loads(path.read_text()) if path.exists() else {}
        for name in names:
            backend, stage, dtype = name.split("-")
            expected = vars(predict(backend, int(stage), dtype, num_ranks, num_params, layer))
            if name not in measured:
                yield Row(f"{name}, {counted(num_ranks, 'rank')}", error or "not measured", "", True)
            for phase in ("load", "state", "step") if name in measured else ():
                found, limit = measured[name][phase], expected[phase] * (1 + MEMORY_TOLERANCE) + MEMORY_ALLOWANCE
                texts = f"{found / 2**20:.0f} MiB", f"{expected[phase] / 2**20:.0f} MiB predicted"
                yield Row(
                    f"{name}, {counted(num_ranks, 'rank')}, {phase}",
                    *texts,
                    found > limit or found < expected[phase] / 2,
                )


def features(machine: Machine, until: float) -> Iterator[Row]:
    demo, plain = machine.demo(), []
    for number, (name, feature) in enumerate(FEATURES.items()):
        if machine.tiny and name not in TINY_FEATURES:
            continue
        if feature.needs and find_spec(feature.needs) is None:
            yield Row(name, f"{feature.needs} is not installed", "", False)
            continue
        folder = machine.scratch / f"features-{number}"
        words = [f"trainer.cli.{feature.command}", "--pretrain", str(demo / "model"), "--no_save", "--max_steps", "4"]
        words += ["--dataset", str(demo / feature.data), "--train_batch_size", "16"]
        words += [] if "--max_tokens_per_micro_batch" in feature.flags else ["--micro_train_batch_size", "4"]
        words += [*(("--max_len", "128") if feature.command != "train_ppo" else ()), "--device", machine.device]
        error, _ = machine.launch(folder.name, 1, [*words, *feature.flags.split(), "--output_dir", str(folder)], until)
        rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if not error else ()
        losses = [row["loss"] for row in rows if "loss" in row]
        plain = plain or losses
        yield _judged(name, feature, losses, plain, error)


def _judged(name: str, feature: Feature, losses: list[float], plain: list[float], error: str | None) -> Row:
    """The row of a run: whether its losses are finite and as expected."""
    if error or not losses or not all(map(math.isfinite, losses)):
        return Row(name, error or f"losses {losses}", "finite losses", True)
    expected = [feature.first_loss] if feature.first_loss is not None else plain
    expected = [value for value in expected if math.isfinite(value)][: None if feature.every_step else 1]
    worst = max((abs(found - value) / abs(value) for found, value in zip(losses, expected)), default=0.0)
    text = f"loss {losses[0]:.4f} to {losses[-1]:.4f}, {worst:.1e} off in {counted(len(expected), 'step')}"
    return Row(name, text, f"{feature.tolerance:g}", not worst <= feature.tolerance or len(losses) < len(expected))


def speed(machine: Machine, until: float) -> Iterator[Row]:
    figures = machine.scratch / "speed.json"
    command = [sys.executable, "scripts/bench/gpu_speed.py", "--rounds", "1", "--json", str(figures)]
    if machine.tiny:
        command += ["--tiny", "--steps", "5", "--only", "^(train_sft FSDP2|TRL SFTTrainer)$"]
    error, _ = machine.run("speed", command, until)
    if error or not figures.exists():
        yield Row("speed", error or "no figures", "", True)
        return
    content = json.loads(figures.read_text())
    rate = statistics.median(content["matmul"])
    speeds = {
        name: statistics.median(f["tokens_per_second"] for f in found) for name, found in content["found"].items()
    }
    yield Row("bf16 matrix products", f"{rate / 1e12:.3g} TFLOP/s", GOALS, not rate > 0)
    for name, tokens in speeds.items():
        share = content["flops_per_token"] * tokens / rate
        rival = speeds.get("TRL SFTTrainer" + ", compiled" * name.endswith("compiled"))
        text = f"{tokens:.0f} tokens/s, {share:.2f} of the products" + (
            f", {tokens / rival:.2f} x TRL" if rival else ""
        )
        slow = share < MIN_MATMUL_SHARE or (rival is not None and tokens / rival < MIN_TRL_RATIO)
        judged = name.startswith("train_sft") and not machine.tiny
        expected = f"{MIN_MATMUL_SHARE:.2f} of the products, {MIN_TRL_RATIO:.2f} x TRL" if judged else ""
        yield Row(name, text, expected, judged and slow)


PARTS: dict[str, Callable[[Machine, float], Iterator[Row]]] = {
    part.__name__: part for part in (doctor, kernels, parity, resume, memory, features, speed)
}


def run_part(name: str, machine: Machine) -> list[Row]:
    """The rows of a part. It gets ten minutes. A failure is a row too."""
    started, rows = time.monotonic(), []
    try:
        for row in PARTS[name](machine, started + PART_SECONDS):
            rows.append(row)
            print(f"{'FAIL' if row.fault else 'ok':<5} {name}: {row.what}: {row.found}", flush=True)
    except (UserError, OSError) as error:
        rows.append(Row(name, str(error), "", True))
        print(f"FAIL  {name}: {error}", flush=True)
    print(f"      {name}: {time.monotonic() - started:.0f} s", flush=True)
    return rows


def section(name: str, rows: list[Row], where: str) -> str:
    faults = sum(row.fault for row in rows)
    lines = [f"### {name}", "", f"{where}: {f'{faults} wrong' if faults else 'nothing is wrong'}.", ""]
    lines += ["| | Found | Expected | |", "|---|---|---|---|"]
    cells = ([r.what, r.found, r.expected, "**wrong**" if r.fault else "ok"] for r in rows)
    lines += [f"| {' | '.join(' '.join(cell.replace('|', '/').split()) for cell in row)} |" for row in cells]
    return "\n".join(lines)


def write_section(path: Path, name: str, text: str) -> None:
    """Put `text` between the two markers of this part. Without them, it goes to the end of the file."""
    begin, end = f"<!-- {name} of check_gpu -->", f"<!-- end of {name} -->"
    content = path.read_text() if path.exists() else "# The trainer on this machine's GPUs\n"
    if begin not in content:
        content = f"{content.rstrip()}\n\n{begin}\n{end}\n"
    head, _, rest = content.partition(begin)
    path.write_text(f"{head}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}")


def _where(tiny: bool, num_ranks: int) -> str:
    # not at the top: --help needs neither
    import torch

    from trainer.runs.outputs import versions

    cards = "a CPU, to check the script" if tiny else f"{num_ranks} x {torch.cuda.get_device_name()}"
    packages = ", ".join(f"{name} {version}" for name, version in versions().items() if name != "python")
    return f"{time.strftime('%Y-%m-%d')}, {cards}; {packages}"


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser("check_gpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="check this script on a CPU")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/gpu.md", help="the file to write (docs/gpu.md)")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), help="only these parts")
    parser.add_argument("--ranks", type=int, help="number of ranks (as many as GPUs, at most 8; with --tiny 1)")
    args = parser.parse_args(argv)
    import torch  # not at the top: --help does not need it

    if not args.tiny and not torch.cuda.is_available():
        print("error: no CUDA device here (allowed: --tiny, to check the script)", file=sys.stderr)
        return 2
    num_ranks = args.ranks or (1 if args.tiny else min(torch.cuda.device_count(), 8))
    where, faults = _where(args.tiny, num_ranks), 0
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine(args.tiny, num_ranks, Path(folder))
        for name in args.part:
            rows = run_part(name, machine)
            faults += sum(row.fault for row in rows)
            write_section(args.out, name, section(name, rows, where))
    print(f"{f'{faults} wrong' if faults else 'nothing is wrong'}: {args.out}")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
