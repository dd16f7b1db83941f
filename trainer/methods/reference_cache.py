"""Log-probs of a frozen reference, computed once and kept on disk under a hash of model, data and template."""

import glob
import hashlib
import os
from typing import Optional

import datasets
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from trainer.datasets.files.image_files import has_images
from trainer.methods.dpo import answer_log_probs
from trainer.model_folders.adapter_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from trainer.models.losses.sequence_sums import counts_here
from trainer.training.per_sample import values_by_row

# Raise this when the same model and pairs would give other log-probs. Older files are then not used.
VERSION = 2
COLUMNS = ("ref_chosen", "ref_rejected")  # columns of pairs that carry these log-probs


def model_hash(folder: str, adapter: Optional[str] = None) -> str:
    """A hash of the contents of config and weights of a model folder, and of the adapter folder on it."""
    digest = hashlib.blake2b(digest_size=16)
    weights = [
        path for kind in ("safetensors", "bin") for path in glob.glob(os.path.join(glob.escape(folder), f"*.{kind}"))
    ]
    of_adapter = [os.path.join(adapter, name) for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)] if adapter else []
    for path in [*sorted([os.path.join(folder, "config.json"), *weights]), *of_adapter]:
        with open(path, "rb") as file:
            while block := file.read(1 << 24):
                digest.update(block)
    return digest.hexdigest()


def cache_file(model: str, pairs, param_dtype: str) -> str:
    """The path of the cached log-probs of `pairs` under the model with the hash `model`.

    The key depends on the token ids and masks of both sides, and so on template, --max_len and tokenizer. It also depends
    on the images.
    """
    digest = hashlib.blake2b(f"{VERSION}/{model}/{param_dtype}".encode(), digest_size=16)
    for column in ("chosen_ids", "chosen_mask", "rejected_ids", "rejected_mask"):
        for values in pairs.with_format("numpy")[column]:
            digest.update(len(values).to_bytes(8, "little") + np.asarray(values, dtype="<i4").tobytes())
    if has_images(pairs):
        digest.update("".join(pairs["digest"]).encode())  # of the images too
    folder = os.path.join(datasets.config.HF_DATASETS_CACHE, "trainer_reference")
    return os.path.join(folder, f"{digest.hexdigest()}.safetensors")


def read(path: str) -> Optional[torch.Tensor]:
    """Log-probs (pairs, 2), fp64, of the chosen and the rejected answers. None if the file does not exist."""
    return load_file(path)["log_probs"] if os.path.exists(path) else None


def write(path: str, log_probs: torch.Tensor) -> None:
    """Write a temporary file and rename it, so that a killed run leaves no incomplete file."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    temporary = f"{path}.{os.getpid()}.tmp"
    save_file({"log_probs": log_probs.contiguous()}, temporary)
    os.replace(temporary, path)


def compute(strategy, reference, loader, pairs, sp_group) -> torch.Tensor:
    """Log-probs (pairs, 2), fp64, on the host, on every rank (one all-reduce over dp x sp). `loader` reads `pairs`."""

    def both_sides(micro_batch: dict) -> torch.Tensor:
        found = answer_log_probs(reference, micro_batch, sp_group)
        return counts_here(sp_group) * torch.stack([found.chosen, found.rejected], dim=1)

    rows = torch.as_tensor(np.asarray(pairs["row"]))
    return values_by_row(strategy, loader, both_sides, int(rows.max()) + 1).cpu()[rows]


def with_log_probs(pairs, log_probs: torch.Tensor):
    """`pairs` with the two columns that `collate_pairs` passes to the loss."""
    for number, name in enumerate(COLUMNS):
        pairs = pairs.add_column(name, log_probs[:, number].tolist())
    return pairs
