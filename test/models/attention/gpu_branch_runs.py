"""Trainings through every attention kernel of a GPU, on CPU, run by test_gpu_branches.py: `torchrun gpu_branch_runs.py FOLDER`.

The kernels are those of test/flash_attn_shim. They check their arguments as upstream does. Only the questions whether
there is a GPU are answered with yes. Each run prints its kernels; its losses are in FOLDER/NAME/metrics.jsonl.
"""

import importlib.util
import json
import sys
from pathlib import Path

import torch_kernels
import transformers.modeling_flash_attention_utils as integration
from flash_attn import flash_attn_interface

from trainer.cli import train_sft
from trainer.entry import run_command
from trainer.models.attention import choice, flash, kernels, varlen

BF16 = ("--param_dtype", "bf16", "--packing_samples")
FLASH_2 = ("--attn_implementation", "flash_attention_2")
FLASH_3 = ("--attn_implementation", "flash_attention_3")
ZERO_0 = ("--backend", "deepspeed", "--zero_stage", "0")
ZERO_2 = ("--backend", "deepspeed", "--zero_stage", "2")
RING = ("--ring_attn_size", "2")
RUNS = {
    "sdpa": BF16,
    "flash_2": (*BF16, *FLASH_2),
    "flash_2_padded": ("--param_dtype", "bf16", *FLASH_2),
    "flash_2_zero_0": (*BF16, *FLASH_2, *ZERO_0),
    "flash_2_zero_2": (*BF16, *FLASH_2, *ZERO_2),
    "flash_3": (*BF16, *FLASH_3),
    "flash_3_padded": ("--param_dtype", "bf16", *FLASH_3),
    "flash_3_selective": (*BF16, *FLASH_3, "--selective_checkpointing"),
    "varlen": BF16,
    "varlen_recomputed": (*BF16, "--gradient_checkpointing"),
    "varlen_selective": (*BF16, "--selective_checkpointing"),
    "varlen_zero_0": (*BF16, *ZERO_0),
    "varlen_zero_2": (*BF16, *ZERO_2),
    "ring": (*BF16, *RING),
    "ring_torch": (*BF16, *RING),
    "ring_zero_0": (*BF16, *RING, *ZERO_0),
    "ring_package": (*BF16, *RING, "--ring_attn_kernel", "ring_flash_attn"),
}


def claim_a_gpu() -> None:
    """Answer the questions about the GPU, as on one of compute capability 8.0 or newer."""
    flash._is_new_enough = lambda device: True
    choice.validate_flash_attention = choice.validate_ring_package = lambda *_: None
    for entry in integration.FLASH_ATTENTION_COMPATIBILITY_MATRIX.values():
        entry.update(general_availability_check=lambda: True, supported_devices=((lambda: True, "cpu"),))
    integration.is_flash_attn_2_available = integration.is_flash_attn_3_available = lambda: True


def main(argv: list[str]) -> None:
    folder = Path(argv[0])
    claim_a_gpu()
    library = torch_kernels.register()
    for name, flags in RUNS.items():
        if name == "ring_package" and importlib.util.find_spec("ring_flash_attn") is None:
            continue
        flash_attn_interface.calls.clear()
        kernels.on_gpu = varlen.on_gpu = lambda tensor, name=name: name != "sdpa"
        kernels.has_flash_attn = lambda name=name: name != "ring_torch"
        shared = (
            "--pretrain", str(folder / "model"), "--dataset", str(folder / "sft.jsonl"), "--no_save", "--max_steps",
            "2", "--train_batch_size", "8", "--micro_train_batch_size", "2", "--max_len", "64", "--device", "cpu",
            "--output_dir", str(folder / name),
        )  # fmt: skip
        train_sft.run([*shared, *flags])
        found = {}
        for call in flash_attn_interface.calls:
            key = f"{call.kernel} {call.dtype}"
            found[key] = found.get(key, 0) + 1
        (folder / name / "kernels.json").write_text(json.dumps(found))
    library._destroy()


if __name__ == "__main__":
    run_command(main, sys.argv[1:])
