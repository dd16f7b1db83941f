"""Run TRL's SFTTrainer on the samples that train_sft reads.

    python scripts/bench/trl_loop.py STEPS MICRO_BATCH_SIZE <flags of train_sft>

It keeps TRL's defaults if they are fast (fused AdamW). Gradient checkpointing is off; TRL's default is on. --compile
switches TRL's torch_compile on. With --packing_samples, TRL packs all samples of the run by its default ("bfd"), one pack
in a forward pass. A step has as many packs as fill the mean step. It writes the same rows as plain_loop.py.
"""

import json
import os
import sys
import time
from importlib.util import find_spec

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "../.."))
from types import SimpleNamespace

from trainer.cli.train_sft import parse
from trainer.datasets.batches.global_batches import epoch_order
from trainer.flags.parse_flags import flat
from trainer.metrics import host_peak_memory_bytes
from trainer.runs.run_data import load_sft as load_data

# options of all TRL trainers here: fp32, and nothing except the training itself
FASTEST_ON_CPU = {
    "gradient_checkpointing": False, "bf16": False, "use_cpu": True, "report_to": "none", "save_strategy": "no",
    "logging_strategy": "no", "disable_tqdm": True,
}  # fmt: skip


def peak_memory() -> int:
    """Peak bytes: of the device on CUDA, else of the process."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else host_peak_memory_bytes()


class StepTimes(TrainerCallback):
    """Makes a row for each optimizer step. The time is from the end of one step to the end of the next, with data."""

    def __init__(self):
        self.tokens: list[int] = []  # of each step
        self.rows, self.last = [], None

    def on_train_begin(self, args, state, control, **_):
        self.last = time.perf_counter()

    def on_step_end(self, args, state, control, **_):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        row = {"step": state.global_step, "tokens": self.tokens[state.global_step - 1], "step_time": now - self.last}
        self.rows.append(row | {"peak_memory_bytes": peak_memory()})
        self.last = now


def main(num_steps: int, micro_size: int, argv: list[str]) -> None:
    groups, _ = parse(argv)
    args = SimpleNamespace(**flat(groups))
    tokenizer = AutoTokenizer.from_pretrained(args.pretrain)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    samples, _ = load_data(groups, tokenizer, args.dataset, args.dataset_split, "--dataset")
    size = args.train_batch_size
    order = epoch_order(len(samples), args.seed, 0, shuffle=not args.no_shuffle)[: num_steps * size]
    chosen = [samples[i] for i in order]
    rows = [{"input_ids": list(s["input_ids"]), "completion_mask": list(s["loss_mask"])} for s in chosen]
    max_length, accumulation = args.max_len, size // micro_size
    if args.packing_samples:
        num_tokens = sum(len(row["input_ids"]) for row in rows)
        max_length, micro_size = args.max_tokens_per_micro_batch, 1
        accumulation = max(1, num_tokens // num_steps // max_length)
    times = StepTimes()
    on_cuda = args.device != "cpu" and torch.cuda.is_available()
    hardware = {"bf16": args.param_dtype == "bf16", "use_cpu": not on_cuda}  # bf16 is by autocast; weights stay fp32
    hardware["use_liger_kernel"] = on_cuda and find_spec("liger_kernel") is not None
    config = SFTConfig(
        output_dir=args.output_dir,
        per_device_train_batch_size=micro_size,
        gradient_accumulation_steps=accumulation,
        max_steps=num_steps,
        learning_rate=args.learning_rate,
        weight_decay=args.weight_decay,
        max_grad_norm=args.max_norm,
        max_length=max_length,
        packing=args.packing_samples,
        train_sampling_strategy="sequential",
        torch_compile=args.compile,
        **FASTEST_ON_CPU | hardware,
    )
    model = AutoModelForCausalLM.from_pretrained(args.pretrain, dtype=torch.float32)
    trl = SFTTrainer(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[times],
    )
    lengths, per_step = list(map(len, trl.train_dataset["input_ids"])), micro_size * accumulation
    times.tokens = [sum(lengths[first : first + per_step]) for first in range(0, len(lengths), per_step)]
    trl.train()
    if not args.no_save:
        trl.save_model(f"{args.output_dir}/model")
    with open(f"{args.output_dir}/metrics.jsonl", "w") as log:
        log.writelines(json.dumps(row) + "\n" for row in times.rows)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
