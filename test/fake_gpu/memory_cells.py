"""Compare the memory that `plan` predicts with the peaks of torch's own allocator on the fake GPU.

    test/fake_gpu/run.sh memory_cells.py [--only TEXT] [--record] [--folder FOLDER] [--trace PHASE]

A cell fails if its run fails, if a peak is 10 % larger or smaller than `plan` says, or 2 % larger than the one in memory.json.
`--record` writes good rows into memory.json, and the table into docs/fake_gpu.md. `--trace step` leaves a snapshot of the
allocator, with the lines that took each block. Products and attention write zeros: they take the same memory, and no time.
"""

import argparse
import importlib
import json
import os
import shutil
import signal
import sys
import traceback
from pathlib import Path

import cells
import memory_list
import run_cells
import torch
import values
from memory_list import MIB, RECORD, all_cells, make_config, planned, write_page
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.training import loop

LIMIT = 240  # seconds of a cell
# operators of large tensors whose numbers do not count here
ZEROS = ("mm", "addmm", "bmm", "baddbmm", "_log_softmax", "_log_softmax_backward_data", "nll_loss_forward", "nll_loss_backward",
         "silu", "silu_backward.grad_input", "silu_backward", "embedding", "embedding_dense_backward")  # fmt: skip


def flags_of(cell, folder, out):
    layout = cell.layout
    flags = f"--pretrain {folder}/model --packing_samples --max_steps {cell.steps} --no_save --overwrite {cell.more}"
    flags += f" --train_batch_size {cell.num_micro * cell.micro * layout.dp} --micro_train_batch_size {cell.micro}"
    flags += f" --device cuda --backend {layout.backend} --zero_stage {layout.stage} --param_dtype {cell.dtype}"
    flags += (
        f" --dp_replicate_size {layout.dp_replicate} --tensor_parallel_size {layout.tp} --ring_attn_size {layout.sp}"
    )
    flags += " --adam_offload" * layout.offload + " --gradient_checkpointing" * layout.checkpointing
    flags += " --reduce_once" * layout.reduce_once + f" --lora_rank {cell.lora_rank}" * bool(cell.lora_rank)
    if cell.command == "train_ppo":
        flags += f" {cells.PROMPTS} {cells.GROUPS} --rollouts_from {folder}/long.jsonl --init_kl_coef 0.01"
        flags = flags.replace("prompts.jsonl", f"{folder}/prompts.jsonl").replace(
            "--generate_max_len 16", f"--generate_max_len {cell.tokens}"
        )
    else:
        name = "pairs" if cell.command == "train_dpo" else "sft"
        flags += f" --dataset {folder}/{name}.jsonl --max_len {cell.tokens}"
    return [*flags.split(), "--output_dir", str(out)]


def apart(function, *arguments):
    """Call it in a fork: a process that has asked for a GPU cannot fork ranks."""
    if (pid := os.fork()) == 0:
        try:
            function(*arguments)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0, "the inputs were not made"


def make_inputs(folder):
    """Rows that `--max_len` cuts, rollouts of TOKENS tokens, and a model in which weights and activations both count."""
    folder.mkdir(parents=True, exist_ok=True)
    apart(run_cells.make_inputs, folder)
    generate = cells.GENERATE.replace("REWARD", f"{folder}/reward.py").replace(
        "prompts.jsonl", f"{folder}/prompts.jsonl"
    )
    flags = f"{generate} --pretrain {folder}/model --no_save --device cpu --backend fsdp2".split()
    code, result, _, _ = run_cells.run_ranks(cells.Cell("train_ppo", "fsdp2"), flags, 1, folder, "rollouts", gpu=False)
    assert code == 0, result
    apart(make_large, folder)


