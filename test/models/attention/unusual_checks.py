"""Ring and Ulysses attention of unusual models: `torchrun unusual_checks.py [NAME ...]`.

test_unusual_attention.py and test_hybrid_models.py run it. Logits and gradients on two ranks against eager attention of each sample alone.
"""

import datetime
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from unusual_models import MODELS, SAMPLES, alone, assert_same_gradients, make_config, make_model

from trainer.datasets.batches.packing import collate_packed, collate_padded, model_inputs
from trainer.datasets.batches.sequence_split import split_micro_batch, zigzag_shard
from trainer.entry import end_well
from trainer.models.attention.choice import fit_attention, register_ring_attention, validate_split_model
from trainer.models.layers.activations import recompute_layers
from trainer.models.layers.recurrent_layers import restart_at_documents
from trainer.models.losses.token_losses import token_log_probs


def check(name: str, mode: str, batch: dict, recompute: bool, expected: tuple) -> None:
    what = f"{name} {mode} {'packed' if 'cu_seqlens' in batch else 'padded'}"
    model = make_model(name, register_ring_attention(dist.group.WORLD, mode, "cu_seqlens" in batch))
    fit_attention(model, is_split=True)
    if recompute:
        recompute_layers(model)
        model.train()
    restart_at_documents(model, dist.group.WORLD)
    shard = split_micro_batch(batch, dist.get_rank(), dist.get_world_size())
    logits = model(**model_inputs(shard)).logits
    (-token_log_probs(logits, shard["labels"]).sum()).backward()
    gradients = {key: weight.grad for key, weight in model.named_parameters()}
    for gradient in gradients.values():
        if gradient is not None:
            dist.all_reduce(gradient)
    assert_same_gradients(gradients, expected[1], what)
    if "cu_seqlens" not in batch:
        return
    padded = torch.nn.functional.pad(expected[0][None], (0, 0, 0, -expected[0].shape[0] % (2 * dist.get_world_size())))
    whole = zigzag_shard(padded, dist.get_rank(), dist.get_world_size())
    real = zigzag_shard(torch.arange(padded.shape[1])[None] < len(expected[0]), dist.get_rank(), dist.get_world_size())
    off = (logits - whole)[real].abs().max() / whole.abs().max()
    assert off <= 1e-5, f"{what}: logits are off by {off:.1e}"


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    for each in sys.argv[1:] or MODELS:
        validate_split_model(make_config(each))
        plain = alone(each)
        for each_mode in ("ring", "ulysses"):
            # Phimoe draws its experts at random in training, and nothing is recomputed outside of training
            check(each, each_mode, collate_packed(SAMPLES, 0), each != "Phimoe", plain)
            check(each, each_mode, collate_padded(SAMPLES, 0), False, plain)
        if dist.get_rank() == 0:
            print(f"ok {each}", flush=True)
    end_well()
