"""The weights that a rollout engine gets, and the bytes that they cost. test_weight_sync.py runs `sync_checks.py FOLDER`.

The models are written to FOLDER. Ranks are forks of this process. Each layout trains one step in bf16, so that the masters
are no bf16 numbers, then compares every tensor with the full fp32 one, cast, and counts what collectives send.
"""

import functools
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from trainer.compare.machines.forked_ranks import import_libraries, run_ranks
from trainer.datasets.demos.demo import make_demo

LAYOUTS = {  # name: (ranks, backend, options)
    "fsdp2-dp2": (2, "fsdp2", {}),
    "fsdp2-dp3": (3, "fsdp2", {}),  # three ranks: no size of the model is a multiple
    "fsdp2-tp2": (2, "fsdp2", {"tensor_parallel_size": 2}),
    "fsdp2-dp2-tp2": (4, "fsdp2", {"tensor_parallel_size": 2}),
    "fsdp2-replicas": (4, "fsdp2", {"dp_replicate_size": 2}),
    "fsdp2-lora-tp2": (2, "fsdp2", {"tensor_parallel_size": 2, "lora_rank": 4}),
    "fsdp2-experts": (2, "fsdp2", {"expert_parallel_size": 2}),
    "z2-dp2": (2, "deepspeed", {"zero_stage": 2}),
    "z1-tp2": (2, "deepspeed", {"zero_stage": 1, "tensor_parallel_size": 2}),
    "z1-dp2-tp2": (4, "deepspeed", {"zero_stage": 1, "tensor_parallel_size": 2}),
    "z3-dp2": (2, "deepspeed", {"zero_stage": 3}),
    "z3-dp3": (3, "deepspeed", {"zero_stage": 3}),
    "z3-lora": (2, "deepspeed", {"zero_stage": 3, "lora_rank": 4}),
}


class Counted:
    """Counts the bytes that collectives send, as rings do: an all-gather of n ranks (n - 1) / n of its result."""

    NAMES = ("all_gather_single", "all_gather_into_tensor", "all_gather", "all_reduce", "broadcast", "all_to_all_single",
             "reduce_scatter_single", "reduce_scatter_tensor")  # fmt: skip

    def __enter__(self):
        self.sent, self.calls, self._plain = 0, 0, {name: getattr(dist, name) for name in self.NAMES}
        for name, function in self._plain.items():
            setattr(dist, name, functools.partial(self._call, name, function))
        return self

    def __exit__(self, *_):
        for name, function in self._plain.items():
            setattr(dist, name, function)

    def _call(self, name: str, function, first, *arguments, **options):
        size = dist.get_world_size(options.get("group"))
        whole = sum(part.nbytes for part in first) if isinstance(first, list) else first.nbytes
        if name == "all_to_all_single":  # parts of unequal sizes; what comes, without a rank's own
            size, whole = 1, 0
            self.sent += first.nbytes
        self.sent += whole * (size - 1) // size * (2 if name == "all_reduce" else 1)
        self.calls += 1
        return function(first, *arguments, **options)


