"""Run the cells on the fake GPU, each in forks of one process, and compare each with its run on the CPU.

    test/fake_gpu/run.sh [--only TEXT] [--every N] [--out FILE] [--page FILE] [--folder FOLDER]

A cell fails if its exit code is not 0, if a loss differs from the CPU's, if an operator has no values, or if a step waits
more often than `cells.MOST_WAITS` allows.
"""

import argparse
import collections
import ctypes
import importlib
import json
import math
import os
import shutil
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path

import cells
import torch
import values
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig, Qwen3NextConfig

from trainer.errors import UserError
from trainer.training import loop

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 240  # seconds of a cell
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-2}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
REWARD = "def reward_func(prompts, responses, labels):\n    return [len(set(text)) / 10 for text in responses]\n"


def make_inputs(folder):
    """The demo's data and model, a model with experts, and one with linear attention."""
    importlib.import_module("trainer.cli.make_demo").run(["--output_dir", str(folder)])
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "vocab_size": len(tokenizer)}
    linear = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    }
    configs = {
        "experts": Qwen3MoeConfig(**TINY, **experts, mlp_only_layers=[], decoder_sparse_step=1),
        "hybrid": Qwen3NextConfig(
            **TINY,
            **experts,
            **linear,
            shared_expert_intermediate_size=32,
            layer_types=["linear_attention", "full_attention"],
        ),
    }
    for name, config in configs.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    (folder / "reward.py").write_text(REWARD)


def count_waits(found):
    """Let the second step say where it waited, how often kernels were launched, and which collectives had a tensor of the CPU."""
    library, step, state = ctypes.CDLL(None), loop.train_step, {"step": 0}

    def counted(*args, **kwargs):
        state["step"] += 1
        if state["step"] != 2:
            return step(*args, **kwargs)
        library.fake_cuda_forget()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            row = step(*args, **kwargs)
            torch.cuda.set_sync_debug_mode("default")
        found["launches"] = library.fake_cuda_launches()
        waits = collections.Counter(
            f"{place(warning.filename)}:{warning.lineno}"
            for warning in seen
            if "synchroniz" in str(warning.message) and "torch/cuda/__init__" not in warning.filename
        )
        found["waits"] = dict(waits)
        return row

    loop.train_step = counted


def pinned_bytes():
    count = ctypes.CDLL(None).fake_cuda_pinned
    count.restype = ctypes.c_size_t
    return count()


def place(path):
    """A file's path without the folders of this machine."""
    for part in (f"{ROOT}/", "site-packages/"):
        path = path.split(part)[-1]
    return path


def flags_of(cell, folder, gpu):
    flags = f"{cells.COMMANDS[cell.command]} --pretrain {cell.model} {cell.maths} --param_dtype {cell.dtype}"
    if not cell.save or not gpu:
        flags += " --no_save"
    flags += f" --backend {cell.backend} {cell.layout} --device cuda" if gpu else " --backend fsdp2 --device cpu"
    if "--max_tokens_per_micro_batch" in flags:  # in place of the samples of a micro-batch
        flags = flags.replace("--micro_train_batch_size 4 ", "")
    for name in ("model", "experts", "hybrid", "sft.jsonl", "pairs.jsonl", "prompts.jsonl"):
        flags = flags.replace(f" {name} ", f" {folder}/{name} ")
    return flags.replace("ROLLOUTS", f"{folder}/rollouts/rollouts.jsonl").split()


