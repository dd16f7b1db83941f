"""Count what waits for a GPU while the micro-batches of one step run, for test_syncs.py: `torchrun sync_counts.py FOLDER`.

An operator waits if its result's size or value must be known on the host: item(), nonzero, an index of booleans, a copy
to the host. On a CPU nothing waits, but the same operators run. So do DeepSpeed's calls of `synchronize`. Writes FOLDER/syncs.json: the places of each run.
"""

import json
import sys
import traceback
from pathlib import Path

import torch
from deepspeed.accelerator import get_accelerator
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.cli import train_dpo, train_ppo, train_sft
from trainer.entry import run_command
from trainer.methods import ppo
from trainer.models.losses import token_losses
from trainer.training import loop

WAITS = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "equal",
    "unique_consecutive",
    "_unique2",
    "repeat_interleave",
}
HOST = ("host_bounds",)  # reads what the loader keeps in host memory
TWO = ("--micro_train_batch_size", "2")
BY_TOKENS = ("--max_len", "64", "--train_batch_size", "8")
SFT = (*BY_TOKENS, *TWO)
ZERO_0, ZERO_2 = (("--backend", "deepspeed", "--zero_stage", stage) for stage in ("0", "2"))
PPO_BY_TOKENS = (
    "--label_key", "label", "--reward_func", "exact_match", "--prompt_max_len", "64", "--generate_max_len", "8",
    "--rollout_batch_size", "8", "--n_samples_per_prompt", "2", "--train_batch_size", "16",
    "--advantage_estimator", "gae", "--use_kl_loss", "--kl_estimator", "k3", "--init_kl_coef", "0.1", "--top_p", "0.9",
    "--entropy_loss_coef", "0.01",
)  # fmt: skip
PPO = (*PPO_BY_TOKENS, *TWO)
PACKED, RECOMPUTED = ("--packing_samples", "--max_tokens_per_micro_batch", "64"), ("--gradient_checkpointing",)
RUNS = {
    "padded": (train_sft, SFT),
    "padded_zero_0": (train_sft, (*SFT, *ZERO_0)),
    "padded_zero_2": (train_sft, (*SFT, *ZERO_2)),
    "packed": (train_sft, (*BY_TOKENS, *PACKED, *RECOMPUTED)),
    "packed_zero_2": (train_sft, (*BY_TOKENS, *PACKED, *ZERO_2)),
    "dpo": (train_dpo, SFT),
    "dpo_zero_2": (train_dpo, (*SFT, *ZERO_2)),
    "dpo_packed": (train_dpo, (*BY_TOKENS, *PACKED)),
    "ppo": (train_ppo, PPO),
    "ppo_zero_2": (train_ppo, (*PPO, *ZERO_2)),
    "ppo_packed": (train_ppo, (*PPO_BY_TOKENS, "--packing_samples", "--max_tokens_per_micro_batch", "72")),
}
DATA = {train_sft: "sft.jsonl", train_dpo: "pairs.jsonl", train_ppo: "prompts.jsonl"}
CHUNKS = {"": 2**27, "_by_linear_loss": 2**14}  # bytes of fp32 logits at a time: all of them, or a few rows


class Waits(TorchDispatchMode):
    """Notes the place in the trainer of each operator that would wait."""

    def __init__(self):
        super().__init__()
        self.places: list[str] = []

    def note(self, what: str) -> None:
        frames = traceback.extract_stack()[:-2]
        if not any(frame.name in HOST for frame in frames):
            ours = [f"{Path(frame.filename).name}:{frame.name}" for frame in frames if "trainer/" in frame.filename]
            self.places.append(f"{what} in {ours[-1]}")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put_", "index_put") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if (name in WAITS and func is not torch.ops.aten.repeat_interleave.self_int) or by_mask:
            self.note(name)
        return func(*args, **(kwargs or {}))


def main(argv: list[str]) -> None:
    folder, found = Path(argv[0]), {}
    forward_backward, tolist = loop.forward_backward, torch.Tensor.tolist
    accelerator = get_accelerator()
    synchronize = accelerator.synchronize
    for chunk_name, token_losses.CHUNK_BYTES in CHUNKS.items():
        for name, (command, flags) in RUNS.items():

            def counted(strategy, model, batch, loss_fn, name=name, chunks=chunk_name, **options):
                role = "_critic" if getattr(loss_fn, "__name__", "") == "value_loss" else ""
                with Waits() as waits:
                    torch.Tensor.tolist = lambda tensor: (waits.note("tolist"), tolist(tensor))[1]
                    accelerator.synchronize = lambda *_: (waits.note("synchronize"), synchronize())[1]
                    try:
                        result = forward_backward(strategy, model, batch, loss_fn, **options)
                    finally:
                        torch.Tensor.tolist, accelerator.synchronize = tolist, synchronize
                found.setdefault(name + role + chunks, []).append((len(batch.micro_batches), waits.places))
                return result

            loop.forward_backward = ppo.forward_backward = counted
            command.run(
                ["--pretrain", str(folder / "model"), "--dataset", str(folder / DATA[command]), "--no_save", "--max_steps", "2",
                 "--device", "cpu", "--output_dir", str(folder / (name + chunk_name)), *flags]
            )  # fmt: skip
    (folder / "syncs.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    run_command(main, sys.argv[1:])
