"""The models of the clients of the training API: adapters that take turns on one frozen base, or the base itself.

Each client has weights, optimizer states and gradients of its own. Those of the client whose turn it is are in the sharded
model. The others wait. An adapter of a smaller rank has zeros in the rest of its matrices, whose gradients are zero too.
Every method runs on all ranks with the same arguments.
"""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Optional

import numpy as np
import torch
from torch.optim.lr_scheduler import LambdaLR

from trainer.checkpoints.run_state import MAIN, WRITING, CheckpointForm
from trainer.datasets.batches.global_batches import balanced_rows, contiguous_slice, to_device
from trainer.datasets.batches.packing import IGNORE, collate_padded
from trainer.distributed.collectives import gather_objects, together, wait_for_all
from trainer.distributed.sharded_tensors import local_region, to_local_if_dtensor
from trainer.errors import UserError
from trainer.model_folders.adapter_tensors import adapter_config, initial_tensors
from trainer.model_folders.model_folder import has_adapter, stored_tensors
from trainer.models.losses.client_loss import CLIENT_LOSSES, client_loss
from trainer.models.losses.token_losses import label_log_probs
from trainer.rollout.engines.sampling import Sampling
from trainer.rollout.engines.sync import sync_weights

ADAPTER = "default"  # peft's name for the only adapter of a model
FACTS = "client.json"  # next to the checkpoint of a client's model


@dataclass
class Client:
    """This rank's parts of a model. `rank` is that of the adapter, 0 for the whole model."""

    rank: int
    weights: dict[str, torch.Tensor]
    states: dict[str, dict] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    has_gradient: bool = False


def _note(folder: str, rank: int) -> None:
    """Write the facts of a saved model. A full disk leaves the former ones."""
    with open(f"{folder}.{FACTS}.tmp", "w", encoding="utf-8") as file:
        json.dump({"rank": rank}, file)
    os.replace(file.name, f"{folder}.{FACTS}")