def rank_of(cell, flags, rank, ranks, port, log, out, gpu):
    """One rank: it writes its log and result, and does not return."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    signal.alarm(LIMIT)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    found, code = {"result": "ok"}, 0
    try:
        if gpu:
            values.install()
            count_waits(found)
        importlib.import_module(f"trainer.cli.{cell.command}").run([*flags, "--output_dir", str(out)])
        if gpu:
            found["peak"] = torch.cuda.max_memory_allocated() / 2**20
            found["pinned"] = pinned_bytes()
            found["without"] = sorted(values.WITHOUT)
    except UserError as error:
        found, code = {"result": f"refused: {error}"}, 2
    except BaseException as error:
        traceback.print_exc()
        found, code = {"result": f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"}, 1
    Path(f"{log}.json").write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(code)


def run_ranks(cell, flags, ranks, folder, name, gpu):
    """(exit code, result of rank 0, rows of metrics.jsonl, seconds) of one run."""
    out, start = folder / "runs" / name, time.time()
    out.parent.mkdir(exist_ok=True)
    shutil.rmtree(out, ignore_errors=True)  # no row of an earlier run
    port = 20000 + os.getpid() % 5000 + run_ranks.count % 5000
    run_ranks.count += 1
    logs = [folder / "runs" / f"{name}.{rank}.log" for rank in range(ranks)]
    pids = []
    for rank, log in enumerate(logs):
        pid = os.fork()
        if pid == 0:
            rank_of(cell, flags, rank, ranks, port, log, out, gpu)
        pids.append(pid)
    codes = [os.waitpid(pid, 0)[1] for pid in pids]
    code = max(os.waitstatus_to_exitcode(code) if os.WIFEXITED(code) else 128 + os.WTERMSIG(code) for code in codes)
    result = (
        json.loads(Path(f"{logs[0]}.json").read_text())
        if Path(f"{logs[0]}.json").exists()
        else {"result": f"exit {code}"}
    )
    metrics = out / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    return code, result, [row for row in rows if "loss" in row and "lr" in row], time.time() - start


run_ranks.count = 0


def worst(rows, expected):
    """The largest difference of losses, relative to the larger of 1 and the loss."""
    losses, right = ({row["step"]: row["loss"] for row in table} for table in (rows, expected))
    if not right or losses.keys() != right.keys():
        return float("inf")
    return max(abs(losses[step] - right[step]) / max(1.0, abs(right[step])) for step in right)


def write_page(page, table):
    """Put the table of cells under the last heading of the page."""
    head = page.read_text().split("| Cell |")[0]
    lines = ["| Cell | Loss | Waits | Launches | Peak, MiB |", "|---|---:|---:|---:|---:|"]
    for row in table:
        figures = f"{row['difference']:.0e} | {sum(row['waits'].values())} | {row['launches']} | {row['peak']:.0f}"
        lines.append(
            f"| `{row['cell']}` | {figures} |" if row["good"] else f"| `{row['cell']}` | {row['result']} | | | |"
        )
    page.write_text(head + "\n".join(lines) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="run the cells whose name has this text")
    parser.add_argument("--every", type=int, default=1, help="run one cell of so many")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/fake_gpu")
    parser.add_argument(
        "--out", type=Path, help="write the rows to this JSON file; good rows that it has are not run again"
    )
    parser.add_argument("--page", type=Path, help="write the table of all cells into this page")
    options = parser.parse_args()
    folder = options.folder.resolve()
    os.environ["HF_HUB_OFFLINE"] = "1"
    first = cells.Cell("train_ppo", "fsdp2")
    if not (folder / "rollouts").exists():
        folder.mkdir(parents=True, exist_ok=True)
        if (pid := os.fork()) == 0:  # apart: a process that has asked for a GPU cannot fork ranks
            make_inputs(folder)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0, "the inputs were not made"
        flags = (
            cells.GENERATE.replace("REWARD", f"{folder}/reward.py")
            .replace("prompts.jsonl", f"{folder}/prompts.jsonl")
            .split()
        )
        flags += ["--pretrain", f"{folder}/model", "--no_save", "--device", "cpu", "--backend", "fsdp2"]
        code, result, _, _ = run_ranks(first, flags, 1, folder, "rollouts", gpu=False)
        assert code == 0, result
        (folder / "runs/rollouts").rename(folder / "rollouts")
    references, known, table = {}, {}, []
    if options.out and options.out.exists():
        known = {row["cell"]: row for row in json.loads(options.out.read_text()) if row["good"]}
    chosen = [cell for cell in cells.all_cells() if options.only in cell.name][:: options.every]
    for number, cell in enumerate(chosen):
        if cell.name in known:
            table.append(known[cell.name])
            continue
        key = (cell.command, cell.maths, cell.dtype, cell.model)
        if key not in references:
            references[key] = run_ranks(
                cell, flags_of(cell, folder, False), 1, folder, f"cpu_{len(references)}", gpu=False
            )
        code, result, rows, seconds = run_ranks(
            cell, flags_of(cell, folder, True), cell.ranks, folder, f"gpu_{number}", gpu=True
        )
        row = {"cell": cell.name, "code": code, "seconds": round(seconds, 1), "ranks": cell.ranks, **result}
        # --verify_resume compares its own steps bit by bit, and writes no metrics
        proved = "--verify_resume" in cell.layout and code == 0
        row["difference"] = 0.0 if proved else worst(rows, references[key][2])
        good = code == 0 and row["difference"] <= TOLERANCE[cell.dtype] and not row.get("without")
        good = good and sum(row["waits"].values()) <= cells.MOST_WAITS.get(cell.name, math.inf)
        row["good"] = good
        table.append(row)
        if options.out:
            options.out.write_text(json.dumps(table, indent=1) + "\n")
        waits = sum(row.get("waits", {}).values())
        print(
            f"{'ok ' if good else 'BAD'} {cell.name:75} code {code} loss {row['difference']:.1e} waits {waits} "
            f"launches {row.get('launches', '-')} peak {row.get('peak', 0):.0f} MiB {seconds:.0f} s"
            + ("" if good else f" | {row['result']} {row.get('without', '')} log gpu_{number}.0.log"),
            flush=True,
        )
    if options.page:
        write_page(options.page, table)
    bad = sum(not row["good"] for row in table)
    print(f"{len(table)} cells, {bad} bad")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
