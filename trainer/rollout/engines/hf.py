"""The embedded rollout engine: a full replica of the policy on every rank, and batched generation.

It works on any platform and with any layout of the training weights. Each rank holds one more full copy of the weights,
in the compute dtype. Input and output are tokens.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, Optional

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.distributed.host_offload import drop, restore_room
from trainer.model_folders.model_folder import restore_computed_buffers, stored_tensors
from trainer.models.attention.exact_rows import ExactRows, compute_exactly, log_softmax_in_pieces
from trainer.models.layers.compiled import compile_decoding
from trainer.models.layers.routing_replay import RecordedRows, Routers
from trainer.models.losses.truncation import truncate
from trainer.models.model_loading import has_sdpa
from trainer.rollout.engines.checksum import Checksum
from trainer.rollout.engines.decoding import CachedRows, UncachedRows, can_cache, register_attention
from trainer.rollout.engines.responses import Responses
from trainer.rollout.engines.sampling import Completion, Sampling, pick_tokens, uniform_numbers


class HFEngine:
    """A rollout engine, with `generate`, `update_weights`, `sleep` and `wake`. No method communicates."""

    ranks_per_engine = 1
    slices = None  # it needs full tensors
    sync_facts: ClassVar[dict[str, float]] = {}  # it has no more than `sync_weights` has

    def __init__(
        self,
        folder: str,
        tokenizer,
        *,
        dtype: torch.dtype,
        device: torch.device,
        batch_size: int,
        trust_remote_code: bool = False,
        auto_class=None,
        read_images: Optional[Callable] = None,
        record_experts: bool = False,
        compiled: bool = False,
        exact: bool = False,
    ):
        """Build the model of a Hugging Face folder without weights. `update_weights` brings them.

        Prompts with images need the `auto_class` of such models, and `read_images(ids, mask, images)`, see `CachedRows`.
        `record_experts`: completions have the experts of their tokens. `compiled`: see `compile_decoding`.
        `exact`: the bits of training, see `exact_rows`.
        """
        auto_class = auto_class or AutoModelForCausalLM
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        attention = "sdpa" if has_sdpa(folder, auto_class, trust_remote_code) else "eager"
        options = {"attn_implementation": attention, "trust_remote_code": trust_remote_code}
        with torch.device("meta"):
            in_fp32 = auto_class.from_config(config, dtype=torch.float32, **options)
            model = auto_class.from_config(config, dtype=dtype, **options)
        cached = can_cache(model)
        # not before: transformers must first accept sdpa for this model. Without a cache it keeps sdpa: DeepSeek-V3.2
        # selects tokens for attention functions that it knows by name, and lets all others see every token.
        if attention == "sdpa" and cached:
            model.set_attn_implementation(register_attention())
        model.to_empty(device=device)
        model.tie_weights(recompute_mapping=False)
        restore_computed_buffers(model, device, {name: buffer.dtype for name, buffer in in_fp32.named_buffers()})
        self.model, self.tokenizer = model.eval().requires_grad_(False), tokenizer
        self.dtype, self.device, self.batch_size = dtype, device, batch_size
        self.kind_of_rows, self.read_images = CachedRows if cached else UncachedRows, read_images
        self.options = {"compiled": compile_decoding(self.model)} if compiled and cached else {}
        self.log_softmax = functools.partial(torch.log_softmax, dim=-1)
        if exact:
            compute_exactly(self.model)
            self.kind_of_rows, self.log_softmax = ExactRows, log_softmax_in_pieces
        self.routers, self.dropped = None, []  # storages that sleep has emptied
        if record_experts:
            self.routers = Routers(model, config)
            self.routers.records = True

    @torch.no_grad()
    def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[str, int]:
        """Copy (name, full tensor) pairs into the replica, one at a time. Returns (checksum, bytes) of what it then holds.

        Raises:
            RuntimeError: a tensor did not come, or came twice.
        """
        own, came, num_bytes = stored_tensors(self.model), [], 0
        for name, tensor in tensors:
            own[name].copy_(tensor)
            came.append(name)
            num_bytes += own[name].nbytes
        places = {tensor.data_ptr() for tensor in own.values() if tensor.numel()}  # no copy was overwritten by another
        if sorted(came) != sorted(own) or len(places) < sum(tensor.numel() > 0 for tensor in own.values()):
            raise RuntimeError("the rollout engine's weights are not the weights that were sent to it")
        held = Checksum()
        for name, tensor in own.items():
            held.add(name, tensor)
        return held.hexdigest(), num_bytes

    def sleep(self) -> None:
        """Free the memory of the weights for training. `update_weights` must bring them again after `wake`."""
        self.dropped = self.dropped or drop(stored_tensors(self.model).values())
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> None:
        restore_room(self.dropped)
        self.dropped = []

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int] = (),
        limits: Sequence[int] = (),
        images: Sequence[tuple] = (),
        interrupted: Callable[[], bool] = lambda: False,
    ) -> list[Completion]:
        """A completion of each prompt, in order. `seeds`, one per prompt, decide the samples; greedy needs none.

        `limits`, one per prompt, are largest numbers of new tokens below the one of `sampling`. `images` are the sources of
        each prompt's images, for `read_images`. Once `interrupted()` is true, completions are returned as they are then.
        Some may have no token.
        """
        completions: list[Completion] = []
        for start in range(0, len(prompts), self.batch_size):
            if interrupted():
                completions += [Completion([], [], False) for _ in prompts[start:]]
                break
            part = slice(start, start + self.batch_size)
            most = limits[part] or [sampling.max_new_tokens] * len(prompts[part])
            completions += self._generate_batch(prompts[part], sampling, seeds[part], most, images[part], interrupted)
        return completions

    @torch.no_grad()
    def _generate_batch(self, prompts, sampling: Sampling, seeds, limits, images, interrupted) -> list[Completion]:
        uniforms = uniform_numbers(seeds, sampling.max_new_tokens).to(self.device) if sampling.temperature else None
        responses = Responses(prompts, limits, sampling, self.tokenizer, self.device)
        own = self.options | ({"images": images, "read": self.read_images} if images else {})
        going = self.kind_of_rows(self.model, prompts, self.tokenizer.pad_token_id, max(limits), **own)
        if self.routers:
            going = RecordedRows(going, self.routers, prompts)
        tokens = None
        for step in range(max(limits)):
            logits = (going.first() if tokens is None else going.next(tokens)).float()  # (rows, vocab)
            if sampling.temperature not in (0, 1):
                logits = logits / sampling.temperature
            log_probs, kept_ids = self.log_softmax(logits), None
            if sampling.truncates:
                log_probs = truncate(log_probs, sampling.top_p, sampling.top_k, sampling.min_p)
                kept_ids = log_probs > float("-inf") if sampling.gives_sets else None
            tokens = log_probs.argmax(-1) if uniforms is None else pick_tokens(log_probs, uniforms[:, step])
            picked = log_probs.gather(1, tokens[:, None]).squeeze(1)
            num_open = responses.append(tokens, picked, kept_ids)
            if not num_open or interrupted():
                break
            kept = responses.kept_rows(num_open)
            if kept is not None:
                going.keep(kept)
                tokens, uniforms = tokens[kept], None if uniforms is None else uniforms[kept]
        completions = responses.completions()
        if self.routers:
            going.note(completions)
        return completions
