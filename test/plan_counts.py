"""Count what rank 0 sends in a step, under torch's fake process group: `python plan_counts.py FOLDER`.

Prints a JSON line per layout: [name, ranks, micro-batches, {group size: bytes sent}]. Collectives of the fake group move
nothing, but their tensors have the real sizes. The names with `gloo` have real ranks. A ring is assumed, as in
trainer/planning/plan_traffic.py.
"""

import json
import os
import sys
from collections import Counter
from pathlib import Path

from trainer.compare.machines.forked_ranks import import_libraries, run_ranks

MODEL = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3}
MODEL |= {"num_attention_heads": 8, "num_key_value_heads": 8, "tie_word_embeddings": False}
EXPERTS = {"vocab_size": 16384, "hidden_size": 512, "moe_intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 64}
EXPERTS |= {"num_attention_heads": 8, "num_key_value_heads": 8, "num_experts": 128, "num_experts_per_tok": 8}
TOKENS = 64
CASES = {  # name: (backend, options, ranks, micro-batches)
    "fsdp2-3": ("fsdp2", {"zero_stage": 3}, 64, 8),
    "fsdp2-2": ("fsdp2", {"zero_stage": 2}, 8, 2),
    "fsdp2-3-once": ("fsdp2", {"zero_stage": 3, "reduce_once": True}, 8, 8),
    "fsdp2-3-hsdp": ("fsdp2", {"zero_stage": 3, "dp_replicate_size": 4}, 32, 8),
    "fsdp2-3-tp": ("fsdp2", {"zero_stage": 3, "tensor_parallel_size": 2}, 16, 2),
    "deepspeed-0": ("deepspeed", {"zero_stage": 0}, 8, 8),
    "deepspeed-1": ("deepspeed", {"zero_stage": 1}, 8, 8),
    "deepspeed-2": ("deepspeed", {"zero_stage": 2}, 8, 8),
    "deepspeed-3": ("deepspeed", {"zero_stage": 3}, 8, 2),
    "fsdp2-3-experts-64": ("fsdp2", {"zero_stage": 3}, 64, 2),
    "fsdp2-3-experts-256": ("fsdp2", {"zero_stage": 3}, 256, 2),
    "fsdp2-3-experts-64-ep8": ("fsdp2", {"zero_stage": 3, "expert_parallel_size": 8}, 64, 2),
    "fsdp2-3-experts-256-ep8": ("fsdp2", {"zero_stage": 3, "expert_parallel_size": 8}, 256, 2),
    "fsdp2-3-experts-256-ep128": ("fsdp2", {"zero_stage": 3, "expert_parallel_size": 128}, 256, 2),
    "deepspeed-1-gloo": ("deepspeed", {"zero_stage": 1}, 4, 8),
    "deepspeed-2-gloo": ("deepspeed", {"zero_stage": 2}, 4, 8),
    "deepspeed-1-fp32-gloo": ("deepspeed", {"zero_stage": 1, "param_dtype": "fp32"}, 4, 8),
}
# what ZeRO 3 does with a model of more than a billion parameters: it keeps no weight gathered
LARGE = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0}
ALL_TO_ALLS = ("alltoall_base_",)
NO_COLLECTIVES = ("wait_tensor", "_wrap_tensor_autograd")
ALL_GATHERS = ("_allgather_base_", "all_gather_into_tensor")
REDUCE_SCATTERS = ("_reduce_scatter_base_", "reduce_scatter_tensor")
ALL_REDUCES = ("allreduce_", "all_reduce", "all_reduce_")


