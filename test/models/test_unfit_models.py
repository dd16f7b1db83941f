"""Models that would be computed wrongly are refused in one line, most of them with packing. Models that pass their windows are accepted."""

import contextlib

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from trainer.datasets.batches.packing import collate_packed
from trainer.errors import UserError
from trainer.models.attention.choice import resolve_attention, validate_packed_model
from trainer.models.layers.compiled import compile_layers
from trainer.models.losses.token_losses import causal_lm_logits
from trainer.models.model_bounds import refuse_encoder

SMALL = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "initializer_range": 0.2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
WINDOW = {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 0}
WITH_WINDOWS = {
    "Mistral": {}, "Phi3": {}, "Starcoder2": {}, "Mixtral": EXPERTS, "Qwen2": {}, "Qwen3": {"head_dim": 8},
    "Qwen3Moe": {"head_dim": 8, **EXPERTS}, "Gemma3Text": {"head_dim": 8}, "Ministral": {"head_dim": 8}, "Olmo3": {},
    "Cohere2": {},
}  # fmt: skip
SAMPLES = [
    {"input_ids": torch.arange(start, start + length).remainder(97).tolist(), "loss_mask": [1] * length}
    for start, length in ((3, 13), (50, 9))
]


def make(name: str, **options) -> torch.nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SMALL, **options)
    return AutoModelForCausalLM.from_config(config, attn_implementation=resolve_attention("sdpa", packed=True))


@pytest.mark.parametrize("name", WITH_WINDOWS)
def test_models_that_hand_over_their_windows_give_packed_documents_the_logits_they_get_alone(name, tmp_path):
    model = make(name, **WINDOW, **WITH_WINDOWS[name])
    model.config.save_pretrained(tmp_path)
    validate_packed_model(str(tmp_path), False, "varlen")
    packed = causal_lm_logits(model, collate_packed(SAMPLES, 0))[0]
    model.set_attn_implementation("eager")
    alone = torch.cat([model(torch.tensor([sample["input_ids"]])).logits[0] for sample in SAMPLES])
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("name", "options", "found"),
    [
        ("StableLm", {}, "stablelm does not pass cu_seqlens to its attention"),
        ("Nemotron", {}, "nemotron does not pass cu_seqlens to its attention"),
        ("Doge", {"sliding_window": 4}, "doge does not pass its sliding window to its attention"),
        ("Doge", {}, "doge has attention with attention_mask"),
    ],
)
def test_what_a_model_keeps_from_its_attention_is_missed(name, options, found, compiled):
    model = make(name, **options)
    if compiled:
        compile_layers(model)
    with pytest.raises(UserError, match=f"--packing_samples: {found} .allowed: leave it out"):
        causal_lm_logits(model, collate_packed(SAMPLES, 0))


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("RecurrentGemma", "recurrent_gemma has layers of recurrent"),
        ("HYV4", "hy_v4 has layers of indexed_attention"),
        ("Bloom", "bloom has its own kind of attention"),
        ("Falcon", "falcon has its own kind of attention"),
    ],
)
def test_a_config_says_what_packing_cannot_do(name, found, tmp_path):
    getattr(transformers, f"{name}Config")().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"--packing_samples: {found}"):
        validate_packed_model(str(tmp_path), False, "varlen")


def test_chunks_are_cut_only_by_our_attention(tmp_path):
    transformers.Llama4TextConfig().save_pretrained(tmp_path)
    validate_packed_model(str(tmp_path), False, "varlen")
    with pytest.raises(UserError, match="--attn_implementation: flash_attention_2 for chunked_attention layers"):
        validate_packed_model(str(tmp_path), False, "flash_attention_2")
    transformers.LlamaConfig(num_hidden_layers=1, layer_types=["chunked_attention"]).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="--packing_samples: llama has layers of chunked_attention"):
        validate_packed_model(str(tmp_path), False, "varlen")


def test_a_window_that_never_cuts_is_no_fault():
    model = make("Phimoe", **EXPERTS, sliding_window=128)
    assert causal_lm_logits(model, collate_packed(SAMPLES, 0)).isfinite().all()


@pytest.mark.parametrize("name", ["Bert", "Roberta", "Electra", "BigBird", "RoFormer", "Llama"])
@pytest.mark.parametrize("is_decoder", [False, True])
def test_a_model_that_sees_later_tokens_is_refused(name, is_decoder, tmp_path):
    """Refused exactly where a later token changes the logits before it."""
    kind = getattr(transformers, f"{name}Config")
    config = kind(**SMALL | {"pad_token_id": 1}, **({} if name == "Llama" else {"is_decoder": is_decoder}))
    config.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_config(config).eval()
    tokens = torch.arange(5, 17)[None]
    logits = model(tokens).logits
    tokens[0, -1] = 90
    sees_later = not torch.allclose(model(tokens).logits[0, 0], logits[0, 0])
    assert sees_later == (name != "Llama" and not is_decoder)
    with pytest.raises(UserError, match=r"--teacher: .* is an encoder") if sees_later else contextlib.nullcontext():
        refuse_encoder(str(tmp_path), AutoModelForCausalLM, False, "--teacher")
    refuse_encoder(
        str(tmp_path), transformers.AutoModelForSequenceClassification, False, "--pretrain"
    )  # scores a whole text
