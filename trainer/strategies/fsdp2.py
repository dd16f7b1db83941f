"""The FSDP2 strategy: torch's `parallelize_module` over tp, then `fully_shard` over (dp_replicate, dp_shard x sp).

Gradient contract: `backward` gets the sum of losses of one micro-batch, and the global count that the loss is a mean over. It
scales the sum by `number of loss ranks / count`, and FSDP2 averages gradients over those ranks. The result is the
gradient of (sum of all losses) / count on every layout.
"""

import functools
import weakref
from collections.abc import Iterator, Sequence
from typing import Optional

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from trainer.checkpoints import run_state
from trainer.checkpoints.shards import TensorShard, shard_of
from trainer.datasets.batches.global_batches import setup_dataloader
from trainer.distributed import collectives, mesh
from trainer.distributed.bucketed_gather import gathered, piece_of
from trainer.distributed.decoder_layers import decoder_layers
from trainer.distributed.gradient_norm import clip_grad_by_total_norm_, get_grad_norm
from trainer.distributed.host_offload import added_to_earlier, bring_back, take_to_host
from trainer.distributed.replicas import check_replicas, replicated_axes
from trainer.distributed.sharded_tensors import (
    chunks,
    even_placement,
    local_region,
    part_of,
    to_local_if_dtensor,
    whole,
)
from trainer.exact.exact_adamw import with_single_roundings
from trainer.exact.exact_gradients import ExactGradients
from trainer.exact.exact_products import fix_products
from trainer.model_folders import model_folder
from trainer.model_folders.adapter_tensors import merge_adapter, merging_dtype
from trainer.model_folders.model_writer import save_pretrained
from trainer.model_parallel import tensor_parallel
from trainer.model_parallel.expert_parallel import shard_experts, validate_experts
from trainer.optimizers.adamw import state_tensors, states_of, use_parameters
from trainer.optimizers.build import build_optimizer
from trainer.optimizers.loss_scale import DynamicLossScale
from trainer.strategies.dtypes import DTYPES
from trainer.strategies.four_bits import load_in_4_bits
from trainer.strategies.options import StrategyOptions, refuse_on_fsdp2


