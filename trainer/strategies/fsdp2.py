"""The FSDP2 strategy: torch's `parallelize_module` over tp, then `fully_shard` over (dp_replicate, dp_shard x sp).

Gradient contract: `backward` gets this rank's sum of losses and the global count that the loss is a mean over; it
scales by `number of loss ranks / count`, and FSDP2 averages gradients over those ranks. What remains is the gradient of
(sum of all losses) / count, whatever the layout.
"""

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Optional

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainer.errors import UserError
from trainer.strategies import adapter, checkpoint, gradients, mesh, ranks, run_state, tensor_parallel
from trainer.strategies.checkpoint_pieces import Piece, whole_piece
from trainer.strategies.common import (
    DTYPES,
    bring_back,
    decay_groups,
    optimizer_tensors,
    seed_everything,
    take_to_host,
)
from trainer.strategies.data_order import setup_dataloader


class FSDP2Strategy:
    def __init__(
        self,
        *,
        seed: int = 42,
        param_dtype: str = "bf16",
        max_norm: float = 1.0,
        zero_stage: Optional[int] = None,
        adam_offload: bool = False,
        tensor_parallel_size: int = 1,
        use_hf_tp_plan: bool = False,
        sequence_parallel: bool = False,
        print_tp_plan: bool = False,
        ring_attn_size: int = 1,
        dp_replicate_size: int = 1,
        device: str = "auto",
        dist_backend: str = "auto",
        deterministic: bool = True,
        lora: bool = False,
        load_in_4bit: bool = False,
        compile: bool = False,
        reduce_once: bool = False,
        optim: str = "adamw",
    ):
        if load_in_4bit:
            raise UserError("--load_in_4bit", "with --backend fsdp2", "--backend deepspeed with --zero_stage 0, 1, 2")
        if lora and sequence_parallel:
            raise UserError("--lora_rank", "with --sequence_parallel", "one of them")
        if compile and tensor_parallel_size > 1:
            # torch 2.13 fails in the backward pass of compiled layers that are cut over tp: views of distributed tensors
            found = f"with --backend fsdp2 and --tensor_parallel_size {tensor_parallel_size}"
            raise UserError("--compile", found, "--tensor_parallel_size 1, or --backend deepspeed")
        if reduce_once and adam_offload:  # gradients go to host memory as soon as they are reduced
            raise UserError("--reduce_once", "with --adam_offload", "one of them")
        if optim != "adamw" and adam_offload:  # gathers what is on the device
            raise UserError("--optim", f"{optim} with --adam_offload", "adamw")
        if zero_stage not in (None, 2, 3):
            raise UserError(
                "--zero_stage", f"{zero_stage} with --backend fsdp2", "3 (the default), 2 (keep weights gathered)"
            )
        self.seed, self.max_norm, self.deterministic = seed, max_norm, deterministic
        self.param_dtype = DTYPES[param_dtype]
        self.reshard_after_forward = zero_stage != 2
        self.optim, self.adam_offload, self.reduce_once = optim, adam_offload, reduce_once
        self.sizes = mesh.resolve_mesh_sizes(
            int(os.environ.get("WORLD_SIZE", 1)),
            dp_replicate=dp_replicate_size,
            sp=ring_attn_size,
            tp=tensor_parallel_size,
        )
        self.tp_options = {"use_hf_tp_plan": use_hf_tp_plan, "sequence_parallel": sequence_parallel}
        self.print_tp_plan = print_tp_plan
        tensor_parallel.validate_tp_flags(self.sizes.tp, **self.tp_options, print_tp_plan=print_tp_plan)
        self.device, self.dist_backend = mesh.resolve_device(device), dist_backend
        self.loss_scale = gradients.DynamicLossScale(enabled=param_dtype == "fp16")

    # --- distributed set-up

    def setup_distributed(self) -> None:
        """Join the process group and build the mesh."""
        mesh.start_process_group(self.device, self.dist_backend, host_tensors=self.adam_offload)
        self.meshes = mesh.build_meshes(self.sizes, self.device)
        seed_everything(self.seed, self.deterministic, self.device)

    def setup_ring_attn(self) -> dist.ProcessGroup:
        """The sp group: its ranks hold zigzag parts of the same sequences, see `datasets.sequence_split`."""
        return self.meshes.root["sp"].get_group()

    # --- models

    def load_model(
        self,
        folder: str,
        auto_class,
        *,
        attn_implementation: str = "sdpa",
        trust_remote_code: bool = False,
    ) -> torch.nn.Module:
        """The model of a Hugging Face folder, without memory for its weights until it is sharded in `prepare`."""
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        tensor_parallel.validate_tp_sizes(config, self.sizes.tp, self.sizes.dp_shard * self.sizes.sp)
        with torch.device("meta"):
            model = auto_class.from_config(
                config,
                dtype=torch.float32,
                attn_implementation=attn_implementation,
                trust_remote_code=trust_remote_code,
            )
        checkpoint.read_generation_config(model, folder)
        model.pretrained_folder, model.new_tensors = folder, {}
        return model

    def _shard(self, model: torch.nn.Module, offload: bool = False) -> None:
        """Cut the model over tp, then each decoder layer and the rest over fsdp; read this rank's part of every weight.

        Masters are fp32. tp comes first: fsdp shards what a tp rank holds.
        """
        if model.pretrained_folder is None:
            return
        if self.sizes.tp > 1:
            with torch.device("meta"):  # without an adapter, of which a plan does not know
                skeleton = type(model)(model.config)
            plan = tensor_parallel.resolve_tp_plan(skeleton, **self.tp_options)
            plan = adapter.plan_with_adapter(plan, model, tensor_parallel.FLAG)
            if self.print_tp_plan:
                self.print(f"tensor-parallel plan:\n{tensor_parallel.format_plan(plan)}")
            tensor_parallel.apply_tp_plan(model, plan, self.meshes.params["tp"])
        low = None if self.param_dtype == torch.float32 else self.param_dtype
        axes = ("dp_replicate", "fsdp") if self.sizes.dp_replicate > 1 else ("fsdp",)
        options = {
            "mesh": self.meshes.params[axes],
            "mp_policy": MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32),
            "reshard_after_forward": self.reshard_after_forward,
            "shard_placement_fn": tensor_parallel.fsdp_placement,
        }
        offload = (offload or self.adam_offload) and self.device.type != "cpu"
        if offload:
            options["offload_policy"] = CPUOffloadPolicy()
        if dist.get_world_size() > 1 or low or offload:  # else there is nothing to cut, to cast or to move
            layers = set(model._no_split_modules or [])
            for module in list(model.modules()):
                if type(module).__name__ in layers:
                    fully_shard(module, **options)
            fully_shard(model, **options)
        self._load_shards(model, offload)

    def _load_shards(self, model: torch.nn.Module, offloaded: bool) -> None:
        model.to_empty(device="cpu" if offloaded else self.device)
        model.tie_weights(recompute_mapping=False)
        tensors = checkpoint.all_tensors(model)  # tied aliases are not among them: they were tied again above
        weights = checkpoint.open_weights(model, model.pretrained_folder, list(tensors))
        with torch.no_grad():
            for name, tensor in tensors.items():
                gradients.to_local_if_dtensor(tensor).copy_(weights.read(name, gradients.local_region(tensor)))
        checkpoint.restore_computed_buffers(model, self.device)
        model.pretrained_folder, model.new_tensors = None, {}

    def create_optimizer(
        self, model: torch.nn.Module, *, lr: float, betas=(0.9, 0.95), eps: float = 1e-8, weight_decay: float = 0.0
    ) -> torch.optim.Optimizer:
        """AdamW, or what --optim asks for, over fp32 masters. The model is sharded here, so that it holds its final ones."""
        self._shard(model)
        if self.optim != "adamw":
            from trainer.strategies import matrix_optimizers

            options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
            return matrix_optimizers.build(self.optim, model, **options)
        groups = decay_groups(model.named_parameters(), weight_decay)
        return torch.optim.AdamW(groups, lr=lr, betas=tuple(betas), eps=eps, fused=True)

    def prepare(self, *models_or_triples, is_rlhf: bool = False, offload: bool = False):
        """Sharded (model, optimizer, scheduler) triples, or sharded frozen models. One in, one out; several, a list.

        `offload` keeps frozen weights in host memory; a layer's are on the device while it computes.
        """
        prepared = []
        for item in models_or_triples:
            if isinstance(item, tuple):
                self._shard(item[0])
            else:
                self._shard(item, offload)
            prepared.append(item)
        return prepared if is_rlhf or len(prepared) > 1 else prepared[0]

    # --- one training step

    def backward(self, loss_sum: torch.Tensor, model, optimizer, *, num_targets: int, is_last: bool) -> None:
        """Backward of one micro-batch. Gradients are reduced into fp32 shards at once; with `reduce_once`, whole ones are
        summed in fp32 until the last micro-batch of the step."""
        if self.reduce_once and isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(is_last)
        factor = self.meshes.loss.size() * self.loss_scale.scale / num_targets
        (loss_sum * factor).backward()

    def optimizer_step(self, optimizer, model, scheduler) -> float:
        """Clip, step, schedule, zero. Returns the gradient norm before clipping; if it is not finite, nothing is stepped."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.loss_scale.unscale_(parameters)
        norm = gradients.get_grad_norm(parameters)
        finite = bool(torch.isfinite(norm))
        self.loss_scale.update(overflow=not finite)
        if finite:
            gradients.clip_grad_by_total_norm_(parameters, self.max_norm, norm)
            optimizer.step()
            scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        return norm.item()

    def offload(self, *, model=None, optimizer=None) -> list[tuple]:
        """Move weights, optimizer states, or both to host memory until `onload` of the result, unused meanwhile."""
        tensors = list(checkpoint.all_tensors(model).values()) if model is not None else []
        tensors += optimizer_tensors(optimizer) if optimizer is not None else []
        return take_to_host(map(gradients.to_local_if_dtensor, tensors))

    def onload(self, offloaded: list[tuple]) -> None:
        """Bring back what `offload` moved."""
        bring_back(offloaded)

    def unreached_parameters(self, model) -> list[str]:
        """Names of the trainable parameters without a gradient, between the last `backward` and `optimizer_step`."""
        return [
            name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter.grad is None
        ]

    def check_replicas(self, model) -> None:
        """Raises UserError if a weight differs between ranks that should hold it alike (collective over all axes)."""
        from trainer.strategies import replicas

        groups = {axis: self.meshes.params.get_group(axis) for axis in self.meshes.params.mesh_dim_names}
        tensors = (
            (name, gradients.to_local_if_dtensor(tensor), _replicated_axes(tensor, groups))
            for name, tensor in checkpoint.all_tensors(model).items()
        )
        replicas.check_replicas(tensors, groups)

    # --- weights out

    def unwrap(self, model) -> torch.nn.Module:
        return model

    def iter_full_params(self, model, merged: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, full fp32 tensor), one at a time, on every rank (all-gather over the mesh of each parameter). With an
        adapter, what is trained; `merged`, the plain model that it makes of its base."""
        tensors = checkpoint.all_tensors(model) if merged else checkpoint.stored_tensors(model)
        pairs = ((name, gradients.whole(tensor)) for name, tensor in tensors.items())
        return adapter.merge_adapter(pairs, model) if merged else pairs

    def iter_full_grads(self, model) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, full fp32 gradient) between the last `backward` and `optimizer_step` (all-gather)."""
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                yield name, gradients.whole(parameter.grad) / self.loss_scale.scale

    def save_model(self, model, tokenizer, folder: str, max_shard_bytes: int = 2 << 30) -> None:
        """Write a Hugging Face folder in the compute dtype; see `checkpoint.save_pretrained`."""
        checkpoint.save_pretrained(
            self.iter_full_params(model), model, tokenizer, folder, self.param_dtype, self.is_rank_0(), max_shard_bytes
        )
        ranks.wait_for_all()

    # --- checkpoints

    def save_ckpt(
        self,
        folder: str,
        model,
        optimizer,
        scheduler,
        tokenizer,
        *,
        state: dict,
        portable: bool = False,
        background: bool = False,
        hf_weights: bool = False,
        others: Optional[dict[str, tuple]] = None,
        further: Sequence[Piece] = (),
    ) -> run_state.PendingSave:
        """Start to save a run: weights, optimizer states, random states, and `state` (JSON). `finish()` of the result ends it.

        `others` are further prepared (model, optimizer, scheduler) triples by role, such as a critic; `further` are pieces
        of this rank besides, such as averaged weights.
        """

        def export(target: str) -> None:
            tensors = self.iter_full_params(model) if hf_weights else None
            checkpoint.save_pretrained(tensors, model, tokenizer, target, self.param_dtype, self.is_rank_0())

        own = {"scheduler_step": scheduler.last_epoch, "loss_scale": self.loss_scale.state_dict(), "optim": self.optim}
        own["others"] = {role: {"scheduler_step": other[2].last_epoch} for role, other in (others or {}).items()}
        pieces = itertools.chain(self._all_pieces(model, optimizer, others), further)
        options = {"portable": portable, "background": background, "export": export}
        return run_state.save(folder, pieces, {**own, **state}, self.device, **options)

    def load_ckpt(
        self,
        folder: str,
        model,
        optimizer,
        scheduler,
        others: Optional[dict[str, tuple]] = None,
        further: Sequence[Piece] = (),
    ) -> dict:
        """Load what `save_ckpt` of any backend and layout wrote; returns its `state`. Raises UserError if it is damaged."""
        pieces = itertools.chain(self._all_pieces(model, optimizer, others), further)
        state = run_state.load(folder, pieces, self.device, self.optim)
        run_state.set_scheduler_step(scheduler, state["scheduler_step"])
        for role, (_, _, its_scheduler) in (others or {}).items():
            run_state.set_scheduler_step(its_scheduler, state["others"][role]["scheduler_step"])
        self.loss_scale.load_state_dict(state["loss_scale"])
        return state

    def weight_pieces(self, model, optimizer) -> Iterator[Piece]:
        """This rank's parts of the weights in fp32, as they are now, to read and to write."""
        return (piece for piece in self._pieces(model, optimizer) if piece.key.startswith("weight/"))

    def _all_pieces(self, model, optimizer, others: Optional[dict[str, tuple]]) -> Iterator[Piece]:
        yield from self._pieces(model, optimizer)
        for role, (other, its_optimizer, _) in (others or {}).items():
            yield from run_state.of_role(role, self._pieces(other, its_optimizer))

    def _pieces(self, model, optimizer) -> Iterator[Piece]:
        """This rank's parts of the weights and of the optimizer's states, which are made here where no step has made them yet."""
        for name, tensor in checkpoint.stored_tensors(model).items():  # shards again what a forward pass left gathered
            yield _piece(f"weight/{name}", tensor)
        names = {parameter: name for name, parameter in model.named_parameters()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                for kind, state in run_state.states_of(optimizer, parameter).items():
                    yield _piece(f"{kind}/{names[parameter]}", state)

    # --- helpers that know the mesh
    setup_dataloader = setup_dataloader  # in the same words on both, see `data_order`
    all_reduce = ranks.all_reduce
    all_gather = ranks.all_gather
    max_over_all_ranks = ranks.max_over_all_ranks
    broadcast_object = ranks.broadcast_object
    rank_0_first = ranks.rank_0_first
    rank_0_alone = ranks.rank_0_alone
    print = ranks.print
    is_rank_0 = ranks.is_rank_0


def _replicated_axes(tensor: torch.Tensor, axes: Iterable[str]) -> list[str]:
    """The mesh axes along which all ranks should hold the same local tensor."""
    sharded = set()
    if isinstance(tensor, DTensor):
        names = tensor.device_mesh.mesh_dim_names
        sharded = {name for name, placement in zip(names, tensor.placements) if not placement.is_replicate()}
    return [axis for axis in axes if axis not in sharded]


def _piece(key: str, tensor: torch.Tensor) -> Piece:
    """The part that this rank holds; of equal parts on several ranks, the first rank's is written."""
    if not isinstance(tensor, DTensor):
        return whole_piece(key, tensor, is_written=dist.get_rank() == 0)
    box, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    coordinate = tensor.device_mesh.get_coordinate()
    # not `is_shard()`: a dimension that tp and fsdp both cut has a strided shard, which says no to it
    is_first = all(at == 0 for at, placement in zip(coordinate, tensor.placements) if placement.is_replicate())
    local = tensor.detach().to_local()
    return Piece(key, tuple(tensor.shape), tuple(offset), tuple(box), None, local, is_first)
