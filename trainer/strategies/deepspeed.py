"""The DeepSpeed strategy: a real DeepSpeed engine, ZeRO 0 to 3 over dp x sp.

Gradient contract: `backward` gets the sum of losses of one micro-batch, and the global count that the loss is a mean over. It
scales the sum by `number of loss ranks / count`, and DeepSpeed averages gradients over those ranks. The result is the
gradient of (sum of all losses) / count on every layout.
"""

import functools
import logging
import math
import os
import weakref
from collections.abc import Iterator, Sequence
from typing import Optional

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.utils import logger, safe_get_full_grad, safe_set_full_fp32_param

from trainer.checkpoints import run_state
from trainer.checkpoints.shards import TensorShard
from trainer.datasets.batches.global_batches import setup_dataloader
from trainer.distributed import collectives, mesh
from trainer.distributed.host_offload import bring_back, take_to_host
from trainer.distributed.replicas import check_replicas
from trainer.exact.exact_adamw import with_single_roundings
from trainer.exact.exact_gradients import ExactGradients, clip_coefficient
from trainer.exact.exact_products import fix_products
from trainer.exact.exact_reduction import flat_cut, gather_parts
from trainer.model_folders import model_folder
from trainer.model_folders.model_writer import save_pretrained
from trainer.model_parallel import tensor_parallel
from trainer.optimizers.adamw import use_parameters
from trainer.optimizers.build import build_optimizer
from trainer.strategies.dtypes import DTYPES
from trainer.strategies.four_bits import load_in_4_bits
from trainer.strategies.on_deepspeed import (
    autotp,
    autotp_layers,
    zero_0,
    zero_gradients,
    zero_loading,
    zero_masters,
)
from trainer.strategies.on_deepspeed.muon_import import import_muon
from trainer.strategies.on_deepspeed.zero_config import engine_config
from trainer.strategies.on_deepspeed.zero_weights import merged_weights, weights_to_save
from trainer.strategies.options import StrategyOptions, refuse_on_deepspeed


