"""The DeepSpeed strategy: a real DeepSpeed engine, ZeRO 0 to 3 over dp x sp.

Gradient contract: `backward` gets this rank's sum of losses and the global count that the loss is a mean over; it
scales by `number of loss ranks / count`, and DeepSpeed averages gradients over those ranks. What remains is the gradient
of (sum of all losses) / count, whatever the layout.
"""

import functools
import itertools
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Optional

import torch
import torch.distributed as dist

from trainer.errors import UserError
from trainer.strategies import autotp, checkpoint, gradients, mesh, ranks, run_state, tensor_parallel, zero_masters
from trainer.strategies.adapter import merge_adapter
from trainer.strategies.checkpoint_pieces import Piece, flat_piece, whole_piece
from trainer.strategies.common import (
    DTYPES,
    bring_back,
    decay_groups,
    keep_on_host,
    optimizer_tensors,
    seed_everything,
    take_to_host,
)
from trainer.strategies.data_order import setup_dataloader


class DeepspeedStrategy:
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
        self.zero_stage = 2 if zero_stage is None else zero_stage
        if self.zero_stage not in (0, 1, 2, 3):
            raise UserError("--zero_stage", str(zero_stage), "0, 1, 2 (the default), 3")
        if self.zero_stage == 0 and param_dtype == "fp16":
            raise UserError("--zero_stage", "0 with --param_dtype fp16", "1, 2, 3, or --param_dtype bf16, fp32")
        if self.zero_stage == 0 and adam_offload:
            raise UserError("--adam_offload", "with --zero_stage 0", "--zero_stage 1, 2, 3")
        if self.zero_stage < 3 and dp_replicate_size > 1:
            # ZeRO++ hpZ: weights are gathered within dp_shard x sp; only ZeRO 3 gathers weights
            raise UserError(
                "--dp_replicate_size", f"{dp_replicate_size} with --zero_stage {self.zero_stage}", "--zero_stage 3"
            )
        if sequence_parallel:
            raise UserError(
                "--sequence_parallel", "with --backend deepspeed, whose AutoTP has no such mode", "--backend fsdp2"
            )
        if lora and tensor_parallel_size > 1:
            found = f"with --backend deepspeed and --tensor_parallel_size {tensor_parallel_size}"
            raise UserError("--lora_rank", found, "--backend fsdp2, or --tensor_parallel_size 1")
        if load_in_4bit and self.zero_stage == 3:
            raise UserError("--load_in_4bit", "with --zero_stage 3", "--zero_stage 0, 1, 2")
        if compile and self.zero_stage == 3:
            # the hooks of ZeRO 3 leave pieces too small to gain from, and minutes of compilation
            raise UserError("--compile", "with --backend deepspeed and --zero_stage 3", "--zero_stage 0, 1, 2")
        if reduce_once and self.zero_stage > 1:  # below, DeepSpeed does nothing else
            found = f"with --backend deepspeed and --zero_stage {self.zero_stage}"
            raise UserError("--reduce_once", found, "--zero_stage 0, 1; or --backend fsdp2")
        if optim != "adamw" and (self.zero_stage > 0 or tensor_parallel_size > 1):
            # ZeRO hands an optimizer flat stretches of many weights, AutoTP parts of them; neither is a matrix
            layout = f"--zero_stage {self.zero_stage} and --tensor_parallel_size {tensor_parallel_size}"
            found = f"{optim} with --backend deepspeed, {layout}"
            raise UserError("--optim", found, "adamw; or --zero_stage 0 without tp, or --backend fsdp2")
        self.load_in_4bit, self.optim = load_in_4bit, optim
        self.seed, self.max_norm, self.deterministic = seed, max_norm, deterministic
        self.param_dtype = DTYPES[param_dtype]
        self.adam_offload = adam_offload
        self.sizes = mesh.resolve_mesh_sizes(
            int(os.environ.get("WORLD_SIZE", 1)),
            dp_replicate=dp_replicate_size,
            sp=ring_attn_size,
            tp=tensor_parallel_size,
        )
        self.use_hf_tp_plan, self.print_tp_plan = use_hf_tp_plan, print_tp_plan
        tensor_parallel.validate_tp_flags(
            self.sizes.tp,
            use_hf_tp_plan=use_hf_tp_plan,
            sequence_parallel=sequence_parallel,
            print_tp_plan=print_tp_plan,
        )
        self.device, self.dist_backend = mesh.resolve_device(device), dist_backend
        if param_dtype == "fp16" and self.device.type == "cpu":
            raise UserError(
                "--param_dtype", "fp16 with --backend deepspeed on CPU, which DeepSpeed refuses", "bf16, fp32"
            )

    # --- distributed set-up

    def setup_distributed(self) -> None:
        """Join the process group and build the mesh."""
        mesh.start_process_group(self.device, self.dist_backend)
        self.meshes = mesh.build_meshes(self.sizes, self.device)
        self._tp_group = self.meshes.root["tp"].get_group()
        seed_everything(self.seed, self.deterministic, self.device)
        import deepspeed
        from deepspeed.accelerator import get_accelerator, set_accelerator
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
        from deepspeed.utils import logger

        logger.setLevel(logging.ERROR)
        if self.device.type == "cpu" and get_accelerator().device_name() != "cpu":
            set_accelerator(CPU_Accelerator())
        # on CPU, DeepSpeed would compile an all-reduce for inference now; training never calls it
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)
        autotp.use_mesh_groups(self.meshes)

    def setup_ring_attn(self) -> dist.ProcessGroup:
        """The sp group: its ranks hold zigzag parts of the same sequences, see `datasets.sequence_split`."""
        return self.meshes.root["sp"].get_group()

    def _engine_config(self, with_optimizer: bool, plan: Optional[dict[str, str]] = None) -> dict:
        """DeepSpeed's configuration, with everything neutralised that would change the mathematics.

        `plan` is a tensor-parallel plan, given where the model is to be cut over tp.
        """
        stage = self.zero_stage
        zero = {"stage": stage}
        if self.sizes.dp_replicate > 1:
            zero["zero_hpz_partition_size"] = self.sizes.dp_shard * self.sizes.sp
        if self.adam_offload and with_optimizer:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": self.device.type != "cpu"}
        config = {
            # the batch belongs to the loader; DeepSpeed sees single micro-batches and is told where a step ends
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "zero_optimization": zero,
            "zero_force_ds_cpu_optimizer": False,  # torch AdamW on both backends, offloaded or not
            # ZeRO 0 clips nothing itself: its gradients are whole on every rank and are clipped in optimizer_step
            "gradient_clipping": self.max_norm if stage else 0.0,
            "data_types": {"grad_accum_dtype": "fp32"},
            "communication_data_type": "fp32",
            "steps_per_print": None,
        }
        if plan:
            config["tensor_parallel"] = autotp.tensor_parallel_config(plan, self.sizes.tp)
        if self.param_dtype == torch.bfloat16 and stage == 0:
            # the engine has no fp32 masters at stage 0; fp32 weights under autocast are the same mathematics
            config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
        elif self.param_dtype == torch.bfloat16:
            config["bf16"] = {"enabled": True, "check_grad_overflow": True}
        elif self.param_dtype == torch.float16:
            scaling = {"loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 2000, "hysteresis": 1}
            config["fp16"] = {"enabled": True, **scaling}
        return config

    # --- models

    def load_model(
        self,
        folder: str,
        auto_class,
        *,
        attn_implementation: str = "sdpa",
        trust_remote_code: bool = False,
    ) -> torch.nn.Module:
        """The model of a Hugging Face folder; under ZeRO 3 partitioned while it is loaded."""
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        tensor_parallel.validate_tp_sizes(config, self.sizes.tp, fsdp=1)
        autotp.validate_vocabulary(config, self.sizes.tp)
        if self.zero_stage == 3:
            model = self._load_partitioned(folder, config, auto_class, attn_implementation, trust_remote_code)
        else:
            checkpoint.find_weights(folder)
            model = auto_class.from_pretrained(
                folder,
                dtype=torch.float32,
                attn_implementation=attn_implementation,
                trust_remote_code=trust_remote_code,
                weights_only=True,
                **self._quantization(),
            )
            model.new_tensors = {}
        model.pretrained_folder = folder
        return model

    def _quantization(self) -> dict:
        """What from_pretrained needs for QLoRA (Dettmers et al. 2023): 4-bit NormalFloat, its scales quantized as well."""
        if not self.load_in_4bit:
            return {}
        from transformers import BitsAndBytesConfig

        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=self.param_dtype,
        )
        return {"quantization_config": config, "device_map": {"": self.device}}

    def _load_partitioned(self, folder: str, config, auto_class, attn_implementation: str, trust_remote_code: bool):
        """Build under zero.Init, which partitions each parameter as it is made, then fill them one at a time from
        the first rank of each dp x sp group."""
        import deepspeed
        from transformers.initialization import no_init_weights

        partitioned = deepspeed.zero.Init(
            config_dict_or_path=self._engine_config(with_optimizer=False),
            data_parallel_group=self.meshes.loss.get_group(),
            zero_param_parallel_group=autotp.hpz_group(self.meshes),
        )
        build = functools.partial(
            auto_class.from_config,
            config,
            dtype=self.param_dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
        )
        # The module that defines the model must be imported before: zero.Init takes back what decorators did to the
        # __init__ of classes that are defined inside it, so that the next model of experts would lack its config.
        with torch.device("meta"), no_init_weights():
            build()
        with partitioned, no_init_weights():
            model = build()
        checkpoint.read_generation_config(model, folder)
        model.new_tensors = {}
        model.tie_weights(recompute_mapping=False)  # skipped by no_init_weights
        names = list(checkpoint.stored_tensors(model))
        weights = checkpoint.open_weights(model, folder, names)
        parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
        with torch.no_grad():
            for name in names:
                if name in buffers:
                    buffers[name].copy_(weights.read(name))
                    continue
                with deepspeed.zero.GatheredParameters([parameters[name]], modifier_rank=0):
                    if self.meshes.loss.get_local_rank() == 0:
                        parameters[name].copy_(weights.read(name))
        checkpoint.restore_computed_buffers(model, self.device)  # zero.Init rounded them to the compute dtype
        return model

    def create_optimizer(
        self, model: torch.nn.Module, *, lr: float, betas=(0.9, 0.95), eps: float = 1e-8, weight_decay: float = 0.0
    ) -> torch.optim.Optimizer:
        """AdamW, or what --optim asks for; `prepare` makes it work on fp32 masters."""
        if self.optim != "adamw":
            from trainer.strategies import matrix_optimizers

            options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
            return matrix_optimizers.build(self.optim, model, **options)

        def num_dims(parameter) -> int:  # a ZeRO-3 parameter is empty here; ds_shape is its real shape
            # but not that of an adapter, which the engine partitions later
            return len(getattr(parameter, "ds_shape", parameter.shape))

        groups = decay_groups(model.named_parameters(), weight_decay, num_dims)
        return torch.optim.AdamW(groups, lr=lr, betas=tuple(betas), eps=eps, fused=True)

    def prepare(self, *models_or_triples, is_rlhf: bool = False, offload: bool = False):
        """(engine, optimizer, scheduler) triples, or engines of frozen models. One in, one out; several, a list.

        `offload` keeps frozen weights in host memory: under ZeRO 3 a layer's, else all are on the device during a forward.
        """
        prepared = [
            self._prepare_trained(*item) if isinstance(item, tuple) else self._prepare_frozen(item, offload)
            for item in models_or_triples
        ]
        return prepared if is_rlhf or len(prepared) > 1 else prepared[0]

    def _prepare_trained(self, model, optimizer, scheduler):
        import deepspeed
        from deepspeed.runtime import torch_autocast

        # a stage-0 engine made earlier in this process leaves this on, and ZeRO would then reduce gradients in bf16
        torch_autocast.TORCH_AUTOCAST_INITIALIZED = False
        config = self._engine_config(with_optimizer=True, plan=self._tp_plan(model))
        engine, wrapped, _, _ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, dist_init_required=False
        )
        autotp.return_sharded_logits(model, self.meshes.root["tp"])
        self._note_reached(model)
        if self.param_dtype != torch.float32 and self.zero_stage > 0:
            self._restore_masters(model)
        return engine, wrapped, scheduler

    def _tp_plan(self, model) -> Optional[dict[str, str]]:
        if self.sizes.tp == 1:
            return None
        with torch.device("meta"):  # parameters of `model` may be partitioned; a plan is checked on their real shapes
            skeleton = type(model)(model.config)
        plan = tensor_parallel.resolve_tp_plan(skeleton, use_hf_tp_plan=self.use_hf_tp_plan)
        if self.print_tp_plan:
            self.print(f"tensor-parallel plan:\n{tensor_parallel.format_plan(plan)}")
        return plan

    def _prepare_frozen(self, model, offload: bool = False):
        import deepspeed

        offload = offload and self.device.type != "cpu"
        if self.zero_stage < 3 and self.sizes.tp == 1:
            for parameter in filter(torch.is_floating_point, model.parameters()):
                parameter.data = parameter.data.to(
                    self.param_dtype
                )  # not the RoPE tables: the trained model's are fp32
            model.eval()
            return keep_on_host(model, self.device) if offload else model.to(device=self.device)
        # without an optimizer ZeRO 1 and 2 have nothing to partition, and DeepSpeed refuses them
        config = self._engine_config(with_optimizer=False, plan=self._tp_plan(model))
        config["zero_optimization"]["stage"] = 3 if self.zero_stage == 3 else 0
        if offload and self.zero_stage == 3:
            config["zero_optimization"]["offload_param"] = {"device": "cpu", "pin_memory": True}
        engine, _, _, _ = deepspeed.initialize(model=model, config=config, dist_init_required=False)
        autotp.return_sharded_logits(model, self.meshes.root["tp"])
        engine.eval()  # which an engine does without returning itself
        if offload and self.zero_stage < 3:
            keep_on_host(model, self.device)
        return engine

    def _restore_masters(self, model) -> None:
        """Set the fp32 masters from an fp32 checkpoint: the engine made them of weights already rounded to `param_dtype`."""
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

        weights = checkpoint.open_weights(model, model.pretrained_folder, list(checkpoint.stored_tensors(model)))
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad or weights.dtype(name) != "F32":
                continue
            full = autotp.local_part(
                parameter, weights.read(name).to(self.device), self.meshes.root.get_local_rank("tp")
            )
            if self.zero_stage < 3:
                safe_set_full_fp32_param(parameter, full)
                continue
            # DeepSpeed's setter of full values fails where the last rank's partition is padded
            size = parameter.ds_tensor.ds_numel
            start = size * self.meshes.loss.get_local_rank()
            local = torch.zeros(size, device=self.device)
            part = full.flatten()[start : start + size]
            local[: part.numel()] = part
            safe_set_local_fp32_param(parameter, local)

    # --- one training step

    def backward(self, loss_sum: torch.Tensor, model, optimizer, *, num_targets: int, is_last: bool) -> None:
        """Backward of one micro-batch; `is_last` tells the engine that the gradients are complete."""
        model.set_gradient_accumulation_boundary(is_last)
        # scale_wrt_gas: the engine would divide by its accumulation steps; the global count is the only denominator
        model.backward(loss_sum * (self.meshes.loss.size() / num_targets), scale_wrt_gas=False)

    def optimizer_step(self, optimizer, model, scheduler) -> float:
        """Clip, step, schedule, zero. Returns the gradient norm before clipping; if it is not finite, nothing is stepped."""
        if self.zero_stage == 0:
            return self._step_unpartitioned(model, scheduler)
        model.step()
        if model.was_step_applied():
            scheduler.step()
        return float(model.get_global_grad_norm())

    def _step_unpartitioned(self, model, scheduler) -> float:
        parameters = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
        norm = gradients.get_grad_norm(parameters, lambda p: (self._tp_group,) if autotp.is_sharded(p) else ())
        if torch.isfinite(norm):
            gradients.clip_grad_by_total_norm_(parameters, self.max_norm, norm)
            model.step()
            scheduler.step()
        model.zero_grad()
        return norm.item()

    def offload(self, *, model=None, optimizer=None) -> list[tuple]:
        """Move weights, optimizer states, or both to host memory until `onload` of the result, unused meanwhile.

        Of a model with its optimizer, the fp32 masters go too.
        """
        tensors = (
            optimizer_tensors(optimizer if self.zero_stage == 0 else optimizer.optimizer)
            if optimizer is not None
            else []
        )
        if model is not None:
            parameters = self.unwrap(model).parameters()
            tensors += [p.ds_tensor for p in parameters] if self.zero_stage == 3 else list(parameters)
        if model is not None and optimizer is not None and self.zero_stage > 0:
            tensors += zero_masters.all_of(optimizer, self.zero_stage)
        return take_to_host(tensors)

    def onload(self, offloaded: list[tuple]) -> None:
        """Bring back what `offload` moved."""
        bring_back(offloaded)

    def _note_reached(self, model) -> None:
        """Write down which parameters autograd reaches: the engine takes gradients away and hides what never came."""
        model.reached_parameters = set()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda grad, name=name: model.reached_parameters.add(name))

    def unreached_parameters(self, model) -> list[str]:
        """Names of the trainable parameters without a gradient, between the last `backward` and `optimizer_step`."""
        module = self.unwrap(model)
        trainable = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        return [name for name in trainable if name not in module.reached_parameters]

    def check_replicas(self, model) -> None:
        """Raises UserError if a weight differs between ranks that should hold it alike (collective over all axes)."""
        from trainer.strategies import replicas

        groups = {axis: self.meshes.params.get_group(axis) for axis in self.meshes.params.mesh_dim_names}
        replicated = [] if self.zero_stage == 3 else ["dp_replicate", "fsdp"]  # ZeRO 3 partitions every parameter

        def held(parameter) -> tuple[torch.Tensor, list[str]]:
            local = parameter.ds_tensor if self.zero_stage == 3 else parameter
            return local, replicated if autotp.is_sharded(parameter) else [*replicated, "tp"]

        replicas.check_replicas(((name, *held(p)) for name, p in self.unwrap(model).named_parameters()), groups)

    # --- weights out

    def unwrap(self, model) -> torch.nn.Module:
        return model.module if hasattr(model, "module") else model

    def iter_full_params(self, model, merged: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, full fp32 tensor), one at a time, on every rank (all-gather over dp x sp). With an adapter, what is
        trained; `merged`, the plain model that it makes of its base."""
        module, find = self.unwrap(model), checkpoint.all_tensors if merged else checkpoint.stored_tensors
        parts = {**(names := find(module)), **dict(module.named_parameters())}  # parameters, which know their masters
        pairs = ((name, autotp.gather(parts[name], zero_masters.full(parts[name]), self._tp_group)) for name in names)
        return merge_adapter(pairs, module) if merged else pairs

    def iter_full_grads(self, model) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, full fp32 gradient) between the last `backward` and `optimizer_step` (all-gather)."""
        from deepspeed.utils import safe_get_full_grad

        scale = model.optimizer.loss_scale if self.param_dtype == torch.float16 else 1.0
        for name, parameter in model.module.named_parameters():
            if parameter.requires_grad:
                yield name, autotp.gather(parameter, safe_get_full_grad(parameter).float() / scale, self._tp_group)

    def save_model(self, model, tokenizer, folder: str, max_shard_bytes: int = 2 << 30) -> None:
        """Write a Hugging Face folder in the compute dtype; see `checkpoint.save_pretrained`."""
        module = self.unwrap(model)
        checkpoint.save_pretrained(
            self.iter_full_params(model), module, tokenizer, folder, self.param_dtype, self.is_rank_0(), max_shard_bytes
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
            tensors, module = self.iter_full_params(model) if hf_weights else None, self.unwrap(model)
            checkpoint.save_pretrained(tensors, module, tokenizer, target, self.param_dtype, self.is_rank_0())

        own = {**self._own_state(model, scheduler), "optim": self.optim}
        own["others"] = {role: self._own_state(other[0], other[2]) for role, other in (others or {}).items()}
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
        self._restore_own_state(state, model, optimizer, scheduler)
        for role, other in (others or {}).items():
            self._restore_own_state(state["others"][role], *other)
        return state

    def _own_state(self, model, scheduler) -> dict:
        return {"scheduler_step": scheduler.last_epoch, "loss_scale": self._loss_scale_state(model)}

    def _restore_own_state(self, state: dict, model, optimizer, scheduler) -> None:
        self._masters_to_weights(optimizer)
        run_state.set_scheduler_step(scheduler, state["scheduler_step"])
        if self.param_dtype == torch.float16:  # iterations since the last overflow are all that the scaler goes by
            scaler = model.optimizer.loss_scaler
            scaler.cur_scale, scaler.cur_iter = state["loss_scale"]["scale"], state["loss_scale"]["good_steps"]
            scaler.last_overflow_iter = -1

    def weight_pieces(self, model, optimizer) -> Iterator[Piece]:
        """This rank's parts of the weights in fp32, as they are now, to read and to write."""
        return (piece for piece in self._pieces(model, optimizer) if piece.key.startswith("weight/"))

    def _all_pieces(self, model, optimizer, others: Optional[dict[str, tuple]]) -> Iterator[Piece]:
        yield from self._pieces(model, optimizer)
        for role, (other, its_optimizer, _) in (others or {}).items():
            yield from run_state.of_role(role, self._pieces(other, its_optimizer))

    def _loss_scale_state(self, model) -> dict:
        if self.param_dtype != torch.float16:
            return {"scale": 1.0, "good_steps": 0}
        scaler = model.optimizer.loss_scaler
        return {"scale": scaler.cur_scale, "good_steps": scaler.cur_iter - scaler.last_overflow_iter - 1}

    def _pieces(self, model, optimizer) -> Iterator[Piece]:
        """This rank's parts of the masters and of the optimizer's states, and what has no master, under Hugging Face names."""
        module = self.unwrap(model)
        parameters, tp_rank = dict(module.named_parameters()), self.meshes.root.get_local_rank("tp")
        for name, tensor in checkpoint.stored_tensors(module).items():
            parameter = parameters.get(name)
            for piece in self._pieces_of(name, tensor, parameter, optimizer):
                yield autotp.place(piece, parameter, tp_rank)

    def _pieces_of(self, name: str, tensor: torch.Tensor, parameter, optimizer) -> Iterator[Piece]:
        """The pieces of one stored tensor, as if this rank's part over tp were all of it."""
        if parameter is None or not parameter.requires_grad:
            yield self._untrained_piece(name, tensor, parameter)
        elif self.zero_stage == 0:
            is_written = self.meshes.loss.get_local_rank() == 0
            yield whole_piece(f"weight/{name}", parameter, is_written)
            for kind, state in run_state.states_of(optimizer, parameter).items():
                yield whole_piece(f"{kind}/{name}", state, is_written)
        else:
            part = zero_masters.stage_3_part if self.zero_stage == 3 else zero_masters.stage_2_part
            yield from zero_masters.pieces_of(name, optimizer.optimizer, *part(parameter, optimizer))

    def _untrained_piece(self, name: str, tensor: torch.Tensor, parameter) -> Piece:
        """A buffer or a frozen parameter, which has no master."""
        if parameter is None or self.zero_stage < 3:
            return whole_piece(f"weight/{name}", tensor, self.meshes.loss.get_local_rank() == 0)
        start = parameter.ds_tensor.ds_numel * self.meshes.loss.get_local_rank()
        size = max(0, min(parameter.ds_tensor.ds_numel, parameter.ds_numel - start))
        return flat_piece(f"weight/{name}", tuple(parameter.ds_shape), start, parameter.ds_tensor[:size])

    def _masters_to_weights(self, optimizer) -> None:
        """Round loaded masters to the weights that the model computes with (all-gather over dp x sp)."""
        if self.zero_stage in (1, 2):
            optimizer.update_lp_params()
        elif self.zero_stage == 3:
            for number in range(len(optimizer.fp32_partitioned_groups_flat)):
                optimizer._reassign_or_swap_out_partitioned_parameters(number)
            kept = optimizer.persistent_parameters  # small ones stay gathered, and would keep their old values
            if kept:
                kept[0].partition(kept)
                kept[0].all_gather(kept)
            optimizer.invalidate_secondary_tensor()  # hpZ gathers from copies, which would keep the old values

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
