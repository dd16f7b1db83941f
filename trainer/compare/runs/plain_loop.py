"""The plain loop: one process, one sample per forward pass, a transformers model in fp32, and no strategy.

It shares no training code with the trainer: no packing, padding, collectives or wrappers. `--certify` replays steps of
our runs with it. `compare_backends.py --reference plain` replays the runs of other trainers.
"""

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from trainer.checkpoints.shards import ShardReader
from trainer.model_folders.model_folder import stored_tensors
from trainer.models.model_loading import disable_dropout, has_sdpa


def load_plain_model(folder: str, device: str, trust_remote_code: bool = False) -> torch.nn.Module:
    """The causal language model of a folder in fp32, without dropout."""
    attention = "sdpa" if has_sdpa(folder, AutoModelForCausalLM, trust_remote_code) else "eager"
    options = {"dtype": torch.float32, "attn_implementation": attention, "trust_remote_code": trust_remote_code}
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    disable_dropout(model)
    return model.to(device).train()


@torch.no_grad()
def read_checkpoint(model: torch.nn.Module, folder: str) -> None:
    """Give a plain model the weights of a checkpoint of any layout."""
    reader = ShardReader(folder)
    for name, tensor in stored_tensors(model).items():
        tensor.copy_(reader.read_full(f"weight/{name}").view(tensor.shape))


def token_losses(model: torch.nn.Module, sample: dict) -> torch.Tensor:
    """-log p of each target of one sample, (targets,). Logits at t predict token t + 1.

    `sample` has input_ids, and loss_mask (1 for a target).
    """
    device = next(model.parameters()).device
    ids = torch.tensor([list(sample["input_ids"])], device=device)
    targets = torch.tensor(list(sample["loss_mask"]), device=device)[1:].bool()
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    return F.cross_entropy(logits[targets], ids[0, 1:][targets], reduction="none")


def plain_step(model: torch.nn.Module, samples: list[dict], weights: list[float] | None = None) -> tuple[float, float]:
    """Forward and backward over one global batch: (loss, norm of all gradients). The gradients stay in `.grad`.

    The loss is the sum of all token losses over their number. `weights`, one per sample, replace 1 / number.
    """
    model.zero_grad()
    count = max(sum(sum(sample["loss_mask"][1:]) for sample in samples), 1)
    total = 0.0
    for sample, weight in zip(samples, weights or [1 / count] * len(samples), strict=True):
        if sum(sample["loss_mask"][1:]):
            loss = token_losses(model, sample).sum() * weight
            loss.backward()
            total += loss.item()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    return total, norm.item()