class ClientModels:
    """`prepare(model)` shards the model, and `build_engine()` makes the engine at the first request to sample.

    `alpha` / rank scales an adapter. `row_limit` is the number of rows of a micro-batch on one rank.
    """

    def __init__(
        self, strategy, model, tokenizer, *, alpha: int, row_limit: int, seed: int, build_engine: Callable[[], Any]
    ):
        self.strategy, self.tokenizer, self.alpha, self.seed = strategy, tokenizer, alpha, seed
        self._row_limit, self._build_engine, self._engine, self._held = row_limit, build_engine, None, None
        optimizer = strategy.create_optimizer(model, lr=1.0, weight_decay=1.0)
        self._decays = [group["weight_decay"] > 0 for group in optimizer.param_groups]
        scheduler = LambdaLR(optimizer, lambda step: 1.0)  # a request names the rate of its step
        self.model, self.optimizer, self.scheduler = strategy.prepare((model, optimizer, scheduler))
        self.is_lora, self.clients, self.samplers = has_adapter(model), {}, {}
        self.max_rank = adapter_config(model).r if self.is_lora else 0
        self.base = Client(self.max_rank, self._weights())
        if self.is_lora:
            self.base.weights = {name: torch.zeros_like(tensor) for name, tensor in self.base.weights.items()}
        self._current = Client(self.max_rank, {})

    # --- turns

    def _weights(self) -> dict[str, torch.Tensor]:
        return {name: to_local_if_dtensor(tensor).clone() for name, tensor in stored_tensors(self.model).items()}

    def _use(self, client: Client) -> None:
        """Put the parts of a client into the model, and keep those of the client before it."""
        if self._current is client:
            return
        before, self._current = self._current, client
        before.weights = self._weights()
        tensors = stored_tensors(self.model)
        for name, parameter in self._trained():
            if state := self.optimizer.state.pop(parameter, None):
                before.states[name] = state
            before.gradients[name] = parameter.grad
            parameter.grad = client.gradients.get(name)
            if name in client.states:
                self.optimizer.state[parameter] = client.states[name]
        with torch.no_grad():
            for name, tensor in tensors.items():
                to_local_if_dtensor(tensor).copy_(client.weights[name])
        if self.is_lora:
            scale, config = self.alpha / client.rank, adapter_config(self.model)
            for module in self.model.modules():
                if isinstance(getattr(module, "scaling", None), dict):  # of peft; attention has a number of this name
                    module.scaling[ADAPTER] = scale
            whole = scale * self.max_rank
            config.lora_alpha = int(whole) if whole.is_integer() else whole  # of an adapter that is saved

    def _trained(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad]

    def _client(self, model_id: str) -> Client:
        if model_id not in self.clients:
            raise UserError(model_id, "no such model; its session may have ended")
        return self.clients[model_id]

    # --- requests

    def create(self, model_id: str, rank: int, seed: Optional[int], attention: bool = True, mlp: bool = True) -> dict:
        """A new model: an adapter of `rank` with first values from the seed, or with rank 0 the whole model.

        Raises UserError for a rank that the server does not offer, or a second client of the whole model.
        """
        if not self.is_lora and self.clients:
            raise UserError("create_model", "another client trains the whole model", "a server with --lora_rank")
        if rank > self.max_rank or (self.is_lora and rank < 1):
            allowed = f"1 to {self.max_rank} (--lora_rank)" if self.is_lora else "0: this server trains whole models"
            raise UserError("lora_config.rank", str(rank), allowed)
        weights = {name: tensor.clone() for name, tensor in self.base.weights.items()}
        if self.is_lora:
            tensors = stored_tensors(self.model)
            for name, value in initial_tensors(self.model, self.seed if seed is None else seed, rank).items():
                if ".lora_A." in name and (attention if "attn" in name or "attention" in name else mlp):
                    padded = torch.zeros(tensors[name].shape)
                    padded[:rank] = value
                    weights[name].copy_(padded[local_region(tensors[name]) or ...])
        self.clients[model_id] = Client(rank, weights)
        return {"model_id": model_id, "type": "create_model"}

    def forget(self, model_ids: list[str], samplers: list[str]) -> None:
        for model_id in model_ids:
            self.clients.pop(model_id, None)
        for name in samplers:
            self.samplers.pop(name, None)

    def forward_backward(self, model_id: str, rows: list[dict], loss_fn: str, loss_fn_config: dict, forward_only: bool):
        """(columns, metrics) of `api_messages.batch_output`. Gradients of several calls add up until `optim_step`."""
        client = self._client(model_id)
        self._use(client)
        inputs, found = CLIENT_LOSSES[loss_fn][0], {}
        lengths = [len(row["input_ids"]) for row in rows]
        falling = np.argsort(-np.array(lengths), kind="stable").tolist()
        dp = self.strategy.meshes.dp
        plan = balanced_rows(falling, dp.get_local_rank(), dp.size(), self._row_limit)
        self.model.train()
        for number, places in enumerate(plan, start=1):
            batch = to_device(self._collated([rows[place] for place in places], inputs), self.strategy.device)
            with torch.set_grad_enabled(not forward_only):
                losses, log_probs = client_loss(self.model, batch, loss_fn, loss_fn_config)
            if not forward_only:
                self.strategy.backward(losses.sum(), self.model, num_targets=1, is_last=number == len(plan))
            values = log_probs.detach().cpu().numpy(), losses.detach().cpu().numpy()
            for line, place in enumerate(places):
                found[place] = [value[line, : lengths[place]] for value in values]
        client.has_gradient |= not forward_only
        found = {place: values for own in gather_objects(found) for place, values in own.items()}
        columns = {name: [found[place][n] for place in range(len(rows))] for n, name in enumerate(("logprobs", "elementwise_loss"))}  # fmt: skip
        return columns, {"loss:sum": float(sum(losses.sum() for losses in columns["elementwise_loss"]))}

    def _collated(self, rows: list[dict], inputs: tuple[str, ...]) -> dict:
        batch = collate_padded([{**row, "loss_mask": [0] * len(row["input_ids"])} for row in rows], self._pad)
        for name, kind in (("target_tokens", torch.long), *((name, torch.double) for name in inputs)):
            values = torch.full(batch["input_ids"].shape, IGNORE if name == "target_tokens" else 0, dtype=kind)
            for line, row in enumerate(rows):
                values[line, : len(row["input_ids"])] = torch.from_numpy(row[name].copy()).to(kind)
            batch["labels" if name == "target_tokens" else name] = values
        return batch

    @property
    def _pad(self) -> int:
        return self.tokenizer.pad_token_id or 0

    def optim_step(self, model_id: str, learning_rate, beta1, beta2, eps, weight_decay, grad_clip_norm) -> dict:
        """One step of AdamW on the gradients since the last one. Raises UserError if there are none, or not finite ones."""
        client = self._client(model_id)
        self._use(client)
        if not client.has_gradient:
            raise UserError("optim_step", "no forward_backward since the last step")
        for group, decays in zip(self.optimizer.param_groups, self._decays):
            group |= {"lr": learning_rate, "betas": (beta1, beta2), "eps": eps, "weight_decay": weight_decay * decays}
        self.strategy.options = dataclasses.replace(self.strategy.options, max_norm=max(grad_clip_norm, 0.0))
        norm = self.strategy.optimizer_step(self.optimizer, self.model, self.scheduler)
        client.has_gradient = False
        if not np.isfinite(norm):
            raise UserError("optim_step", f"the gradient norm is {norm}, so no weight was changed")
        return {"metrics": {"grad_norm": norm}}

    def save(self, model_id: str, folder: str, path: str, for_sampler: bool, kind: str, overwrite: bool) -> dict:
        """Write weights and optimizer; `for_sampler`, also an adapter or a model for other programs, in hf/."""
        client = self._client(model_id)
        if os.path.isfile(f"{folder}.{FACTS}") and not overwrite:
            raise UserError("path", f"{path} exists", "another name, or overwrite")
        self._use(client)
        form, roles = CheckpointForm(hf_weights=for_sampler), {MAIN: (self.model, self.optimizer, self.scheduler)}
        self.strategy.save_ckpt(folder, roles, self.tokenizer, state={}, form=form).finish()
        together(lambda: _note(folder, client.rank) if self.strategy.is_rank_0() else None, *WRITING)
        return {"path": path, "type": kind}

    def delete(self, folder: str) -> None:
        """Delete saved weights, if they are there."""
        if self.strategy.is_rank_0() and os.path.isfile(f"{folder}.{FACTS}"):
            os.remove(f"{folder}.{FACTS}")
            shutil.rmtree(folder)
        wait_for_all()

    def load(self, model_id: str, folder: str, optimizer: bool, path: str) -> dict:
        """Load a saved model into the one of `model_id`, which is made if it is new."""
        rank = self._rank_of(folder, path)
        if model_id not in self.clients:
            self.create(model_id, rank, None)
        client = self.clients[model_id]
        if client.rank != rank:
            raise UserError(path, f"an adapter of rank {rank}", f"one of rank {client.rank}")
        self._read(client, folder)
        if not optimizer:
            for _, parameter in self._trained():
                self.optimizer.state.pop(parameter, None)
        return {"path": path, "type": "load_weights", "model_id": model_id}

    def _read(self, client: Client, folder: str) -> None:
        self._use(client)
        self.strategy.load_ckpt(folder, {MAIN: (self.model, self.optimizer, self.scheduler)})
        self.optimizer.zero_grad(set_to_none=True)
        client.has_gradient = False

    def _rank_of(self, folder: str, path: str) -> int:
        if not os.path.isfile(f"{folder}.{FACTS}"):
            raise UserError(path, "no such saved weights")
        with open(f"{folder}.{FACTS}", encoding="utf-8") as file:
            rank = json.load(file)["rank"]
        if rank > self.max_rank or (rank == 0) == self.is_lora:
            raise UserError(path, f"rank {rank}", f"up to {self.max_rank} (--lora_rank)")
        return rank

    # --- sampling

    def keep_sampler(self, sampler: str, model_id: Optional[str], folder: Optional[str], answer: dict) -> dict:
        """Keep the weights of a model, of a saved one, or of the base, as they are now, for requests to `sample`."""
        if model_id:
            client = self._client(model_id)
            self._use(client)
            self.samplers[sampler] = Client(client.rank, self._weights())
        elif folder:
            client = Client(self._rank_of(folder, answer["path"]), dict(self.base.weights))
            self._read(client, folder)
            client.weights, client.states = self._weights(), {}
            self.samplers[sampler] = client
        else:
            self.samplers[sampler] = self.base
        return answer

    def sample(self, sampler: str, prompts: list, sampling: Sampling, seeds: list[int], prompt_log_probs: list[bool]):
        """A list of (completions as (tokens, log-probs, finished), log-probs of the prompt or None), one for each prompt.

        `prompts` are (tokens, number of samples). `seeds` has one number for each sample of each prompt, in order.
        """
        if sampler not in self.samplers:
            raise UserError(sampler, "no such sampler; its session may have ended")
        client = self.samplers[sampler]
        self._use(client)
        own = [self._prompt_log_probs(tokens) if wanted else None for (tokens, _), wanted in zip(prompts, prompt_log_probs)]  # fmt: skip
        self._engine = self._engine or self._build_engine()
        if self._held is not client:
            sync_weights(self.strategy, self.model, self._engine)
            self._held = client
        asked = [tokens for tokens, count in prompts for _ in range(count)]
        rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        mine = contiguous_slice(range(len(asked)), rank, num_ranks)
        found = self._engine.generate([asked[n] for n in mine], sampling, [seeds[n] for n in mine])
        answers = [(one.token_ids, one.log_probs, one.finished) for one in found]
        every = iter([answer for part in gather_objects(answers) for answer in part])
        return [([next(every) for _ in range(count)], scored) for (_, count), scored in zip(prompts, own)]

    @torch.no_grad()
    def _prompt_log_probs(self, tokens: list[int]) -> np.ndarray:
        """(tokens,), NaN for the first one, which nothing precedes."""
        row = {"input_ids": tokens, "loss_mask": [1] * len(tokens)}
        batch = to_device(collate_padded([row], self._pad), self.strategy.device)
        return np.concatenate([[np.nan], label_log_probs(self.model, batch)[0, :-1].float().cpu().numpy()])
