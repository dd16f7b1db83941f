"""Files in the format of llama.cpp, as its own converter writes them."""

import json

import pytest
import torch


def as_gguf(model, path, quantized, tokenizer=None):
    """Write a Llama as llama.cpp's own converter does; `quantized` is stored in Q8_0. Returns the dequantized weight.

    `tokenizer` is a byte-level BPE with a chat template and `<|im_end|>`. By default, it has a few tokens.

    The converter puts the two halves of each head's rotary dimensions side by side:
    LlamaModel.permute in convert_hf_to_gguf.py of llama.cpp.
    """
    gguf = pytest.importorskip("gguf")
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    tokens, merges, controls = (
        [*(chr(33 + number) for number in range(66)), "ab", "<|im_end|>"],
        ["a b"],
        {"<|im_end|>"},
    )
    if tokenizer:
        vocabulary, bpe = tokenizer.get_vocab(), json.loads(tokenizer.backend_tokenizer.to_str())["model"]
        tokens, controls = sorted(vocabulary, key=vocabulary.get), {*tokenizer.all_special_tokens}
        merges = [" ".join(pair) for pair in bpe["merges"]]
        writer.add_chat_template(tokenizer.chat_template)
    tokens += [f"<{number}>" for number in range(config.vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in controls else 1 for token in tokens])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values, part = tensor.float().numpy(), name.split(".")[-2]
        if part in heads:
            values = values.reshape(heads[part], 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        kind = None
        if name == quantized:
            kind = gguf.GGMLQuantizationType.Q8_0
            values = gguf.quantize(values, kind)
            full = torch.from_numpy(gguf.dequantize(values, kind))
        writer.add_tensor(names.get_name(name, (".weight",)), values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return full
