"""QLoRA: models whose frozen layers bitsandbytes quantizes while they are read. Each rank holds all of them."""

import torch
from transformers import BitsAndBytesConfig


def load_in_4_bits(folder: str, auto_class, compute_dtype: torch.dtype, device: torch.device, **options):
    """Load a model for QLoRA (Dettmers et al. 2023): 4-bit NormalFloat with quantized scales. `options`: from_pretrained."""
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute_dtype,
    )
    options |= {"dtype": torch.float32, "weights_only": True, "quantization_config": config, "device_map": {"": device}}
    model = auto_class.from_pretrained(folder, **options)
    for module in model.modules():
        if hasattr(module, "quant_state"):
            # in eval mode on a CPU, bitsandbytes takes a kernel that rounds to bf16 and fails for odd widths
            module.train().train = lambda mode=True, module=module: module
    return model
