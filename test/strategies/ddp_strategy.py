"""A complete third strategy: torch's DistributedDataParallel, with the whole model on every rank.

docs/new_strategy.md explains this file. Nothing above `trainer/strategies/` knows of it."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from trainer.checkpoints import run_state
from trainer.checkpoints.shards import whole_shard
from trainer.datasets.batches.global_batches import setup_dataloader
from trainer.distributed import collectives, host_offload, mesh, mesh_sizes, replicas
from trainer.distributed.gradient_norm import clip_grad_by_total_norm_, get_grad_norm
from trainer.errors import UserError
from trainer.model_folders import model_folder, model_writer
from trainer.model_folders.adapter_tensors import merge_adapter
from trainer.optimizers.adamw import state_tensors, states_of
from trainer.optimizers.build import build_optimizer
from trainer.strategies.options import StrategyOptions


class Engine(DistributedDataParallel):
    """A prepared model is called like the Hugging Face model, and has its attributes."""

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class DDPStrategy:
    def __init__(self, options):
        for flag in ("zero_stage", "adam_offload", "load_in_4bit", "reduce_once", "expert_parallel_size", "exact"):
            if vars(options)[flag] != vars(StrategyOptions())[flag]:
                raise UserError(f"--{flag}", "with --backend ddp", "leave it out")
        if options.tensor_parallel_size > 1 or options.dp_replicate_size > 1 or options.param_dtype == "fp16":
            raise UserError("--backend", "ddp with tp, hybrid sharding or fp16", "fsdp2, deepspeed")
        self.options, self.seed, self.device = options, options.seed, mesh.resolve_device(options.device)
        self.param_dtype = torch.float32 if options.param_dtype == "fp32" else torch.bfloat16
        self.sizes = mesh_sizes.resolve_mesh_sizes(int(os.environ.get("WORLD_SIZE", 1)), sp=options.ring_attn_size)

    def setup_distributed(self) -> None:
        mesh.start_process_group(self.device)
        self.meshes = mesh.build_meshes(self.sizes, self.device)
        mesh.seed_everything(self.seed, self.options.deterministic, self.device)

    def setup_ring_attn(self) -> dist.ProcessGroup:
        return self.meshes.root["sp"].get_group()

    def load_model(self, folder: str, auto_class, *, attn_implementation="sdpa", trust_remote_code=False, adapter=None):
        options = {"attn_implementation": attn_implementation, "trust_remote_code": trust_remote_code}
        return auto_class.from_pretrained(adapter or folder, dtype=torch.float32, weights_only=True, **options)

    def create_optimizer(self, model, *, lr: float, betas=(0.9, 0.95), eps: float = 1e-8, weight_decay: float = 0.0):
        return build_optimizer(self.options.optim, model, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def prepare(self, *models_or_triples, offload: bool = False):
        prepared = []
        for item in models_or_triples:
            model = item[0] if isinstance(item, tuple) else item
            for name, tensor in model_folder.new_tensors(model, self.seed).items():
                model.get_parameter(name).data.copy_(tensor)
            model.to(self.device)
            if self.param_dtype != torch.float32:  # fp32 weights stay the masters
                model.forward = torch.autocast(self.device.type, self.param_dtype)(model.forward)
            if isinstance(item, tuple):
                engine = Engine(model, process_group=self.meshes.loss.get_group(), broadcast_buffers=False)
                item = (engine, *item[1:])
            prepared.append(item)
        return prepared if len(prepared) > 1 else prepared[0]

    def backward(self, loss_sum: torch.Tensor, model, *, num_targets: int, is_last: bool) -> None:
        (loss_sum * (self.meshes.loss.size() / num_targets)).backward()  # DDP divides by the number of ranks

    def optimizer_step(self, optimizer, model, scheduler) -> float:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        norm = get_grad_norm(parameters)
        if torch.isfinite(norm):
            clip_grad_by_total_norm_(parameters, self.options.max_norm, norm)
            optimizer.step()
            scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        return norm.item()

    def unreached_parameters(self, model) -> list[str]:
        return [name for name, p in model.module.named_parameters() if p.requires_grad and p.grad is None]

    def iter_full_grads(self, model):
        return ((name, p.grad) for name, p in model.module.named_parameters() if p.grad is not None)

    def offload(self, *, model=None, optimizer=None) -> list[tuple]:
        tensors = list(model_folder.all_tensors(model_folder.unwrapped(model)).values()) if model is not None else []
        return host_offload.take_to_host(tensors + (state_tensors(optimizer) if optimizer is not None else []))

    def onload(self, offloaded: list[tuple]) -> None:
        host_offload.bring_back(offloaded)

    def check_replicas(self, model) -> None:
        groups = {axis: self.meshes.params.get_group(axis) for axis in self.meshes.params.mesh_dim_names}
        tensors = model_folder.all_tensors(model_folder.unwrapped(model)).items()
        replicas.check_replicas(((name, tensor, list(groups)) for name, tensor in tensors), groups)

    def iter_full_params(self, model, merged_as=None):
        model = model_folder.unwrapped(model)
        tensors = model_folder.all_tensors(model) if merged_as else model_folder.stored_tensors(model)
        pairs = ((name, tensor.detach()) for name, tensor in tensors.items())
        return merge_adapter(pairs, model) if merged_as else pairs  # the engine casts

    def save_model(self, model, tokenizer, folder: str, max_shard_bytes: int = 2 << 30) -> None:
        arguments = model_folder.unwrapped(model), tokenizer, folder, self.param_dtype, self.is_rank_0()
        model_writer.save_pretrained(self.iter_full_params(model), *arguments, max_shard_bytes)
        collectives.wait_for_all()

    def save_ckpt(self, folder: str, roles: dict[str, tuple], tokenizer, *, state: dict, form, further=()):
        def export(target: str) -> None:
            model = roles[run_state.MAIN][0]
            tensors = self.iter_full_params(model) if form.hf_weights else None
            model_writer.save_pretrained(tensors, model.module, tokenizer, target, self.param_dtype, self.is_rank_0())

        role_states = {role: {"scheduler_step": scheduler.last_epoch} for role, (_, _, scheduler) in roles.items()}
        role_states[run_state.MAIN] |= {"loss_scale": run_state.NO_LOSS_SCALE, "optim": self.options.optim}
        shards = run_state.shards_of_roles(roles, self._shards, further)
        return run_state.save(folder, shards, state, role_states, self.device, form, export)

    def load_ckpt(self, folder: str, roles: dict[str, tuple], further=()) -> dict:
        shards = run_state.shards_of_roles(roles, self._shards, further)
        state = run_state.load(folder, shards, self.device, self.options.optim)
        for role, (_, _, scheduler) in roles.items():
            run_state.set_scheduler_step(scheduler, run_state.role_state(state, role)["scheduler_step"])
        return state

    def weight_shards(self, model, optimizer):
        return (shard for shard in self._shards(model, optimizer) if shard.key.startswith("weight/"))

    def _shards(self, model, optimizer):
        """Every rank holds all of every tensor. Rank 0 writes them."""
        for name, tensor in model_folder.stored_tensors(model.module).items():
            yield whole_shard(f"weight/{name}", tensor, is_written=self.is_rank_0())
        for name, parameter in model.module.named_parameters():
            for kind, state in states_of(optimizer, parameter).items() if parameter.requires_grad else ():
                yield whole_shard(f"{kind}/{name}", state, is_written=self.is_rank_0())

    setup_dataloader = setup_dataloader
    all_reduce = collectives.all_reduce
    all_gather = collectives.all_gather
    print = collectives.print
    is_rank_0 = collectives.is_rank_0