def one_rank(folder: str, backend: str, options: dict) -> None:
    from trainer.distributed.sharded_tensors import whole
    from trainer.model_folders.adapter_tensors import merge_adapter
    from trainer.model_folders.model_folder import all_tensors, unwrapped
    from trainer.models.lora import LoraOptions, add_adapter
    from trainer.rollout.engines.hf import HFEngine
    from trainer.rollout.engines.sync import sync_weights
    from trainer.strategies.deepspeed import DeepspeedStrategy
    from trainer.strategies.fsdp2 import FSDP2Strategy
    from trainer.strategies.options import StrategyOptions

    kind = DeepspeedStrategy if backend == "deepspeed" else FSDP2Strategy
    strategy = kind(StrategyOptions(param_dtype="bf16", device="cpu", **options))
    strategy.setup_distributed()
    model = strategy.load_model(folder, AutoModelForCausalLM)
    if options.get("lora_rank"):
        add_adapter(model, LoraOptions(4, 8), folder)
    optimizer = strategy.create_optimizer(model, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model, optimizer, scheduler = strategy.prepare((model, optimizer, scheduler))
    for _ in range(2):  # the first step of an adapter moves only one of its matrices
        logits = model(torch.arange(3, 40)[None]).logits
        logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
        strategy.backward(logits.float().logsumexp(-1).sum(), model, num_targets=1, is_last=True)
        strategy.optimizer_step(optimizer, model, scheduler)
    module = unwrapped(model)
    if backend == "deepspeed":
        from trainer.strategies.on_deepspeed import autotp
        from trainer.strategies.on_deepspeed.zero_masters import full

        parameters = dict(module.named_parameters())
        pairs = [
            (name, autotp.gather(parameters.get(name, t), full(parameters.get(name, t)), strategy._tp_group).clone())
            for name, t in all_tensors(module).items()
        ]
    else:
        pairs = [(name, whole(tensor)) for name, tensor in all_tensors(module).items()]
    expected = {name: tensor.to(torch.bfloat16) for name, tensor in merge_adapter(pairs, module)}
    assert any(not torch.equal(tensor, tensor.to(torch.bfloat16).to(tensor.dtype)) for _, tensor in pairs)
    with Counted() as counted:
        found = {name: tensor.clone() for name, tensor in strategy.iter_full_params(model, merged_as=torch.bfloat16)}
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == torch.bfloat16 and torch.equal(found[name], tensor), name
    engine = HFEngine(
        folder, None, dtype=torch.bfloat16, device=torch.device("cpu"), batch_size=2, trust_remote_code=False
    )
    facts = sync_weights(strategy, model, engine)
    for name, tensor in expected.items():
        assert torch.equal(engine.model.state_dict()[name], tensor), name
    num_bytes = sum(tensor.nbytes for tensor in expected.values())
    assert facts["sync_bytes"] == num_bytes
    strategy.print(f"sent {counted.sent / num_bytes:.3f} calls {counted.calls} tensors {len(expected)}")
    if not options.get("lora_rank"):
        for engine_tp in (size for size in (1, 2, 3) if dist.get_world_size() % size == 0):
            check_slices(strategy, model, expected, engine_tp)


def box_of_engine(name: str, shape: tuple, part: int, parts: int) -> tuple:
    """The slice of a rank in a tp group of vLLM: rows of the vocabulary with padding, columns, rows, or all."""
    columns = ("o_proj.weight", "down_proj.weight")
    if len(shape) == 1:
        return ((0, shape[0]),)
    dim = 1 if name.endswith(columns) else 0
    most = -(-shape[dim] // 64) * 64 // parts if "embed" in name or "lm_head" in name else -(-shape[dim] // parts)
    first = min(part * most, shape[dim])
    return tuple((first, min(first + most, size)) if d == dim else (0, size) for d, size in enumerate(shape))


def check_slices(strategy, model, expected: dict, engine_tp: int) -> None:
    """The slices of an engine over `engine_tp` ranks are those of the full tensors, and so is the sum over them."""
    from trainer.distributed.collectives import gather_objects
    from trainer.distributed.weight_slices import Slices, only_slices
    from trainer.rollout.engines.checksum import bits_sum, slice_sum

    part = dist.get_rank() % engine_tp
    slices = Slices(lambda name, shape: box_of_engine(name, shape, part, engine_tp))
    for _ in range(2):  # the second time, it knows the way
        with Counted() as counted, only_slices(slices):
            found = dict(strategy.iter_full_params(model, merged_as=torch.bfloat16))
    assert list(found) == list(expected) and counted.sent == slices.received
    for name, tensor in expected.items():
        boxes = {box_of_engine(name, tensor.shape, number, engine_tp) for number in range(engine_tp)}
        whole = 0
        for box in boxes:
            mine = tensor[tuple(slice(start, stop) for start, stop in box)]
            whole += slice_sum(mine, [start for start, _ in box], tensor.shape)
            if box == box_of_engine(name, tensor.shape, part, engine_tp):
                assert found[name].dtype == torch.bfloat16 and torch.equal(found[name], mine), name
        assert (whole - bits_sum(tensor)) % 2**64 == 0, name
    slice_bytes = sum(tensor.nbytes for tensor in expected.values()) / engine_tp
    shares = gather_objects(counted.sent / slice_bytes)
    strategy.print(f"slices {engine_tp} received {max(shares):.3f} calls {counted.calls}")


def make_experts(folder: Path) -> None:
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=298, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2, decoder_sparse_step=1, initializer_range=0.2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def main(folder: str) -> None:
    import_libraries()
    make_demo(folder)
    make_experts(Path(folder) / "experts")
    import trainer.strategies.deepspeed
    import trainer.strategies.fsdp2  # noqa: F401 (both: once for all forks)

    only = sys.argv[2:]
    for name, (ranks, backend, options) in LAYOUTS.items():
        if only and name not in only:
            continue
        log = Path(folder) / f"{name}.log"
        source = f"{folder}/experts" if "experts" in name else f"{folder}/model"
        ending = run_ranks(functools.partial(one_rank, source, backend, options), ranks, log, 120)
        assert ending.kind == "done", f"{name}: {ending}\n{log.read_text()[-3000:]}"
        lines = [line for line in log.read_text().splitlines() if line.startswith(("sent ", "slices "))]
        print(*(f"ok {name} {line}" for line in lines), sep="\n", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
