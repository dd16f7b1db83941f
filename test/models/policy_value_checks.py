"""Chunks of logits on layouts: test_policy_values.py runs `policy_value_checks.py FOLDER`. Ranks are forks of it.

On each layout, log-probs, entropies and gradients are computed over all logits, and by chunks of five rows. With tp on
fsdp2, the losses of SFT upcast no more than five rows of bf16 logits at a time.
"""

import functools
import sys
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from largest_tensor import LargestTensor

from trainer.compare.machines.forked_ranks import import_libraries, run_ranks
from trainer.datasets.demos.demo import make_demo

LAYOUTS = {
    "fsdp2-dp2": (2, "fsdp2", {}),
    "fsdp2-tp2": (2, "fsdp2", {"tensor_parallel_size": 2}),
    "fsdp2-tp2-sequence": (2, "fsdp2", {"tensor_parallel_size": 2, "sequence_parallel": True}),
    "z1-tp2": (2, "deepspeed", {"zero_stage": 1, "tensor_parallel_size": 2}),
    "z3-dp2": (2, "deepspeed", {"zero_stage": 3}),
}


def check_upcast(tp_mesh, labels: torch.Tensor) -> None:
    """The losses of SFT from bf16 logits that are cut over tp."""
    from trainer.models.losses.token_losses import token_log_probs

    local = torch.randn(*labels.shape, 149, dtype=torch.bfloat16, requires_grad=True)
    logits = DTensor.from_local(local, tp_mesh, [Shard(2)], run_check=False)
    with LargestTensor() as largest:
        token_log_probs(logits, labels).sum().backward()
    assert local.grad.abs().sum() > 0 and 4 * 149 <= largest.most <= 5 * 149, largest.most


def one_rank(folder: str, backend: str, options: dict) -> None:
    from trainer.models.losses import policy_values, token_losses
    from trainer.strategies.deepspeed import DeepspeedStrategy
    from trainer.strategies.fsdp2 import FSDP2Strategy
    from trainer.strategies.options import StrategyOptions

    kind = DeepspeedStrategy if backend == "deepspeed" else FSDP2Strategy
    results, plain_route, by_chunks, calls = [], token_losses.CHUNK_BYTES, policy_values._by_chunks, []

    def counted(*arguments):
        calls.append(1)
        return by_chunks(*arguments)

    policy_values._by_chunks = counted
    for chunk_bytes in (plain_route, 298 * 4 * 5):
        strategy = kind(StrategyOptions(param_dtype="fp32", device="cpu", max_norm=1e9, **options))
        strategy.setup_distributed()
        model = strategy.load_model(folder, AutoModelForCausalLM)
        optimizer = strategy.create_optimizer(model, lr=0.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        model, optimizer, scheduler = strategy.prepare((model, optimizer, scheduler))
        generator = torch.Generator().manual_seed(strategy.meshes.dp.get_local_rank())
        ids = torch.randint(3, 290, (2, 24), generator=generator)
        labels = torch.cat([ids[:, 1:], ids[:, :1]], 1)
        labels[0, :7] = labels[1, -4:] = -100
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
        batch["position_ids"] = torch.arange(24)[None].expand(2, -1)
        places = (labels != -100).flatten().nonzero().squeeze(1)[3:]  # three places keep the whole vocabulary
        others = torch.randint(3, 290, (len(places), 6), generator=generator)
        of_place = torch.cat([labels.flatten()[places, None], others], 1)
        batch["kept_sets"] = torch.stack([places.repeat_interleave(7), of_place.flatten()])
        weights = torch.rand(2, 2, 24, generator=generator)
        token_losses.CHUNK_BYTES = chunk_bytes
        log_probs, entropies = policy_values.policy_values(model, batch, 0.7, True)
        loss = (log_probs * weights[0] + 0.3 * entropies * weights[1]).sum()
        strategy.backward(loss, model, num_targets=50, is_last=True)
        grads = {name: grad.detach().double().clone() for name, grad in strategy.iter_full_grads(model)}
        results.append((log_probs.detach(), entropies.detach(), grads))
        strategy.optimizer_step(optimizer, model, scheduler)
    assert len(calls) == 1, "only the second run has chunks"
    if backend == "fsdp2" and strategy.sizes.tp > 1:
        check_upcast(strategy.meshes.params["tp"], labels)
    (log_probs, entropies, grads), (found_log_probs, found_entropies, found_grads) = results
    torch.testing.assert_close(found_log_probs, log_probs, rtol=0, atol=1e-5)
    torch.testing.assert_close(found_entropies, entropies, rtol=0, atol=1e-5)
    assert grads.keys() == found_grads.keys() and len(grads) > 20
    for name, grad in grads.items():
        assert grad.norm() > 0 and (grad - found_grads[name]).norm() <= 1e-4 * grad.norm(), name


def main(folder: str) -> None:
    import_libraries()
    make_demo(folder)
    import trainer.strategies.deepspeed
    import trainer.strategies.fsdp2  # noqa: F401 (both: once for all forks)

    for name, (ranks, backend, options) in LAYOUTS.items():
        if sys.argv[2:] and name not in sys.argv[2:]:
            continue
        log = Path(folder) / f"{name}.log"
        ending = run_ranks(functools.partial(one_rank, f"{folder}/model", backend, options), ranks, log, 120)
        assert ending.kind == "done", f"{name}: {ending}\n{log.read_text()[-3000:]}"
        print("ok", name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
