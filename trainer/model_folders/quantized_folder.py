"""Read FP8 and mxfp4 model folders as full-precision weights, slice by slice. Other quantizations are refused.

FP8 (DeepSeek-V3, arXiv:2412.19437, section 3.3): weight = value * scale, with one scale per block, channel or tensor.
mxfp4 (OCP Microscaling Formats 1.0, section 5): 32 values of 4 bits share a scale 2 ** (byte - 127).
"""

from typing import Optional

import torch

from trainer.errors import UserError

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)  # E2M1
FP4_BLOCK = 32  # values that share a scale
READABLE = "bf16, fp16, fp32, fp8 and mxfp4 weights"
SCALES = ("_scale_inv", "_scale")  # after the name of the weight: both are factors
# scales of activations and of the KV cache, which only a quantized forward pass uses
UNUSED = (".input_scale", ".activation_scale", ".input_scale_ub", ".k_scale", ".v_scale", ".q_scale")


def block_size(folder: str, config: dict, flag: str) -> Optional[list[int]]:
    """(rows, columns) of a block of weights with one scale, from a quantization_config; None if it names no blocks.

    Raises:
        UserError: the weights are not quantized as FP8 or mxfp4.
    """
    method = config.get("quant_method", "an unknown method")
    if method in ("fp8", "fbgemm_fp8", "mxfp4"):
        return config.get("weight_block_size")
    if method == "modelopt" and config.get("quant_algo") == "FP8":
        return None
    groups = [group.get("weights") or {} for group in (config.get("config_groups") or {}).values()]
    if method == "compressed-tensors" and groups and all(map(_is_fp8, groups)):
        return groups[0].get("block_structure")
    raise UserError(flag, f"{folder} holds weights quantized by {method}", f"a folder of {READABLE}")


def _is_fp8(weights: dict) -> bool:
    return weights.get("type") == "float" and weights.get("num_bits") == 8 and weights.get("symmetric", True)


class DequantizedFolder:
    """The weights of a quantized folder in fp32, with the methods of a SafetensorsFolder. Scales have no name here."""

    is_quantized = True

    def __init__(self, files, folder: str, config: dict, flag: str):
        self._files, self._blocks, self._folder = files, block_size(folder, config, flag), folder
        stored = files.names()
        self._packed = {name.removesuffix("_blocks") for name in stored if name.endswith("_blocks")}
        self._scales = {name: name + end for name in stored for end in SCALES if name + end in files}
        hidden = {name + end for name in self._packed for end in ("_blocks", "_scales")} | set(self._scales.values())
        self._names = [name for name in stored if name not in hidden and not name.endswith(UNUSED)]
        self._names += sorted(self._packed)
        for name in self._names:
            dtype = "U8" if name in self._packed else files.dtype(name)
            if dtype.startswith("F8") != (name in self._scales) or (dtype[0] not in "FB" and name not in self._packed):
                raise UserError(flag, f"{folder}: {name} is {dtype}, and its scale is not known", READABLE)
        for name in self._packed:
            if name + "_scales" not in files:
                raise UserError(flag, f"{folder}: {name}_blocks has no {name}_scales", "a complete model")

    def __contains__(self, name: str) -> bool:
        return name in self._packed or (name in self._files and name in self._names)

    def names(self) -> list[str]:
        return self._names

    def dtype(self, name: str) -> str:
        return "F32" if name in self._packed or name in self._scales else self._files.dtype(name)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._packed:
            return self._files.shape(name)
        *front, outputs, groups, half = self._files.shape(name + "_blocks")  # two values in a byte
        return (*front, groups * half * 2, outputs)

    def read(self, name: str, region: Optional[tuple[slice, ...]] = None) -> torch.Tensor:
        """The weight, or the part of it that `region` (one slice per dimension) selects. fp32 if it was quantized."""
        if name not in self._packed and name not in self._scales:
            return self._files.read(name, region)
        region = region or tuple(slice(0, size) for size in self.shape(name))
        if name in self._packed:
            return self._read_mxfp4(name, region)
        return self._read_fp8(name, region)

    def _read_fp8(self, name: str, region: tuple[slice, ...]) -> torch.Tensor:
        shape, scale = self.shape(name), self._files.read(self._scales[name])
        scale = (scale.float() - 127).exp2() if scale.dtype == torch.uint8 else scale.float()
        weight = self._files.read(name, region).float()
        if scale.numel() == 1:
            return weight.mul_(scale.reshape(()))
        blocks = dict(zip(range(len(shape) - 2, len(shape)), self._blocks or ()))
        fits = scale.ndim == len(shape)
        for dim, part in enumerate(region if fits else ()):
            size = 1 if scale.shape[dim] == shape[dim] else blocks.get(dim, shape[dim])
            if scale.shape[dim] == 1:
                continue  # one scale for the whole dimension
            fits = fits and scale.shape[dim] == -(-shape[dim] // size)  # the last block may be smaller
            if fits:
                scale = scale.index_select(dim, torch.arange(part.start, part.stop) // size)
        if not fits:
            found = f"{name} has shape {shape}, and its scale {self._files.shape(self._scales[name])}"
            raise UserError(self._folder, found, f"one scale per {self._blocks or 'channel or tensor'}")
        return weight.mul_(scale)

    def _read_mxfp4(self, name: str, region: tuple[slice, ...]) -> torch.Tensor:
        """Of (..., inputs, outputs). Files hold (..., outputs, groups, bytes of a group): low bits first."""
        *front, inputs, outputs = region
        groups = slice(inputs.start // FP4_BLOCK, -(-inputs.stop // FP4_BLOCK))
        stored = (*front, outputs, groups)
        packed = self._files.read(name + "_blocks", (*stored, slice(0, FP4_BLOCK // 2)))
        exponents = self._files.read(name + "_scales", stored).int() - 127
        values = torch.tensor(FP4_VALUES)
        codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)  # (..., outputs, groups, 32)
        weight = torch.ldexp(values[codes.int()], exponents.unsqueeze(-1)).flatten(-2)
        start = inputs.start - groups.start * FP4_BLOCK
        return weight[..., start : start + inputs.stop - inputs.start].transpose(-1, -2)
