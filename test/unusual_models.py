"""Tiny models with sinks, soft caps, chunks, windows in odd places, or layers that drop the documents of a packed row.

Windows, chunks and the positions at which Llama 4 tunes queries are shorter than the samples.
"""

import hybrid_models
import torch
import transformers
from transformers import AutoModelForCausalLM

from trainer.datasets.batches.packing import shifted_labels
from trainer.models.losses.token_losses import token_log_probs

SMALL = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "initializer_range": 0.2,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MANY_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
}
WINDOW = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 4, **WINDOW}
GEMMA4 = {
    "head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 2, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 97, "sliding_window": 5, "num_hidden_layers": 6, "num_kv_shared_layers": 3,
    "layer_types": 3 * WINDOW["layer_types"], "initializer_range": 0.05,
}  # fmt: skip
LLAMA4 = {
    "head_dim": 8, "num_hidden_layers": 4, "attention_chunk_size": 5, "floor_scale": 4, "attn_scale": 0.5,
    "intermediate_size_mlp": 48, "no_rope_layers": [1, 1, 1, 0], "interleave_moe_layer_step": 2, **EXPERTS,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 8, "first_k_dense_replace": 1, "n_shared_experts": 1, **MANY_EXPERTS,
}  # fmt: skip
MODELS = {
    "Gemma2": {**GEMMA, "attn_logit_softcapping": 2.0},
    "Gemma3Text": GEMMA,
    "Gemma4Text": GEMMA4,
    "GptOss": {"head_dim": 8, "num_key_value_heads": 1, **WINDOW, **EXPERTS},
    "GraniteSWA": WINDOW,
    "Llama4Text": LLAMA4,
    "MiMoV2Flash": {"head_dim": 8, "v_head_dim": 4, **WINDOW, **MANY_EXPERTS},
    "DeepseekV3": LATENT,
    "StableLm": {},
    "Nemotron": {"head_dim": 8},
    "Phimoe": {"sliding_window": 5, **EXPERTS},
    "Phi3": {"sliding_window": 5},
    "Cohere2": WINDOW,
    "Olmo3": WINDOW,
    "Exaone4": {"num_key_value_heads": 1, **WINDOW},
}
SAMPLES = [
    {
        "input_ids": (7 * torch.arange(start, start + n)).remainder(97).tolist(),
        "loss_mask": [i % 4 != 1 for i in range(n)],
    }
    for start, n in ((3, 13), (50, 9), (11, 1), (23, 22))
]


def make_config(name: str):
    """The config of a name in MODELS, or in `hybrid_models.CONFIGS`."""
    if name in hybrid_models.CONFIGS:
        return hybrid_models.CONFIGS[name]()
    return getattr(transformers, f"{name}Config")(**{**SMALL, **MODELS[name]})


def make_model(name: str, attention: str) -> torch.nn.Module:
    """Make a model with random norms, biases and sinks, because ones and zeros would hide a wrong factor."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_config(name), attn_implementation=attention)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval()  # Phimoe draws its experts at random in training


def alone(name: str) -> tuple[torch.Tensor, dict]:
    """Return logits (tokens, vocab) and gradients of a model in eager attention, one sample after the other."""
    model, logits = make_model(name, "eager"), []
    for sample in SAMPLES:
        logits.append(model(torch.tensor([sample["input_ids"]]), use_cache=False).logits)
        labels = torch.tensor([shifted_labels(sample["input_ids"], sample["loss_mask"])])
        (-token_log_probs(logits[-1], labels).sum()).backward()
    return torch.cat(logits, 1)[0].detach(), {key: weight.grad for key, weight in model.named_parameters()}


def assert_same_gradients(found: dict, expected: dict, what: str) -> None:
    for name, gradient in expected.items():
        if gradient is None or not gradient.norm():
            assert found[name] is None or found[name].norm() <= 1e-6, f"{what}: {name}"
            continue
        off = (found[name] - gradient).norm() / gradient.norm()
        assert off <= 1e-4, f"{what}: the gradient of {name} is off by {off:.1e}"
