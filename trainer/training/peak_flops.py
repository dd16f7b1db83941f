"""How fast a GPU could be."""

import re
from typing import Optional

import torch

# dense bf16 peak FLOP/s by words of the device's name, from the makers' data sheets; the first entry that fits counts
PEAK_FLOPS = (
    ("GB200", 2500e12), ("B200", 2250e12), ("GH200", 989e12), ("H200", 989e12), ("H800", 989e12),
    ("H100 PCIe", 756e12), ("H100 NVL", 835e12), ("H100", 989e12), ("H20", 148e12), ("A100", 312e12), ("A800", 312e12),
    ("L40S", 362e12), ("L4", 121e12), ("A10G", 70e12), ("A10", 125e12), ("RTX 5090", 209.5e12), ("RTX 4090", 165e12),
)  # fmt: skip


def peak_flops(device_name: str) -> Optional[float]:
    """Dense bf16 FLOP/s of a GPU; None if unknown. "NVIDIA H100 80GB HBM3" is an H100 with SXM."""
    words = set(re.split(r"[^A-Za-z0-9]+", device_name))
    return next((flops for name, flops in PEAK_FLOPS if set(name.split()) <= words), None)


def mfu(device: torch.device, flops_per_second: float) -> Optional[float]:
    """Share of the peak FLOP/s of all ranks' GPUs; None if the peak is unknown."""
    peak = peak_flops(torch.cuda.get_device_name(device))
    return flops_per_second / (peak * torch.distributed.get_world_size()) if peak else None