class FSDP2Strategy:
    def __init__(self, options: StrategyOptions):
        refuse_on_fsdp2(options)
        self.options, self.seed = options, options.seed
        self.param_dtype = DTYPES[options.param_dtype]
        self.sizes = options.mesh_sizes()
        self.device = mesh.resolve_device(options.device)
        self.loss_scale = None
        if options.param_dtype == "fp16":
            self.loss_scale = DynamicLossScale()
        self.exact: Optional[ExactGradients] = None
        self._folders = weakref.WeakKeyDictionary()  # model that is not sharded yet -> its weights' folder and adapter

    # --- distributed set-up

    def setup_distributed(self) -> None:
        """Join the process group and build the mesh."""
        options = self.options
        mesh.start_process_group(self.device, host_tensors=options.adam_offload)
        self.meshes = mesh.build_meshes(self.sizes, self.device)
        if options.exact:
            groups = (self.meshes.root[axis].get_group() for axis in ("tp", "sp"))
            self.exact = ExactGradients(self.meshes.loss.get_group(), *groups)
        mesh.seed_everything(self.seed, options.deterministic, self.device)

    def setup_ring_attn(self) -> dist.ProcessGroup:
        """The sp group. Its ranks hold zigzag parts of the same sequences, see `batches.sequence_split`."""
        return self.meshes.root["sp"].get_group()

    # --- models

    def load_model(
        self, folder: str, auto_class, *, attn_implementation: str = "sdpa", trust_remote_code: bool = False,
        adapter: Optional[str] = None,
    ) -> torch.nn.Module:  # fmt: skip
        """The model of a Hugging Face folder on the meta device. `prepare` reads its weights; 4-bit ones are read now.

        `adapter` is the folder of an adapter whose update is added to them.
        """
        options = {"attn_implementation": attn_implementation, "trust_remote_code": trust_remote_code}
        if self.options.load_in_4bit:
            model = load_in_4_bits(folder, auto_class, self.param_dtype, self.device, **options)
            self._folders[model] = folder, adapter
            return model
        config = model_folder.read_config(folder, trust_remote_code)
        if self.sizes.tp > 1:
            tensor_parallel.validate_tp_sizes(config, self.sizes.tp, self.sizes.dp_shard * self.sizes.sp)
        with torch.device("meta"):
            model = auto_class.from_config(config, dtype=torch.float32, **options)
        if self.options.expert_parallel_size > 1 or self.sizes.tp > 1:
            validate_experts(model, self.options.expert_parallel_size, self.sizes)
        model_folder.read_generation_config(model, folder)
        self._folders[model] = folder, adapter
        return model

    def create_optimizer(
        self, model: torch.nn.Module, *, lr: float, betas=(0.9, 0.95), eps: float = 1e-8, weight_decay: float = 0.0
    ) -> torch.optim.Optimizer:
        """The optimizer that --optim names. `prepare` points it at the sharded fp32 masters."""
        optimizer = build_optimizer(self.options.optim, model, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        return with_single_roundings(optimizer) if self.options.exact else optimizer

    def prepare(self, *models_or_triples, offload: bool = False):
        """Sharded (model, optimizer, scheduler) triples or frozen models. One item gives one result, several a list.

        `offload` keeps frozen weights in host memory. A layer's weights are on the device while it computes.
        """
        for item in models_or_triples:
            if not isinstance(item, tuple):
                self._shard(item, offload)
                continue
            model, optimizer, _ = item
            names = {parameter: name for name, parameter in model.named_parameters()}
            self._shard(model, self.options.adam_offload)
            sharded = dict(model.named_parameters())
            use_parameters(optimizer, {parameter: sharded[name] for parameter, name in names.items()})
        return list(models_or_triples) if len(models_or_triples) > 1 else models_or_triples[0]

    def _shard(self, model: torch.nn.Module, offload: bool) -> None:
        """Shard the model over tp, then each decoder layer and the rest over fsdp. Read this rank's part of each weight.

        Masters are fp32. Weights of a frozen model, or below an adapter, have the compute dtype. tp comes first: fsdp
        shards what a tp rank holds.
        """
        low = None if self.param_dtype == torch.float32 else self.param_dtype
        offload = offload and self.device.type != "cpu"
        if low:
            _cast_frozen(model, low)
        options = self._fsdp_options(low, offload)
        if self.options.load_in_4bit:  # packed bytes, which each rank keeps as a whole
            options["ignored_params"] = {p for p in model.parameters() if not p.is_floating_point()}
        if self.sizes.tp > 1:
            options["shard_placement_fn"] = self._apply_tp(model)
        if self.options.exact:
            kinds = tensor_parallel.split_layers(model)
            fix_products(model, kinds, self.meshes.params["tp"], self.exact.split)
        if self.options.exact and any(p.requires_grad for p in model.parameters()):
            options["reshard_after_forward"] = False  # no memory is saved: --exact sums whole gradients on each rank
        if self.options.expert_parallel_size > 1 or self.sizes.tp > 1:
            shard_experts(model, self.sizes, self.options.expert_parallel_size, self.device.type, options)
        if dist.get_world_size() > 1 or low or offload:  # otherwise, there is nothing to shard, cast or move
            _fully_shard(model, options)
        self._load_shards(model, offload)

    def _fsdp_options(self, low: Optional[torch.dtype], offload: bool) -> dict:
        """The options of `fully_shard` without tp. `low` is the compute dtype if it is below fp32."""
        axes = ("dp_replicate", "fsdp") if self.sizes.dp_replicate > 1 else ("fsdp",)
        options = {
            "mesh": self.meshes.params[axes],
            "mp_policy": MixedPrecisionPolicy(param_dtype=low, reduce_dtype=DTYPES[self.options.reduce_dtype]),
            "reshard_after_forward": self.options.zero_stage != 2,
            "shard_placement_fn": functools.partial(even_placement, num_ranks=self.meshes.params["fsdp"].size()),
        }
        return options | {"offload_policy": CPUOffloadPolicy()} if offload else options

    def _apply_tp(self, model: torch.nn.Module):
        """Shard the model over tp. Returns the function that says which dimension of a parameter fully_shard shards."""
        with torch.device("meta"):  # the plan is of the base model, so the skeleton has no adapter
            skeleton = type(model)(model.config)
        plan = tensor_parallel.resolve_tp_plan(
            skeleton,
            self.meshes.params["tp"],
            use_hf_tp_plan=self.options.use_hf_tp_plan,
            sequence_parallel=self.options.sequence_parallel,
        )
        plan = tensor_parallel.plan_with_lora(plan, model)
        if self.options.print_tp_plan:
            self.print(f"tensor-parallel plan:\n{tensor_parallel.format_plan(plan)}")
        plan = tensor_parallel.exact_plan(plan) if self.options.exact else plan
        tensor_parallel.apply_tp_plan(model, plan, self.meshes.params["tp"])
        return tensor_parallel.fsdp_placement

    def _load_shards(self, model: torch.nn.Module, offloaded: bool) -> None:
        if self.options.load_in_4bit:  # only the adapter has no values yet
            del self._folders[model]
            with torch.no_grad():
                for name, tensor in model_folder.new_tensors(model, self.seed).items():
                    parameter = model.get_parameter(name)
                    to_local_if_dtensor(parameter).copy_(tensor[local_region(parameter) or ...])
            return
        model.to_empty(device="cpu" if offloaded else self.device)
        model.tie_weights(recompute_mapping=False)
        tensors = model_folder.all_tensors(model)  # without tied aliases, which were tied again above
        new = model_folder.new_tensors(model, self.seed)
        folder, adapter = self._folders.pop(model)
        weights = model_folder.open_weights(model, folder, list(tensors), new, adapter)
        with torch.no_grad():
            for name, tensor in tensors.items():
                to_local_if_dtensor(tensor).copy_(weights.read(name, local_region(tensor)))
        model_folder.restore_computed_buffers(model, self.device)

    # --- one training step

    def backward(self, loss_sum: torch.Tensor, model, *, num_targets: int, is_last: bool) -> None:
        """Backward of one micro-batch. `is_last` says that it is the last one of the step.

        Gradients are reduced into fp32 shards at once. Replicas of hybrid sharding add up theirs after the last
        micro-batch. With --reduce_once, whole gradients are summed in fp32 until then. With --exact, gradients of
        single samples are summed exactly, and `fully_shard` sees only their shards after the last one.
        """
        if self.exact:
            return self._exact_backward(loss_sum, model, num_targets, is_last)
        replicated = self.sizes.dp_replicate > 1 and isinstance(model, FSDPModule)
        if self.options.reduce_once and isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(is_last)
        elif replicated:
            model.set_requires_all_reduce(is_last)
        factor = self.meshes.loss.size() * self._scale() / num_targets
        in_host_memory = self.options.adam_offload and isinstance(model, FSDPModule)
        sharded = [parameter for _, _, parameter in _trained_parts(model)] if in_host_memory else []
        with added_to_earlier(sharded):
            (loss_sum * factor).backward()
        if replicated and is_last:
            groups = (group for part in model.modules() if isinstance(part, FSDPModule) for group in _groups(part))
            if any(group._partial_reduce_output is not None for group in groups):
                raise RuntimeError("a layer got a gradient in an earlier micro-batch, but none in the last one")

    def _exact_backward(self, loss_sum: torch.Tensor, model, num_targets: int, is_last: bool) -> None:
        parts = {name: (leaf, sharded) for name, leaf, sharded in _trained_parts(model)}
        if isinstance(model, FSDPModule):
            model.set_reshard_after_backward(is_last)  # weights are gathered once in a step, not for each sample
        self.exact.add(loss_sum, {name: leaf for name, (leaf, _) in parts.items()}, num_targets)

        def place(name: str, gradient: torch.Tensor) -> None:
            parts[name][1].grad = part_of(gradient, like=parts[name][1], is_part=cut is not None)

        def cut_as_sharded(name: str, tensor: torch.Tensor, num_ranks: int) -> list[torch.Tensor]:
            return chunks(tensor, num_ranks, parts[name][1].placements[0].dim)

        if is_last:
            is_sharded = isinstance(model, FSDPModule) and self.sizes.dp_replicate == 1
            cut = cut_as_sharded if is_sharded else None
            split = [name for name, (leaf, _) in parts.items() if isinstance(leaf, DTensor) and _is_split(leaf)]
            self.exact.reduce(num_targets, place, cut, split)

    def _scale(self) -> float:
        return self.loss_scale.scale if self.loss_scale else 1.0

    def optimizer_step(self, optimizer, model, scheduler) -> float:
        """Clip, step, schedule, zero. Returns the gradient norm before clipping. If it is not finite, nothing steps."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if self.loss_scale:
            self.loss_scale.unscale_(parameters)
        norm = torch.tensor(self.exact.norm, dtype=torch.float64) if self.exact else get_grad_norm(parameters)
        finite = bool(torch.isfinite(norm))
        if self.loss_scale:
            self.loss_scale.update(overflow=not finite)
        if finite:
            clip_grad_by_total_norm_(parameters, self.options.max_norm, norm)
            optimizer.step()
            scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        return norm.item()

    def unreached_parameters(self, model) -> list[str]:
        """Names of the trainable parameters without a gradient, between the last `backward` and `optimizer_step`."""
        trainable = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
        if self.exact:
            return [name for name, _ in trainable if name not in self.exact.reached]
        return [name for name, parameter in trainable if parameter.grad is None]

    def iter_full_grads(self, model) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, full fp32 gradient) between the last `backward` and `optimizer_step` (all-gather)."""
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                yield name, whole(parameter.grad) / self._scale()

    # --- weights: move, compare, export

    def offload(self, *, model=None, optimizer=None) -> list[tuple]:
        """Move weights, optimizer states or both to host memory until `onload` of the result. Use neither meanwhile."""
        tensors = list(model_folder.all_tensors(model).values()) if model is not None else []
        tensors += state_tensors(optimizer) if optimizer is not None else []
        return take_to_host(map(to_local_if_dtensor, tensors))

    def onload(self, offloaded: list[tuple]) -> None:
        """Bring back what `offload` moved."""
        bring_back(offloaded)

    def check_replicas(self, model) -> None:
        """Raise UserError if a weight differs between ranks that should hold the same (collective over all axes)."""
        groups = {axis: self.meshes.params.get_group(axis) for axis in self.meshes.params.mesh_dim_names}
        tensors = model_folder.all_tensors(model).items()
        check_replicas(((n, to_local_if_dtensor(t), replicated_axes(t, groups)) for n, t in tensors), groups)

    def iter_full_params(self, model, merged_as: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, full fp32 tensor), one at a time, on every rank (all-gather over the mesh of each parameter).

        With an adapter: the trained tensors. With `merged_as`: the plain model that the adapter makes, in this dtype.
        """
        if merged_as is None:
            return ((name, whole(tensor)) for name, tensor in model_folder.stored_tensors(model).items())
        tensors = model_folder.all_tensors(model).items()
        pieces = (piece_of(name, tensor, merging_dtype(name, merged_as)) for name, tensor in tensors)
        return merge_adapter(gathered(pieces), model, merged_as)

    def save_model(self, model, tokenizer, folder: str, max_shard_bytes: int = 2 << 30) -> None:
        """Write a Hugging Face folder in the compute dtype; see `model_writer.save_pretrained`."""
        tensors = self._weights_to_save(model)
        save_pretrained(tensors, model, tokenizer, folder, self.param_dtype, self.is_rank_0(), max_shard_bytes)
        collectives.wait_for_all()

    def _weights_to_save(self, model) -> Iterator[tuple[str, torch.Tensor]]:
        """The same as iter_full_params, cast before ranks send them: to the compute dtype, or fp32 with an adapter."""
        dtype = torch.float32 if model_folder.has_adapter(model) else self.param_dtype
        for name, tensor in model_folder.stored_tensors(model).items():
            yield name, whole(tensor.detach().to(dtype) if tensor.is_floating_point() else tensor)

    # --- checkpoints

    def save_ckpt(
        self,
        folder: str,
        roles: dict[str, tuple],
        tokenizer,
        *,
        state: dict,
        form: run_state.CheckpointForm,
        further: Sequence[TensorShard] = (),
    ) -> run_state.PendingSave:
        """Start to save weights, optimizer and random states, and `state` (JSON). `finish()` of the result ends it.

        `roles` are prepared (model, optimizer, scheduler) triples by name, including `run_state.MAIN`. `further` are
        more shards of this rank, such as averaged weights.
        """
        model = roles[run_state.MAIN][0]

        def export(target: str) -> None:
            tensors = self._weights_to_save(model) if form.hf_weights else None
            save_pretrained(tensors, model, tokenizer, target, self.param_dtype, self.is_rank_0())

        role_states = {role: {"scheduler_step": scheduler.last_epoch} for role, (_, _, scheduler) in roles.items()}
        scale = self.loss_scale.state_dict() if self.loss_scale else run_state.NO_LOSS_SCALE
        role_states[run_state.MAIN] |= {"loss_scale": scale, "optim": self.options.optim}
        shards = run_state.shards_of_roles(roles, self._shards, further)
        return run_state.save(folder, shards, state, role_states, self.device, form, export)

    def load_ckpt(self, folder: str, roles: dict[str, tuple], further: Sequence[TensorShard] = ()) -> dict:
        """Load a checkpoint of any backend and layout. Returns its state. Raises UserError if it is damaged."""
        shards = run_state.shards_of_roles(roles, self._shards, further)
        state = run_state.load(folder, shards, self.device, self.options.optim)
        for role, (_, _, scheduler) in roles.items():
            run_state.set_scheduler_step(scheduler, run_state.role_state(state, role)["scheduler_step"])
        if self.loss_scale:
            self.loss_scale.load_state_dict(state["loss_scale"])
        return state

    def weight_shards(self, model, optimizer) -> Iterator[TensorShard]:
        """This rank's parts of the weights in fp32, as they are now, to read and to write."""
        return (shard for shard in self._shards(model, optimizer) if shard.key.startswith("weight/"))

    def _shards(self, model, optimizer) -> Iterator[TensorShard]:
        """This rank's parts of the weights and of the optimizer's states. It makes states that no step has made yet."""
        for name, tensor in model_folder.stored_tensors(model).items():  # reshards what a forward pass left gathered
            yield shard_of(f"weight/{name}", tensor)
        names = {parameter: name for name, parameter in model.named_parameters()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                for kind, state in states_of(optimizer, parameter).items():
                    yield shard_of(f"{kind}/{names[parameter]}", state)

    # --- the same on every strategy
    setup_dataloader = setup_dataloader
    all_reduce = collectives.all_reduce
    all_gather = collectives.all_gather
    print = collectives.print
    is_rank_0 = collectives.is_rank_0


def _cast_frozen(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast what needs no fp32 master: the weights of a frozen model, or those below an adapter."""
    if model_folder.has_adapter(model) or not any(p.requires_grad for p in model.parameters()):
        for parameter in model.parameters():
            if parameter.is_floating_point() and not parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)


def _fully_shard(model: torch.nn.Module, options: dict) -> None:
    """Call `fully_shard` on each decoder layer, on the embedding and the head, and on the rest."""
    # layers of Zamba that share weights must be in one group: the root's
    tied = {model.get_parameter(name) for name in model.all_tied_weights_keys.values()}
    for layer in reversed(decoder_layers(model).values()):  # Mamba names layers and mixers: inner ones come first
        if tied.isdisjoint(layer.parameters()):
            fully_shard(layer, **options)
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    are_plain = all(type(end) in (torch.nn.Embedding, torch.nn.Linear) for end in ends)
    if are_plain and ends[0].weight is not ends[1].weight:
        for end in ends:  # otherwise, the root would hold both gathered for the whole step
            fully_shard(end, **options)
    if any(p.requires_grad for p in model.parameters()):  # its backward pass begins where its forward pass ends
        options = options | {"reshard_after_forward": False}
    fully_shard(model, **options)


def _trained_parts(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(name, tensor in the graph of a forward pass, parameter of the optimizer) of each trainable parameter."""
    prefixes = {module: f"{name}." if name else "" for name, module in model.named_modules()}
    if not isinstance(model, FSDPModule):
        yield from ((name, p, p) for name, p in model.named_parameters() if p.requires_grad)
        return
    for part in model.modules():
        for group in _groups(part) if isinstance(part, FSDPModule) else ():
            for held in group.fsdp_params:
                # a layer that never ran has no tensor in the graph, and no gradient
                if held.sharded_param.requires_grad and hasattr(held, "_unsharded_param"):
                    info = held._module_info
                    yield prefixes[info.module] + info.param_name, held._unsharded_param, held.sharded_param


def _is_split(parameter: DTensor) -> bool:
    return any(placement.is_shard() for placement in parameter.placements)


def _groups(module: FSDPModule) -> list:
    """The parameter groups that `fully_shard` made of a module.

    With hybrid sharding, they hold the sum over shards until it is all-reduced over the replicas.
    """
    return module._get_fsdp_state()._fsdp_param_groups