class DeepspeedStrategy:
    def __init__(self, options: StrategyOptions):
        self.zero_stage = 2 if options.zero_stage is None else options.zero_stage
        self.device = mesh.resolve_device(options.device)
        refuse_on_deepspeed(options, on_cpu=self.device.type == "cpu")
        self.options, self.seed = options, options.seed
        self.param_dtype, self._scaled = DTYPES[options.param_dtype], options.param_dtype == "fp16"
        self.sizes = options.mesh_sizes()
        self.exact: Optional[ExactGradients] = None
        self._exact_grads: dict[str, torch.Tensor] = {}  # gradients of a step by name, complete or this rank's parts
        self._takes_parts = (
            self.zero_stage == 3 and self.sizes.dp_replicate == 1
        )  # --exact: of a gradient, this rank's part
        self._folders = weakref.WeakKeyDictionary()  # loaded model -> its weights' folder and adapter
        self._reached = weakref.WeakKeyDictionary()  # trained model -> names of parameters that got a gradient

    # --- distributed set-up

    def setup_distributed(self) -> None:
        """Join the process group and build the mesh."""
        mesh.start_process_group(self.device)
        self.meshes = mesh.build_meshes(self.sizes, self.device)
        if self.options.exact:
            groups = (self.meshes.root[axis].get_group() for axis in ("tp", "sp"))
            self.exact = ExactGradients(self.meshes.loss.get_group(), *groups)
        self._tp_group = self.meshes.root["tp"].get_group()
        mesh.seed_everything(self.seed, self.options.deterministic, self.device)
        logger.setLevel(logging.ERROR)
        accelerator = deepspeed.accelerator
        if self.device.type == "cpu" and accelerator.get_accelerator().device_name() != "cpu":
            accelerator.set_accelerator(CPU_Accelerator())
        # on CPU, DeepSpeed would compile an all-reduce for inference now; training never calls it
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        import_muon()
        os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed reads it even if torchrun did not start the process
        if self.device.type == "cuda":  # DeepSpeed takes the GPU with this number; a task may see only GPU 0
            collectives.keep_local_rank()
            os.environ["LOCAL_RANK"] = str(self.device.index)
        deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)
        autotp.use_mesh_groups(self.meshes)

    def setup_ring_attn(self) -> dist.ProcessGroup:
        """The sp group. Its ranks hold zigzag parts of the same sequences, see `batches.sequence_split`."""
        return self.meshes.root["sp"].get_group()

    # --- models

    def load_model(
        self, folder: str, auto_class, *, attn_implementation: str = "sdpa", trust_remote_code: bool = False,
        adapter: Optional[str] = None,
    ) -> torch.nn.Module:  # fmt: skip
        """The model of a Hugging Face folder. Under ZeRO 3 it is read and partitioned now, else `prepare` reads it.

        `adapter` is the folder of an adapter whose update is added to its weights.
        """
        config = model_folder.read_config(folder, trust_remote_code)
        if self.sizes.tp > 1:
            tensor_parallel.validate_tp_sizes(config, self.sizes.tp, fsdp=1)
        options = {"attn_implementation": attn_implementation, "trust_remote_code": trust_remote_code}
        if self.zero_stage == 3:
            facts = {"dtype": self.param_dtype, "meshes": self.meshes, "device": self.device}
            engine_config = self._engine_config()
            model = zero_loading.load_partitioned(
                folder, config, auto_class, options, adapter=adapter, engine_config=engine_config, **facts
            )
        elif self.options.load_in_4bit:
            model = load_in_4_bits(folder, auto_class, self.param_dtype, self.device, **options)
        else:
            with torch.device("meta"):
                model = auto_class.from_config(config, dtype=torch.float32, **options)
            model_folder.read_generation_config(model, folder)
        self._folders[model] = folder, adapter
        return model

    def _engine_config(self, num_trained: int = 0, plan: Optional[dict[str, str]] = None) -> dict:
        options = {"on_cpu": self.device.type == "cpu", "num_trained": num_trained, "plan": plan}
        return engine_config(self.options, self.zero_stage, self.sizes, **options)

    def create_optimizer(
        self, model: torch.nn.Module, *, lr: float, betas=(0.9, 0.95), eps: float = 1e-8, weight_decay: float = 0.0
    ) -> torch.optim.Optimizer:
        """The optimizer that --optim names. `prepare` makes it work on fp32 masters."""

        def num_dims(parameter) -> int:
            # a ZeRO-3 parameter is empty here; ds_shape is its real shape. The engine partitions an adapter's later.
            return len(getattr(parameter, "ds_shape", parameter.shape))

        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "num_dims": num_dims}
        optimizer = build_optimizer(self.options.optim, model, **options)
        return with_single_roundings(optimizer) if self.options.exact else optimizer

    def prepare(self, *models_or_triples, offload: bool = False):
        """(engine, optimizer, scheduler) triples, or frozen engines. One item gives one result, several a list.

        `offload` keeps frozen weights in host memory. Under ZeRO 3, a layer's weights are on the device while it
        computes. Otherwise, all weights are on the device during a forward pass.
        """
        prepared = [
            self._prepare_trained(*item) if isinstance(item, tuple) else self._prepare_frozen(item, offload)
            for item in models_or_triples
        ]
        return prepared if len(prepared) > 1 else prepared[0]

    def _prepare_trained(self, model, optimizer, scheduler) -> tuple:
        names = {parameter: name for name, parameter in model.named_parameters()}
        weights = self._read(model, with_masters=self.param_dtype != torch.float32)
        use_parameters(optimizer, {parameter: model.get_parameter(name) for parameter, name in names.items()})
        initialize, plan = self._initializer(model)
        trained = (p for p in model.parameters() if p.requires_grad)
        num_trained = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in trained)
        config = self._engine_config(num_trained // self.sizes.tp, plan)
        kinds = tensor_parallel.split_layers(model) if self.options.exact else {}
        engine, wrapped, _, _ = initialize(model=model, optimizer=optimizer, config=config)
        if self.options.exact:
            fix_products(model, kinds, self.meshes.params["tp"], self.exact.split)
            zero_gradients.without_leaf_hooks(wrapped)
        self._note_reached(model)
        if self.options.adam_offload and self.zero_stage < 3:
            zero_gradients.read_together(wrapped)
        if self.param_dtype != torch.float32:
            if self.zero_stage == 0:
                zero_0.add_masters(model, wrapped, self.param_dtype)
            elif self.zero_stage == 1:
                zero_gradients.reduce_own_parts(wrapped, DTYPES[self.options.reduce_dtype])
            self._restore_masters(model, weights)
        return engine, wrapped, scheduler

    def _read(self, model, with_masters: bool = False, offload: bool = False):
        """Read the weights of a model that `load_model` left empty: to the device, or to host memory if tp shards them.

        Returns the opened weights of its folder, for `_restore_masters`; None if it was read before and has no masters.
        """
        (folder, adapter), new = self._folders.pop(model), model_folder.new_tensors(model, self.seed)
        is_empty, weights = next(model.parameters()).is_meta, None
        if is_empty or with_masters:
            names = list(model_folder.all_tensors(model) if is_empty else model_folder.stored_tensors(model))
            weights = model_folder.open_weights(model, folder, names, new, adapter)
        if is_empty:
            device = torch.device("cpu") if offload or self.sizes.tp > 1 else self.device
            for parameter in filter(torch.is_floating_point, model.parameters()):
                parameter.data = parameter.data.to(self.param_dtype)
            model.to_empty(device=device)
            model.tie_weights(recompute_mapping=False)
            for name, tensor in model_folder.all_tensors(model).items():
                tensor.data.copy_(weights.read(name))
            model_folder.restore_computed_buffers(model, device)
        for name, tensor in new.items() if not is_empty else ():
            zero_loading.set_whole(model.get_parameter(name), tensor)
        return weights

    def _initializer(self, model) -> tuple:
        """(deepspeed.initialize, tensor-parallel plan by which it shards `model`); the plan is None without tp."""
        if self.sizes.tp == 1:
            return functools.partial(deepspeed.initialize, dist_init_required=False), None
        plan = self._tp_plan(model)
        if self.options.exact:  # norms of heads add up their gradients themselves
            forms = tensor_parallel.exact_plan(plan)
            plan |= {pattern: form for pattern, form in forms.items() if form == "replicated"}
        return functools.partial(autotp_layers.initialize, plan=plan, tp_mesh=self.meshes.params["tp"]), plan

    def _tp_plan(self, model) -> dict[str, str]:
        with torch.device("meta"):  # parameters of `model` may be partitioned; a plan is checked on their real shapes
            skeleton = type(model)(model.config)
        tp_mesh = self.meshes.params["tp"]
        plan = tensor_parallel.resolve_tp_plan(skeleton, tp_mesh, use_hf_tp_plan=self.options.use_hf_tp_plan)
        if self.options.print_tp_plan:
            self.print(f"tensor-parallel plan:\n{tensor_parallel.format_plan(plan)}")
        return plan

    def _prepare_frozen(self, model, offload: bool) -> torch.nn.Module:
        self._read(model, offload=offload)
        initialize, plan = self._initializer(model)
        config = self._engine_config(plan=plan)
        facts = {"dtype": self.param_dtype, "device": self.device, "initialize": initialize}
        kinds = tensor_parallel.split_layers(model) if self.options.exact else {}
        offload = offload and self.device.type != "cpu"
        prepared = zero_loading.prepare_frozen(model, config, offload=offload, **facts)
        if self.options.exact:
            fix_products(model, kinds, self.meshes.params["tp"], self.exact.split)
        return prepared

    def _restore_masters(self, model, weights) -> None:
        """Set fp32 masters from the model folder. The engine made them from weights rounded to `param_dtype`."""
        tp_rank = self.meshes.root.get_local_rank("tp")
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad or weights.dtype(name) == self.options.param_dtype.upper():
                continue
            if self.zero_stage == 3:
                zero_loading.restore_partition(parameter, name, weights, self.meshes, self.device)
                continue
            full = autotp.local_part(parameter, weights.read(name).to(self.device).float(), tp_rank)
            safe_set_full_fp32_param(parameter, full) if self.zero_stage else parameter.master.data.copy_(full)

    # --- one training step

    def backward(self, loss_sum: torch.Tensor, model, *, num_targets: int, is_last: bool) -> None:
        """Backward of one micro-batch. `is_last` says that it is the last one of the step.

        With --exact, gradients of single samples are summed exactly, and the engine gets them after the last one.
        """
        if self.exact:
            trained = {name: p for name, p in model.module.named_parameters() if p.requires_grad}
            with zero_gradients.only_autograd(model):
                self.exact.add(loss_sum, trained, num_targets)
            if is_last:
                cut = flat_cut if self._takes_parts else None
                split = [name for name, parameter in trained.items() if autotp.is_sharded(parameter)]
                self.exact.reduce(num_targets, self._exact_grads.__setitem__, cut, split)
            return
        model.set_gradient_accumulation_boundary(is_last)
        # scale_wrt_gas=False: no other denominator than the global count; the engine has 1 accumulation step anyway
        model.backward(loss_sum * (self.meshes.loss.size() / num_targets), scale_wrt_gas=False)

    def optimizer_step(self, optimizer, model, scheduler) -> float:
        """Clip, step, schedule, zero. Returns the gradient norm before clipping. If it is not finite, nothing steps."""
        if self.exact:
            return self._exact_step(model, scheduler)
        if self.zero_stage == 0:
            return zero_0.optimizer_step(optimizer, model, scheduler, self.options.max_norm, self._tp_group)
        model.step()
        if model.was_step_applied():
            scheduler.step()
        return float(model.get_global_grad_norm())

    def _exact_step(self, model, scheduler) -> float:
        norm, grads, self._exact_grads = self.exact.norm, self._exact_grads, {}
        if math.isfinite(norm):
            for grad in grads.values():
                grad.mul_(clip_coefficient(norm, self.options.max_norm))
            zero_gradients.set_gradients(model, grads, self.zero_stage, self._takes_parts)
            model.step()
            scheduler.step()
        return norm

    def _note_reached(self, model) -> None:
        """Note which parameters autograd reaches. The engine removes gradients and hides which ones never came."""
        reached = self._reached[model] = set()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda grad, name=name: reached.add(name))

    def unreached_parameters(self, model) -> list[str]:
        """Names of the trainable parameters without a gradient, between the last `backward` and `optimizer_step`."""
        trainable = [name for name, parameter in model.module.named_parameters() if parameter.requires_grad]
        return [name for name in trainable if name not in self._reached[model.module]]

    def iter_full_grads(self, model) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, full fp32 gradient) between the last `backward` and `optimizer_step` (all-gather)."""
        if self.exact:
            shapes = {name: getattr(p, "ds_shape", p.shape) for name, p in model.module.named_parameters()}
            gathered = gather_parts(dict(self._exact_grads), shapes, self.exact.group)
            for name, grad in gathered if self._takes_parts else self._exact_grads.items():
                yield name, autotp.gather(model.module.get_parameter(name), grad, self._tp_group)
            return
        scale = model.optimizer.loss_scale if self._scaled else 1.0
        for name, parameter in model.module.named_parameters():
            if parameter.requires_grad:
                grad = safe_get_full_grad(vars(parameter).get("master", parameter))
                yield name, autotp.gather(parameter, grad.float() / scale, self._tp_group)

    # --- weights: move, compare, export

    def offload(self, *, model=None, optimizer=None) -> list[tuple]:
        """Move weights, optimizer states, or both to host memory until `onload` of the result. Use neither meanwhile.

        With both, the fp32 masters move too.
        """
        return take_to_host(zero_masters.tensors_of(model, optimizer, self.zero_stage))

    def onload(self, offloaded: list[tuple]) -> None:
        """Bring back what `offload` moved."""
        bring_back(offloaded)

    def check_replicas(self, model) -> None:
        """Raise UserError if a weight differs between ranks that should hold the same (collective over all axes)."""
        groups = {axis: self.meshes.params.get_group(axis) for axis in self.meshes.params.mesh_dim_names}
        replicated = [] if self.zero_stage == 3 else ["dp_replicate", "fsdp"]  # ZeRO 3 partitions every parameter

        def held(parameter) -> tuple[torch.Tensor, list[str]]:
            local = parameter.ds_tensor if self.zero_stage == 3 else parameter
            return local, replicated if autotp.is_sharded(parameter) else [*replicated, "tp"]

        check_replicas(((name, *held(p)) for name, p in model_folder.unwrapped(model).named_parameters()), groups)

    def iter_full_params(self, model, merged_as: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, full fp32 tensor), one at a time, on every rank (all-gather over dp x sp, then over tp).

        With an adapter: the trained tensors. With `merged_as`: the plain model that the adapter makes, in this dtype.
        """
        module = model_folder.unwrapped(model)
        if merged_as is not None:
            return merged_weights(module, merged_as, self._tp_group)
        names = model_folder.stored_tensors(module)
        parts = {**names, **dict(module.named_parameters())}  # only parameters know their masters
        return ((name, autotp.gather(parts[name], zero_masters.full(parts[name]), self._tp_group)) for name in names)

    def save_model(self, model, tokenizer, folder: str, max_shard_bytes: int = 2 << 30) -> None:
        """Write a Hugging Face folder in the compute dtype; see `model_writer.save_pretrained`."""
        tensors, module = weights_to_save(self, model, self._tp_group), model_folder.unwrapped(model)
        save_pretrained(tensors, module, tokenizer, folder, self.param_dtype, self.is_rank_0(), max_shard_bytes)
        collectives.wait_for_all()

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
            tensors = weights_to_save(self, model, self._tp_group) if form.hf_weights else None
            save_pretrained(tensors, model.module, tokenizer, target, self.param_dtype, self.is_rank_0())

        role_states = {role: {"scheduler_step": scheduler.last_epoch} for role, (_, _, scheduler) in roles.items()}
        for role in role_states:
            role_states[role]["loss_scale"] = (
                zero_masters.loss_scale_of(roles[role][1]) if self._scaled else run_state.NO_LOSS_SCALE
            )
        role_states[run_state.MAIN]["optim"] = self.options.optim
        shards = run_state.shards_of_roles(roles, self._shards, further)
        return run_state.save(folder, shards, state, role_states, self.device, form, export)

    def load_ckpt(self, folder: str, roles: dict[str, tuple], further: Sequence[TensorShard] = ()) -> dict:
        """Load a checkpoint of any backend and layout. Returns its state. Raises UserError if it is damaged."""
        shards = run_state.shards_of_roles(roles, self._shards, further)
        state = run_state.load(folder, shards, self.device, self.options.optim)
        for role, (model, optimizer, scheduler) in roles.items():
            own = run_state.role_state(state, role)
            zero_masters.to_weights(model_folder.unwrapped(model), optimizer, self.zero_stage)
            run_state.set_scheduler_step(scheduler, own["scheduler_step"])
            if self._scaled:
                zero_masters.set_loss_scale(optimizer, own["loss_scale"])
        return state

    def weight_shards(self, model, optimizer) -> Iterator[TensorShard]:
        """This rank's parts of the weights in fp32, as they are now, to read and to write."""
        return (shard for shard in self._shards(model, optimizer) if shard.key.startswith("weight/"))

    def _shards(self, model, optimizer) -> Iterator[TensorShard]:
        """This rank's parts of the masters, of the optimizer's states, and of tensors without a master."""
        module = model_folder.unwrapped(model)
        parameters, tp_rank = dict(module.named_parameters()), self.meshes.root.get_local_rank("tp")
        part = zero_masters.Part(self.zero_stage, self.meshes.loss.get_local_rank())
        for name, tensor in model_folder.stored_tensors(module).items():
            parameter = parameters.get(name)
            for shard in zero_masters.shards_of(name, tensor, parameter, optimizer, part):
                yield autotp.place(shard, parameter, tp_rank)

    # --- the same on every strategy
    setup_dataloader = setup_dataloader
    all_reduce = collectives.all_reduce
    all_gather = collectives.all_gather
    print = collectives.print
    is_rank_0 = collectives.is_rank_0
