"""The policy model: its folder, tokenizer, attention kernel and forward pass."""

import copy
import importlib.util
import os
from typing import Optional

import torch

from trainer.errors import UserError

WEIGHT_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.py"]  # .py: for --trust_remote_code


def resolve_model_folder(pretrain: str) -> str:
    """The local folder of a model: `pretrain` itself, or the snapshot of a hub name. Raises UserError if there is none."""
    if os.path.isdir(pretrain):
        if not os.path.exists(os.path.join(pretrain, "config.json")):
            raise UserError("--pretrain", f"{pretrain} holds no config.json", "a Hugging Face model folder")
        return pretrain
    if os.path.exists(pretrain) or pretrain.startswith((".", "/", "~")):
        raise UserError("--pretrain", f"{pretrain} is no folder", "a Hugging Face model folder or hub name")
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(pretrain, allow_patterns=WEIGHT_PATTERNS)
    except Exception as error:  # the hub raises a dozen types: not found, gated, offline, bad name
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError("--pretrain", f"{pretrain} is neither a folder nor to be had from the hub ({reason})") from None


def load_tokenizer(folder: str, trust_remote_code: bool = False):
    """The tokenizer of a model folder, padding with eos where it has no pad token."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise UserError("--pretrain", f"no tokenizer in {folder}: {str(error).splitlines()[0]}") from None
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def resolve_attention(attn_implementation: str, packed: bool, ring: bool = False) -> str:
    """The name of the attention function that transformers should call; raises UserError for what is not installed.

    With `ring`, `setup_split_attention` replaces it once the process groups stand.
    """
    if ring and attn_implementation == "eager":
        raise UserError("--attn_implementation", "eager with --ring_attn_size", "sdpa, flash_attention_2")
    if attn_implementation == "flash_attention_2":
        if importlib.util.find_spec("flash_attn") is None:
            raise UserError(
                "--attn_implementation", "flash_attention_2 needs flash-attn: pip install -e '.[flash]'", "sdpa, eager"
            )
        return attn_implementation
    if not packed:
        return attn_implementation
    if attn_implementation == "eager":
        raise UserError("--attn_implementation", "eager with --packing_samples", "sdpa, flash_attention_2")
    from trainer.models.varlen_attention import register_varlen_attention

    return register_varlen_attention()


def validate_packed_model(folder: str, trust_remote_code: bool = False, attention: Optional[str] = None) -> None:
    """Raises UserError for a model in which packed documents would see each other, with the function named `attention` if
    that is known."""
    from transformers import AutoConfig

    from trainer.models.varlen_attention import NAME, validate_attention_layers, validate_registered_attention

    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    validate_attention_layers(config, "--packing_samples", "leave it out")
    if attention == NAME:
        validate_registered_attention(config, "--packing_samples", "leave it out")


def setup_split_attention(
    folder: str, sp_group, sp_mode: str, tp_size: int, trust_remote_code: bool = False, packed: bool = False
) -> str:
    """Register attention over sequences split over `sp_group`; returns its name. Raises UserError for unfit models."""
    from transformers import AutoConfig

    from trainer.models.ring_attention import register_ring_attention, validate_split_model
    from trainer.models.ulysses_attention import validate_ulysses

    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    validate_split_model(config)
    if sp_mode == "ulysses":
        text = config.get_text_config()
        kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        validate_ulysses(text.num_attention_heads // tp_size, kv_heads // tp_size, sp_group.size())
    return register_ring_attention(sp_group, sp_mode, packed)


def disable_dropout(model: torch.nn.Module) -> None:
    """Switch off, in place, what a transformers model drops or blurs by chance while it trains: that would depend on the
    micro-batch and the rank. The config that is saved with the model keeps its rates."""
    from transformers import PreTrainedConfig, PreTrainedModel

    without_rates = {}  # of each config that layers read as they run, a copy
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name in _rates(module):
            setattr(module, name, 0.0)
        config = getattr(module, "config", None)
        if isinstance(module, PreTrainedModel) or not isinstance(config, PreTrainedConfig):
            continue
        rates = _rates(config)
        if rates and id(config) not in without_rates:
            without_rates[id(config)] = copy.deepcopy(config)
            without_rates[id(config)].update(dict.fromkeys(rates, 0.0))
        module.config = without_rates.get(id(config), config)


def _rates(owner) -> list[str]:
    """Names of rates above 0: dropout, attn_pdrop, layerdrop, router_jitter_noise, ..."""
    names = [name for name, value in vars(owner).items() if isinstance(value, float) and value > 0]
    # PhiMoE's is no noise: it decides which experts count, in evaluation as well
    kept = "router_jitter_noise" if "Phimoe" in type(owner).__name__ else None
    return [name for name in names if ("drop" in name or "jitter" in name) and name != kept]


def model_inputs(batch: dict) -> dict:
    """What a padded or packed micro-batch (see trainer.datasets.packing) gives to a model call.

    No attention_mask: rows are padded on the right, where causal attention keeps padding from every real token, and
    kernels are faster without one.
    """
    inputs = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], "use_cache": False}
    if "cu_seqlens" in batch:
        inputs.update(
            cu_seqlens=batch["cu_seqlens"],  # read by our attention function
            cu_seq_lens_q=batch["cu_seqlens"], cu_seq_lens_k=batch["cu_seqlens"],  # read by transformers' flash-attn
            max_length_q=batch["max_length"], max_length_k=batch["max_length"],
        )  # fmt: skip
    return inputs


def causal_lm_logits(model, batch: dict) -> torch.Tensor:
    """Logits (rows, tokens, vocab) of a padded or packed micro-batch."""
    return model(**model_inputs(batch)).logits


def flops_per_token(config, num_params: int, mean_length: float) -> float:
    """Training FLOPs per token: 6 N + 6 L d s for causal attention (PaLM, Chowdhery et al. 2022, appendix B, halved)."""
    text = config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 6 * num_params + 6 * text.num_hidden_layers * text.num_attention_heads * head_dim * mean_length