def count_step(folder: str, name: str) -> None:
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._python_dispatch import TorchDispatchMode
    from transformers import AutoModelForCausalLM

    from trainer.strategies import deepspeed, fsdp2
    from trainer.strategies.options import StrategyOptions

    backend, options, num_ranks, num_micro = CASES[name]
    os.environ.update(WORLD_SIZE=str(num_ranks))
    if "gloo" not in name:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    engine_config, all_to_all = deepspeed.engine_config, dist.all_to_all_single

    def all_to_all_of_equals(received, sent, *args, **kwargs):
        """The fake group moves nothing. As if all ranks routed their tokens alike, what comes is what goes."""
        all_to_all(received, sent, *args, **kwargs)
        received.copy_(sent)

    dist.all_to_all_single = all_to_all_of_equals

    def config_of_a_large_model(*args, **kwargs):
        config = engine_config(*args, **kwargs)
        config["zero_optimization"] |= LARGE if config["zero_optimization"]["stage"] == 3 else {}
        return config

    deepspeed.engine_config = config_of_a_large_model
    sent = Counter()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            kind = function.__name__.split(".")[0]
            if kind not in NO_COLLECTIVES and function.namespace in ("c10d", "_c10d_functional"):
                size = _group_size([*args, *(kwargs or {}).values()])
                if size > 1:
                    sent[size] += _times(kind) * _largest(args, result) * (size - 1) / size
            return result

    strategy_class = fsdp2.FSDP2Strategy if backend == "fsdp2" else deepspeed.DeepspeedStrategy
    strategy = strategy_class(StrategyOptions(**{"device": "cpu", "param_dtype": "bf16", **options}))
    strategy.setup_distributed()
    model = strategy.load_model(folder, AutoModelForCausalLM)
    optimizer = strategy.create_optimizer(model, lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model, optimizer, scheduler = strategy.prepare((model, optimizer, scheduler))
    ids = torch.arange(TOKENS)[None]
    for _ in range(2):  # the first one makes states, and ZeRO 3 learns the order of the layers
        sent.clear()
        with Count():
            for number in range(num_micro):
                logits = model(input_ids=ids, use_cache=False).logits
                loss = logits.to_local() if hasattr(logits, "to_local") else logits
                strategy.backward(loss.float().sum(), model, num_targets=TOKENS, is_last=number == num_micro - 1)
            strategy.optimizer_step(optimizer, model, scheduler)
    if dist.get_rank() == 0:
        print(json.dumps([name, num_ranks, num_micro, dict(sent)]), flush=True)


def _group_size(arguments: list) -> int:
    """The size of the group among the arguments of a collective: an object, or the name of one."""
    import torch
    import torch.distributed as dist

    for value in arguments:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return dist.ProcessGroup.unbox(value).size()
        if isinstance(value, dist.ProcessGroup):
            return value.size()
        if isinstance(value, str) and value not in ("sum", "avg", "max", "min"):
            return dist.distributed_c10d._resolve_process_group(value).size()
    raise AssertionError(arguments)


def _times(kind: str) -> int:
    """How often a rank of a ring sends the whole tensor, but for its own part."""
    if kind in ALL_REDUCES:
        return 2
    assert kind in ALL_GATHERS + REDUCE_SCATTERS + ALL_TO_ALLS + ("broadcast_", "reduce_"), (
        kind
    )  # ZeRO 3 compares a few numbers
    return 1


def _largest(args, result) -> int:
    """Bytes of the largest tensor: the input of a reduce-scatter, the output of an all-gather."""
    import torch

    flat = [t for a in (*args, result) for t in (a if isinstance(a, (list, tuple)) else [a])]
    return max(t.numel() * t.element_size() for t in flat if isinstance(t, torch.Tensor))


def main(folder: Path) -> None:
    import_libraries()
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    from trainer.strategies import deepspeed, fsdp2  # noqa: F401 (before the forks)

    LlamaForCausalLM(LlamaConfig(**MODEL)).save_pretrained(folder)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**EXPERTS)).save_pretrained(folder / "experts")
    for name in sys.argv[2:] or CASES:
        log = folder / f"{name}.log"
        processes = CASES[name][2] if "gloo" in name else 1
        ending = run_ranks(
            lambda name=name: count_step(str(folder / "experts" if "experts" in name else folder), name),
            processes,
            log,
            timeout=100,
        )
        assert ending.kind == "done", ending.text + log.read_text()[-3000:]
        print(next(line for line in log.read_text().splitlines() if line.startswith('["')), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