def make_large(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    shutil.rmtree(folder / "model")
    torch.manual_seed(0)
    config = make_config(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    sft, pair = (json.loads((folder / name).read_text().splitlines()[0]) for name in ("sft.jsonl", "pairs.jsonl"))
    for message, word in ((sft["messages"][1], "a "), (pair["chosen"][0], "b "), (pair["rejected"][0], "c ")):
        message["content"] = word * 4 * memory_list.TOKENS
    for name, row in (("sft", sft), ("pairs", pair)):
        (folder / f"{name}.jsonl").write_text((json.dumps(row) + "\n") * 64)
    rows = map(json.loads, (folder / "runs/rollouts/rollouts.jsonl").read_text().splitlines())
    with open(folder / "long.jsonl", "w") as file:
        for row in rows:
            count = memory_list.TOKENS - len(row["prompt_ids"])
            for key in ("response_ids", "log_probs"):
                row[key] = (row[key] * count)[:count]
            file.write(json.dumps(row) + "\n")


def zeros(result, *args, **kwargs):
    """The formula of a product whose numbers do not count."""
    for each in torch.utils._pytree.tree_leaves(result):
        if isinstance(each, torch.Tensor) and each.is_cuda and each.numel():
            values.host(each).zero_()


def watch(found, trace):
    """Let `found` get the peak of loading, of the first step, and of the second."""
    from trainer.strategies.deepspeed import DeepspeedStrategy  # not at the top: it asks for a GPU, and ranks are forks
    from trainer.strategies.fsdp2 import FSDP2Strategy

    def watched(function, name):
        def run(*args, **kwargs):
            torch.cuda.reset_peak_memory_stats()
            if trace == name:
                torch.cuda.memory._record_memory_history(max_entries=2_000_000)
            result = function(*args, **kwargs)
            if trace == name:
                torch.cuda.memory._dump_snapshot(found["trace"])
            found[name] = max(found.get(name, 0), torch.cuda.max_memory_allocated())
            return result

        return run

    for kind in (FSDP2Strategy, DeepspeedStrategy):
        for method in ("load_model", "prepare"):
            setattr(kind, method, watched(getattr(kind, method), "load"))
    step, count = loop.train_step, []

    def counted(*args, **kwargs):
        count.append(torch.cuda.memory_allocated())
        found["state"] = count[-1]
        return watched(step, "step" if len(count) > 1 else "first")(*args, **kwargs)

    loop.train_step = counted


def rank_of(cell, flags, rank, port, log, trace):
    """One rank: it writes its log and result, and does not return."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    signal.alarm(LIMIT)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(cell.ranks), "LOCAL_WORLD_SIZE": str(cell.ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":0:0"  # 32 MiB of each thread, which --reserve counts
    found, code = {"trace": f"{log}.pickle"}, 0
    try:
        skipped = [f"aten::{name}" for name in ZEROS] + [name for name in values.FORMULAS if "attention" in name]
        values.FORMULAS |= dict.fromkeys(skipped, zeros)
        values.NO_VALUES |= {"_fused_adamw_"}
        values.NO_VALUES |= {name for name in dir(torch.ops.aten) if name.startswith("_foreach") and "norm" not in name}
        values.install()
        watch(found, trace)
        importlib.import_module(f"trainer.cli.{cell.command}").run(flags)
    except BaseException:
        traceback.print_exc()
        code = 1
    Path(f"{log}.json").write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(code)


def measure(cell, folder, number, trace=None):
    """Bytes of the rank that needs most: {phase: peak}. None if the run failed."""
    runs, pids = folder / "memory", []
    runs.mkdir(exist_ok=True)
    flags = flags_of(cell, folder, runs / f"{number}")
    logs = [runs / f"{number}.{rank}.log" for rank in range(cell.ranks)]
    port = 20000 + (os.getpid() + number) % 9000
    for rank, log in enumerate(logs):
        if (pid := os.fork()) == 0:
            rank_of(cell, flags, rank, port, log, trace if rank == 0 else None)
        pids.append(pid)
    ends = [os.waitpid(pid, 0)[1] for pid in pids]
    if any(ends):
        return None
    found = [json.loads(Path(f"{log}.json").read_text()) for log in logs]
    return {phase: max(each[phase] for each in found) for phase in ("load", "state", "first", "step")}


def faults_of(cell, found, known):
    plan, faults = planned(cell), []
    for phase in memory_list.PHASES:
        ratio = getattr(plan, phase) / found[phase]
        if not 1 / 1.1 <= ratio <= 1.1:
            faults.append(f"{phase} is {ratio:.2f} times the peak")
        if known and found[phase] > 1.02 * MIB * known[phase]:
            faults.append(f"{phase} {found[phase] / MIB:.0f} MiB, not {known[phase]:.0f}")
    return faults


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="run the cells whose name has this text")
    parser.add_argument("--folder", type=Path, default=run_cells.ROOT / "build/fake_gpu_memory")
    parser.add_argument("--trace", choices=("load", "first", "step"), help="leave a snapshot of the allocator")
    parser.add_argument("--record", action="store_true", help="write good rows into memory.json and docs/fake_gpu.md")
    options = parser.parse_args()
    folder = options.folder.resolve()
    os.environ["HF_HUB_OFFLINE"] = "1"
    if not (folder / "long.jsonl").exists():
        make_inputs(folder)
    record, bad = json.loads(RECORD.read_text()) if RECORD.exists() else {}, 0
    chosen = [(number, cell) for number, cell in enumerate(all_cells()) if options.only in cell.name]
    for number, cell in chosen:
        found = measure(cell, folder, number, options.trace)
        known = None if options.record else record.get(cell.name)
        if found:
            (folder / f"found_{number}.json").write_text(json.dumps({"name": cell.name, **found}))
        faults = faults_of(cell, found, known) if found else ["it failed"]
        bad += bool(faults)
        plan = planned(cell)
        shown = [f"{phase} {found[phase] / MIB:.0f}" for phase in ("load", "state", "first", "step") if found]
        shown += [f"| plan {getattr(plan, p) / MIB:.0f}" for p in memory_list.PHASES if found]
        print(
            "BAD" if faults else "ok ",
            f"{cell.name:50}",
            *shown,
            *(f"| {f}" for f in faults),
            f"log {number}.0.log",
            flush=True,
        )
        if options.record and not faults:
            record[cell.name] = {phase: round(found[phase] / MIB, 1) for phase in memory_list.PHASES}
    if options.record:
        record = {cell.name: record[cell.name] for cell in all_cells() if cell.name in record}
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        write_page(record)
    print(f"{len(chosen)} cells, {bad} bad")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
