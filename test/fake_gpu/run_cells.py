"""Run the cells on the fake GPU, each in forks of one process, and compare each with its run on the CPU.

    test/fake_gpu/run.sh [--only TEXT] [--every N] [--out FILE] [--record] [--missing] [--plant FAULT] [--folder FOLDER]

A cell fails if its exit code is not 0, if a loss or a norm of gradients differs from the CPU's, or if an operator has no values.
It also fails against its row of cells.json: waits of a file that has no so many there, a tenth more launches, a larger peak, or
other types of numbers in products. `--record` writes the rows of good cells into cells.json, and the table into docs/fake_gpu.md.
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
import planted
import torch
import values
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig, Qwen3NextConfig

from trainer.errors import UserError
from trainer.training import loop

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 240  # seconds of a cell
RECORD = Path(__file__).with_name("cells.json")
PLANTED = []  # the name of a fault, with --plant
PAGE = ROOT / "docs/fake_gpu.md"
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
        # larger weights: a model with those of a new one answers nearly evenly, as the student does
        "teacher": AutoConfig.from_pretrained(folder / "model", initializer_range=0.3),
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
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    (folder / "reward.py").write_text(REWARD)


def count_waits(found, number):
    """Let the step of this number say where it waited, how often kernels were launched, and which types its products had."""
    library, step, state = ctypes.CDLL(None), loop.train_step, {"step": 0}

    def counted(*args, **kwargs):
        state["step"] += 1
        if state["step"] != number:
            return step(*args, **kwargs)
        library.fake_cuda_forget()
        values.PRODUCTS.clear()
        with warnings.catch_warnings():
            seen = []
            warnings.showwarning = lambda message, kind, path, line, *_: seen.append(
                (str(message), *caller(path, line))
            )
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            row = step(*args, **kwargs)
            torch.cuda.set_sync_debug_mode("default")
        found["launches"] = library.fake_cuda_launches()
        waits = collections.Counter(
            f"{place(path)}:{line}"
            for message, path, line in seen
            if "synchroniz" in message and "torch/cuda/__init__" not in path
        )
        found["waits"] = dict(waits)
        found["products"] = dict(values.PRODUCTS)
        return row

    loop.train_step = counted


def caller(path, line):
    """The place of a warning; of one inside values.py, the line that called the operator."""
    frame = sys._getframe(1)
    while path == values.__file__ or "torch/_ops" in path or "torch/utils/_pytree" in path:
        while frame.f_code.co_filename != path:
            frame = frame.f_back
        frame = frame.f_back
        path, line = frame.f_code.co_filename, frame.f_lineno
    return path, line


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
    if "adafactor" in flags:  # it has no such epsilon
        flags = flags.replace("--adam_eps 1e-5 ", "")
    for name in ("model", "teacher", "experts", "hybrid", "sft.jsonl", "pairs.jsonl", "prompts.jsonl"):
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
    if "--fp8" in flags or "--load_in_4bit" in flags:
        sys.path.append(str(Path(sys.prefix) / "packages"))
    try:
        if gpu:
            values.install()
            for name in PLANTED:
                planted.FAULTS[name]()
            if "--load_in_4bit" in flags:
                importlib.import_module("bitsandbytes")
                values.install("bitsandbytes")
            count_waits(found, 1 if "--load_checkpoint" in flags else 2)
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


def worst(rows, expected, name, least=0.0):
    """The largest difference of a number of each step, relative to it, or to `least` where it is smaller."""
    found, right = ({row["step"]: row[name] for row in table} for table in (rows, expected))
    if not right or found.keys() != right.keys() or not all(map(math.isfinite, found.values())):
        return math.inf
    return max(abs(found[step] - right[step]) / max(least, abs(right[step])) for step in right)


def by_file(waits):
    """Waits without lines, which move with each change of a file."""
    files = collections.Counter()
    for where, number in waits.items():
        files[where.rpartition(":")[0]] += number
    return files


def faults_of(cell, row, known):
    """What is wrong with a row, by itself and against the recorded one, if there is any."""
    found = [row["result"]] if row["code"] else []
    found += [f"no values: {name}" for name in row.get("without", ())]
    for kind, limits in (("loss", cells.TOLERANCE), ("norm", cells.NORM_TOLERANCE)):
        if not row[kind] <= limits[cell.dtype]:
            found.append(f"{kind} differs by {row[kind]:.1e}")
    if row["code"]:
        return found
    if "--fp8" in cell.maths and not any(name.startswith("_scaled_mm float8") for name in row["products"]):
        found.append("no product in float8")
    found += [f"{name} in {cell.dtype}" for name in row["products"] if not may_multiply(cell, name)]
    waits = by_file(row["waits"])
    if sum(waits.values()) > (most := cells.MOST_WAITS.get(cell.name, math.inf)):
        found.append(f"{sum(waits.values())} waits, not {most}")
    if known:
        before = by_file(known["waits"])
        found += [f"{n} waits in {file}, not {before[file]}" for file, n in waits.items() if n > before[file]]
        for kind, growth in (("launches", 1.1), ("peak", 1.02)):
            if row[kind] > growth * known[kind]:
                found.append(f"{kind} {row[kind]:.0f}, not {known[kind]:.0f}")
    return found


def may_multiply(cell, name):
    """Whether a cell may have a product of this kind and type, such as `mm float32`."""
    kind, dtype = name.split()
    if cell.dtype == "fp32" or dtype != "float32":
        return True
    return (cell.model, kind) == ("hybrid", "bmm")  # the gated delta rule of transformers keeps its states in fp32


def write_page(record):
    """Put the table of all cells under the last heading of the page."""
    head = PAGE.read_text().split("| Cell |")[0]
    lines = ["| Cell | Loss | Norm | Waits | Launches | Peak, MiB |", "|---|---:|---:|---:|---:|---:|"]
    for cell in cells.all_cells():
        row = record.get(cell.name, {})
        figures = "not run | | | | "
        if row.get("digest") == cell.digest:
            waits = sum(row["waits"].values())
            figures = f"{row['loss']:.0e} | {row['norm']:.0e} | {waits} | {row['launches']} | {row['peak']:.0f}"
        lines.append(f"| `{cell.name}` | {figures} |")
    PAGE.write_text(head + "\n".join(lines) + "\n")


def run_cell(cell, folder, name):
    """`run_ranks` of a cell on the fake GPU; if it is a resumed one, of its second process."""
    flags = flags_of(cell, folder, True)
    if not cell.resume:
        return run_ranks(cell, flags, cell.ranks, folder, name, gpu=True)
    ended = run_ranks(cell, [*flags, "--save_steps", "1"], cell.ranks, folder, f"{name}_first", gpu=True)
    if ended[0]:
        return ended
    checkpoint = str(folder / "runs" / f"{name}_first" / "checkpoints/step_1")
    flags.remove("--overwrite")
    return run_ranks(cell, [*flags, "--load_checkpoint", checkpoint], cell.ranks, folder, name, gpu=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="run the cells whose name has this text")
    parser.add_argument("--every", type=int, default=1, help="run one cell of so many")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/fake_gpu")
    parser.add_argument(
        "--out", type=Path, help="write the rows to this JSON file; good rows that it has are not run again"
    )
    parser.add_argument(
        "--missing", action="store_true", help="run the cells that cells.json does not have as they are"
    )
    parser.add_argument("--plant", choices=planted.FAULTS, help="each cell has this fault, and should fail")
    parser.add_argument("--record", action="store_true", help="write good rows into cells.json, and docs/fake_gpu.md")
    options = parser.parse_args()
    PLANTED.extend([options.plant] if options.plant else [])
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
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if options.out and options.out.exists():
        known = {row["cell"]: row for row in json.loads(options.out.read_text()) if not row["faults"]}
    chosen = [cell for cell in cells.all_cells() if options.only in cell.name]
    if options.missing:
        chosen = [cell for cell in chosen if record.get(cell.name, {}).get("digest") != cell.digest]
    chosen = chosen[:: options.every]
    for number, cell in enumerate(chosen):
        if known.get(cell.name, {}).get("digest") == cell.digest:
            row = known[cell.name]
            table.append(row | {"faults": faults_of(cell, row, None)})
            continue
        key = (cell.command, cell.maths, cell.dtype, cell.model)
        if key not in references:
            flags = flags_of(cell, folder, False)
            references[key] = run_ranks(cell, flags, 1, folder, f"cpu_{len(references)}", gpu=False)
        code, result, rows, seconds = run_cell(cell, folder, f"gpu_{number}")
        row = {"cell": cell.name, "digest": cell.digest, "code": code, "ranks": cell.ranks, **result}
        right = references[key][2][1:] if cell.resume else references[key][2]
        # --verify_resume compares its own steps bit by bit, and writes no metrics
        proved = "--verify_resume" in cell.layout and code == 0
        row["loss"] = 0.0 if proved else worst(rows, right, "loss", least=1.0)
        row["norm"] = 0.0 if proved else worst(rows, right, "grad_norm")
        same = record.get(cell.name) if record.get(cell.name, {}).get("digest") == cell.digest else None
        row["faults"] = faults_of(cell, row, None if options.record else same)
        table.append(row)
        if options.out:
            options.out.write_text(json.dumps(table, indent=1) + "\n")
        print(
            f"{'BAD' if row['faults'] else 'ok '} {cell.name:75} code {code} loss {row['loss']:.1e} norm {row['norm']:.1e} "
            f"waits {sum(row.get('waits', {}).values())} launches {row.get('launches', '-')} "
            f"peak {row.get('peak', 0):.1f} MiB {seconds:.0f} s"
            + (f" | {'; '.join(row['faults'])} | log gpu_{number}.0.log" if row["faults"] else ""),
            flush=True,
        )
    if options.out:
        options.out.write_text(json.dumps(table, indent=1) + "\n")
    bad = sum(bool(row["faults"]) for row in table)
    if options.record:
        kept = ("digest", "loss", "norm", "waits", "launches", "peak", "products")
        record |= {row["cell"]: {name: row[name] for name in kept} for row in table if not row["faults"]}
        record = {cell.name: record[cell.name] for cell in cells.all_cells() if cell.name in record}
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        write_page(record)
    print(f"{len(table)} cells, {bad} bad")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
