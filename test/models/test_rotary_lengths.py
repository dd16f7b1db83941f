"""Frequencies that depend on the length of the text: each packed document has its own, and what cannot be right is refused."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

from trainer.errors import UserError
from trainer.models.layers.rotary_lengths import document_lengths, fit_rotary

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 8,
    "short_factor": [1.0] * 8, "long_factor": [1.0 + number for number in range(8)],
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


def phi3() -> Phi3ForCausalLM:
    torch.manual_seed(0)
    return Phi3ForCausalLM(Phi3Config(**SIZES, original_max_position_embeddings=8, rope_parameters=dict(LONG))).eval()


def sft(max_len: int, packing: bool = False, ring: int = 1) -> dict:
    return {"longest": max_len, "rolls_out": False, "packed": packing, "is_split": ring > 1}


def ppo(prompt: int, answer: int) -> dict:
    return {"longest": prompt + answer, "rolls_out": True, "packed": True, "is_split": False}


def test_lengths_of_documents():
    assert document_lengths(torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]])).tolist() == [
        [3, 3, 3, 2, 2],
        [1, 4, 4, 4, 4],
    ]


def test_a_packed_document_has_the_frequencies_that_transformers_gives_it_alone():
    model, alone, lengths = phi3(), phi3(), (5, 12, 8, 9)  # two are longer than 8
    fit_rotary(model, **sft(64, packing=True))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    hidden = torch.zeros(1, sum(lengths), 32)
    packed = model.model.rotary_emb(hidden, positions)
    expected = [alone.model.rotary_emb(hidden[:, :length], torch.arange(length)[None]) for length in lengths]
    for found, parts in zip(packed, zip(*expected)):
        torch.testing.assert_close(found, torch.cat(parts, 1), rtol=0, atol=0)
    as_one = phi3().model.rotary_emb(hidden, positions)
    assert not torch.equal(as_one[0], packed[0])  # transformers gives the long frequencies to all four


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (sft(9), "--max_len: 9 with longrope .* up to 8, or --packing_samples without --ring_attn_size and --exact"),
        (sft(9, packing=True, ring=2), "--max_len: 9 with longrope"),
        (ppo(4, 5), r"--prompt_max_len \+ --generate_max_len: 9 with longrope"),
    ],
)
def test_texts_whose_lengths_are_not_known_are_refused(flags, line):
    with pytest.raises(UserError, match=line):
        fit_rotary(phi3(), **flags)


def test_texts_up_to_the_length_of_pretraining_are_taken_and_dynamic_ones_beyond_it_are_refused():
    for flags in (sft(8), sft(8, packing=True, ring=2), ppo(4, 4)):
        fit_rotary(phi3(), **flags)
    llama = LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=dict(DYNAMIC)))
    fit_rotary(llama, **sft(64))
    with pytest.raises(UserError, match=r"--max_len: 65 with dynamic .*\(allowed: up to 64\)"):
        fit_rotary(llama, **sft(65, packing=True))
