"""QLoRA on DeepSpeed: frozen layers in 4 bits (Dettmers et al. 2023)."""

import torch


def in_4_bits(compute_dtype: torch.dtype, device: torch.device) -> dict:
    """Options of from_pretrained: 4-bit NormalFloat with quantized scales, on `device`."""
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute_dtype,
    )
    return {"quantization_config": config, "device_map": {"": device}}
