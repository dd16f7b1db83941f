"""--exact: rows that continue token by token, with the bits of the forward pass that trains them."""

from collections.abc import Sequence
from typing import Optional

import torch
from transformers import AttentionInterface

from trainer.errors import UserError
from trainer.exact.block_attention import block_attention
from trainer.exact.exact_products import fix_products
from trainer.exact.fixed_tree import Alone, num_pieces, tree_sum
from trainer.exact.split_rows import SplitRows
from trainer.model_parallel.tensor_parallel import split_layers
from trainer.models.attention.attention_call import read_call

NAME = "exact_decoding"


def compute_exactly(model) -> None:
    """Let a replica of the policy compute as training does. Raises UserError for a model without such products."""
    kinds, alone = split_layers(model), Alone()
    if not kinds:
        found = f"with rollouts: {type(model).__name__} has no plan that keeps every bit"
        raise UserError("--exact", found, instead="Take a Llama, Qwen2, Qwen3, Mistral or Gemma model.")
    fix_products(model, kinds, alone, SplitRows(alone), shards_logits=False)
    AttentionInterface.register(NAME, _attention)
    model.set_attn_implementation(NAME)


def log_softmax_in_pieces(logits: torch.Tensor) -> torch.Tensor:
    """Return log-probs (rows, vocab) of fp32 logits, with the sums of `vocab_parallel_nll`."""
    shifted = logits - logits.amax(1, keepdim=True)
    totals = [piece.contiguous().exp().sum(1) for piece in shifted.chunk(num_pieces(shifted.shape[1], 1), 1)]
    return shifted - tree_sum(totals, Alone()).log()[:, None]


def _attention(module, query, key, value, attention_mask=None, **kwargs):
    call = read_call(module, query, attention_mask, kwargs, "--exact", "a run without it", packed=False)
    if call.softcap is not None or call.sinks is not None or call.chunk is not None:
        raise UserError("--exact", "rollouts of a model with soft caps, sinks or chunks of attention", "another model")
    return ExactRows.current.attend(module.layer_idx, call, key, value), None


class ExactRows:
    """Rows of tokens, padded on the right. So token i of a row has position i, and lies at place i of the cache.

    What is written behind the end of a prompt is overwritten before a query sees it. Equal prompts are read once.
    """

    current: Optional["ExactRows"] = None  # whose model runs now

    def __init__(self, model, prompts: Sequence[Sequence[int]], pad_token_id: int, max_new_tokens: int):
        self.model, self.cache = model, {}  # layer -> keys and values (rows, kv_heads, length, head_dim)
        places = {tuple(prompt): place for place, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
        self.copies = torch.tensor([places[tuple(prompt)] for prompt in prompts])
        self.last = torch.tensor([len(prompt) - 1 for prompt in places])[:, None]  # position of each row's last token
        longest = max(map(len, places))
        self.ids = torch.tensor([[*prompt, *[pad_token_id] * (longest - len(prompt))] for prompt in places])
        self.length = longest + max_new_tokens

    def first(self) -> torch.Tensor:
        """The logits (rows, vocab) after each prompt."""
        ends, of_row = self.last.flatten().unique(return_inverse=True)
        logits = self._logits(self.ids, torch.arange(self.ids.shape[1]).expand_as(self.ids), ends)
        logits = logits[torch.arange(len(of_row)), of_row]
        self.keep(self.copies)
        return logits[self.copies]

    def next(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append a token to each row. The logits (rows, vocab) after it."""
        self.last = self.last + 1
        return self._logits(tokens[:, None], self.last, 1)[:, -1]

    def keep(self, rows: torch.Tensor) -> None:
        """Continue only with these rows, in this order."""
        self.cache = {layer: tuple(states[rows] for states in both) for layer, both in self.cache.items()}
        self.last = self.last[rows]

    def _logits(self, ids: torch.Tensor, positions: torch.Tensor, kept: torch.Tensor | int) -> torch.Tensor:
        self.positions, ExactRows.current = positions, self
        return self.model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=kept).logits

    def attend(self, layer: int, call, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Write the keys and values of the new tokens, and return their attention (rows, tokens, heads, head_dim)."""
        if layer not in self.cache:
            rows, kv_heads, _, _ = key.shape
            self.cache[layer] = tuple(s.new_zeros(rows, kv_heads, self.length, s.shape[-1]) for s in (key, value))
        used = int(self.positions.max()) + 1
        for states, new in zip(self.cache[layer], (key, value)):
            states[torch.arange(len(new))[:, None], :, self.positions] = new.transpose(1, 2)
        keys, values = (states[:, :, :used] for states in self.cache[layer])
        return block_attention(call.query, keys, values, self.positions, call.scale, call.window).transpose(1, 2)
