"""Every kind of model, layout and method with images against the plain loop: `python test/vision_matrix.py FOLDER [KIND...]`.

It prints a row of the table in docs/parity.md for each kind and method: the largest difference of the loss and of any
gradient over two steps. One launch for each kind and number of ranks; it takes about a minute for each kind.
"""

import functools
import json
import sys
from pathlib import Path

import vision_models
import vision_reference
from launch import torchrun
from safetensors.torch import load_file

KINDS = ("qwen3_vl", "qwen3_5", "gemma3", "gemma4", "mistral3", "smolvlm")
METHODS = {"sft": "train_sft", "dpo": "train_dpo"}
LAYOUTS = {  # name -> (ranks, flags)
    "fsdp2 1": (1, "--backend fsdp2"),
    "fsdp2 2": (2, "--backend fsdp2"),
    "ZeRO 2": (2, "--backend deepspeed --zero_stage 2"),
    "ZeRO 3": (2, "--backend deepspeed --zero_stage 3"),
    "tp 2": (2, "--backend fsdp2 --tensor_parallel_size 2"),
    "ring 2": (2, "--backend fsdp2 --ring_attn_size 2"),
    "ulysses 2": (2, "--backend fsdp2 --ring_attn_size 2 --sp_mode ulysses"),
    "packed": (2, "--backend fsdp2 --packing_samples"),
    "packed ring 2": (2, "--backend deepspeed --zero_stage 3 --packing_samples --ring_attn_size 2"),
    "LoRA": (2, "--backend fsdp2 --lora_rank 4"),
}
COMMON = (
    "--max_len 512 --train_batch_size 8 --micro_train_batch_size 2 --max_steps 2 --learning_rate 1e-3 "
    "--lr_scheduler constant --no_shuffle --param_dtype fp32 --cpu_matmul mkl --no_save"
)


def start(folder: Path, kind: str) -> str:
    """Run all layouts and methods of a kind. Returns the output, in which a refusal is one line."""
    data = {"dpo": vision_models.write_pairs(folder), "sft": vision_models.write_rows(folder)}
    vision_models.make_folder(kind, folder / kind)
    outputs = []
    for ranks in (1, 2):
        lines = []
        for layout, (size, flags) in LAYOUTS.items():
            whole = [] if layout == "LoRA" else ["--freeze_vision", "false"]
            for method, command in METHODS.items() if size == ranks else ():
                run = folder / f"{kind} {layout} {method}"
                own = [*flags.split(), *whole, "--output_dir", str(run), "--parity_dump", str(run / "dump")]
                model = ["--pretrain", str(folder / kind), "--dataset", data[method]]
                lines.append([command, *model, *COMMON.split(), *own])
        runs = folder / f"{kind} {ranks}.json"
        runs.write_text(json.dumps(lines))
        outputs.append(torchrun(ranks, "-m", "trainer.compare.runs.many_runs", str(runs), timeout=1500)[1])
    return "".join(outputs)


def cell(run: Path, output: str, expected: dict, plain) -> str:
    """The differences of a run. If it does not fit, `plain(gradients=...)` makes its first update with the run's gradients.

    Adam divides a gradient by its size. So where a gradient is only rounding, the first updates differ, and all that
    follows. With equal gradients at the first update, all must fit again. The gradients themselves are judged before it.
    """
    refusal = next((line for line in output.splitlines() if line.startswith("error: ") and f"{run} " in line), None)
    if refusal:
        return "refused: " + refusal.split(" [train_")[0].removeprefix("error: ")
    if not (run / "dump" / "weights_final.safetensors").exists():
        return "CRASH"
    found, note = vision_reference.differences(run, expected), ""
    if not fits(found):
        found = vision_reference.differences(run, plain(gradients=load_file(run / "dump" / "grads_step1.safetensors")))
        note = ", with the run's gradients"
    return ("" if fits(found) else f"WRONG {found} ") + f"{found['loss']:.0e} / {found['gradients']:.0e}{note}"


def fits(found: dict[str, float]) -> bool:
    return found["loss"] < 1e-5 and found["norm"] < 1e-4 and found["gradients"] < 1e-4 and found["weights"] < 2e-4


def main(folder: Path, kinds: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for kind in kinds:
        output = start(folder, kind)
        (folder / f"{kind}.log").write_text(output)
        for method, file in (("sft", "rows"), ("dpo", "pairs")):
            rows = [json.loads(line) for line in (folder / f"{file}.jsonl").read_text().splitlines()]
            plain = functools.partial(
                vision_reference.plain_run, str(folder / kind), rows, folder, lr=1e-3, steps=2, method=method
            )
            whole, adapter = (functools.partial(plain, lora_rank=rank) for rank in (0, 4))
            expected = {run: run() for run in (whole, adapter)}
            cells = {}
            for layout in LAYOUTS:
                run = adapter if layout == "LoRA" else whole
                cells[layout] = cell(folder / f"{kind} {layout} {method}", output, expected[run], run)
            print(f"{kind} {method}: {json.dumps(cells)}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or list(KINDS))
