"""Routing replay: training sends each token to the experts that it had in the rollout.

Small differences between the rollout engine and training let a router choose another expert, and then the log-probs
differ much. Replay fixes only the choice. The weights of the chosen experts are computed from the scores of training,
so gradients go to the router. This is R3 of Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by Aligning
Training and Inference Routers". Log-probs of the policy before the update replay the same choice. The reference does not.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Optional

import torch
from torch.overrides import TorchFunctionMode

from trainer.errors import UserError

FLAG = "--routing_replay"
NUMBERS = ("num_experts", "num_local_experts", "n_routed_experts")  # names of one number in configs


class Routers:
    """The routers of a mixture, layer by layer: it records which experts they choose, or makes them choose given ones.

    A router calls `torch.topk` on scores (tokens, experts) in the forward pass of the block that has the experts.
    The mode in `_Choice` sees this call.
    """

    def __init__(self, model: torch.nn.Module, config):
        """`config` is the config of the model. Raises UserError if `model` has no experts."""
        text = config.get_text_config()
        self.top_k = getattr(text, "num_experts_per_tok", None)
        self.num_experts = next((n for name in NUMBERS if isinstance(n := getattr(text, name, None), int)), None)
        self.kind, self.num_layers = text.model_type, 0
        self.given: Optional[torch.Tensor] = None  # (tokens, layers, k): 1 + the expert, or 0 if it is not known
        self.records, self._recorded = False, {}  # by layer: (tokens, k)
        for block in model.modules():
            if isinstance(getattr(block, "experts", None), torch.nn.Module):
                block.forward = functools.partial(self._forward, self.num_layers, block.forward)
                self.num_layers += 1
        if not (self.num_layers and self.top_k and self.num_experts):
            raise UserError(FLAG, f"{self.kind} has no router over experts", "a mixture such as qwen3_moe, olmoe")

    def check(self, recorded: Iterable[torch.Tensor]) -> None:
        """Raise UserError if recorded experts, (tokens, layers, k), do not fit this model. -1 is a choice that is not known."""
        for experts in recorded:
            in_range = bool(((experts >= -1) & (experts < self.num_experts)).all())
            if experts.ndim != 3 or experts.shape[1:] != (self.num_layers, self.top_k) or not in_range:
                found = f"rollouts with experts {tuple(experts.shape)} up to {int(experts.max())}"
                wanted = f"(tokens, {self.num_layers}, {self.top_k}) below {self.num_experts}, as --pretrain has them"
                raise UserError(FLAG, found, wanted)

    def use(self, micro_batch: dict) -> None:
        """Make the next forward passes choose the experts of this micro-batch, also when layers are computed again."""
        experts = micro_batch.get("experts")
        self.given = None if experts is None else experts.flatten(0, 1).long()

    def take(self) -> torch.Tensor:
        """The experts of the last forward pass, (tokens, layers, k), int16."""
        if len(self._recorded) < self.num_layers:
            raise UserError(FLAG, f"the routers of {self.kind} do not choose by torch.topk", "leave it out")
        found = torch.stack([self._recorded[layer] for layer in range(self.num_layers)], 1)
        self._recorded = {}
        return found.short()

    def _forward(self, layer: int, forward: Callable, *args, **kwargs):
        if self.given is None and not self.records:
            return forward(*args, **kwargs)
        with _Choice(functools.partial(self._chosen, layer), self.top_k, self.num_experts):
            return forward(*args, **kwargs)

    def _chosen(self, layer: int, scores: torch.Tensor, found):
        if self.records:
            self._recorded[layer] = found.indices
            return found
        given = self.given[:, layer]
        indices = torch.where(given > 0, given - 1, found.indices)
        return torch.return_types.topk((scores.gather(-1, indices), indices))


class _Choice(TorchFunctionMode):
    """Inside, what `torch.topk` of k of all experts returns is `choose(scores, values and indices)`."""

    def __init__(self, choose: Callable, top_k: int, num_experts: int):
        super().__init__()
        self.choose, self.top_k, self.num_experts = choose, top_k, num_experts

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function not in (torch.topk, torch.Tensor.topk):
            return result
        scores = args[0] if args else kwargs["input"]
        is_choice = scores.ndim == 2 and scores.shape[-1] == self.num_experts and result[1].shape[-1] == self.top_k
        return self.choose(scores, result) if is_choice else result


class RecordedRows:
    """`CachedRows` that record the experts of every token that they read. `first`, `next` and `keep` are theirs."""

    def __init__(self, going, routers: Routers, prompts: Sequence[Sequence[int]]):
        self.going, self.routers = going, routers
        self.lengths, self.rows = [len(prompt) for prompt in prompts], list(range(len(prompts)))
        self.found: list[list[torch.Tensor]] = [[] for _ in prompts]  # of each prompt, by step: (tokens, layers, k)

    def first(self) -> torch.Tensor:
        copies, (rows, width) = self.going.copies.tolist(), self.going.ids.shape
        logits = self.going.first()
        experts = self.routers.take().unflatten(0, (rows, width))
        for place, length, found in zip(copies, self.lengths, self.found):
            found.append(experts[place, width - length :])  # padding is on the left
        return logits

    def next(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.going.next(tokens)
        for row, experts in zip(self.rows, self.routers.take(), strict=True):
            self.found[row].append(experts[None])
        return logits

    def keep(self, rows: torch.Tensor) -> None:
        self.going.keep(rows)
        self.rows = [self.rows[row] for row in rows.tolist()]

    def note(self, completions: list) -> None:
        """Give each completion its experts. The last token was not read; an ended row may have read more."""
        for length, found, completion in zip(self.lengths, self.found, completions):
            completion.experts = torch.cat(found)[: length + len(completion.token_ids) - 1].cpu()
