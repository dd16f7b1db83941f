"""`export_model CKPT OUT`: write the Hugging Face model folder of a checkpoint, or the adapter folder of a LoRA run.

The command is one process. It builds the model only on the meta device, without weights.
"""

import json
import os
import shutil

from trainer.cli.convert_ckpt import check_folders
from trainer.entry import run_command
from trainer.errors import UserError

USAGE = "python -m trainer.cli.export_model CKPT OUT"
PREFIX = "weight/"


def run(argv: list[str]) -> None:
    source, target = check_folders(argv, USAGE)
    import torch

    from trainer.checkpoints.run_state import HF_FOLDER
    from trainer.checkpoints.shards import ShardReader
    from trainer.model_folders.adapter_tensors import ADAPTER_CONFIG
    from trainer.model_folders.model_folder import INDEX
    from trainer.model_folders.model_writer import (
        commit_folder,
        in_hub_format,
        save_adapter,
        save_safetensors_shards,
        save_source_config,
    )

    reader, temporary = ShardReader(source), target + ".tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    with open(os.path.join(source, HF_FOLDER, "config.json")) as file:
        dtype = getattr(torch, json.load(file)["dtype"])

    def weights():
        for key in sorted(key for key in reader.shapes if key.startswith(PREFIX)):
            tensor = reader.read_full(key)
            yield key.removeprefix(PREFIX), tensor.to(dtype) if tensor.is_floating_point() else tensor

    try:
        weight_files = shutil.ignore_patterns("*.safetensors", INDEX)
        shutil.copytree(os.path.join(source, HF_FOLDER), temporary, ignore=weight_files)
        if os.path.exists(os.path.join(temporary, ADAPTER_CONFIG)):
            save_adapter(weights(), temporary)
        else:
            model = without_weights(temporary)
            if model:
                model.name_or_path = pretrained_folder(source)
            tensors = in_hub_format(model, weights(), dtype) if model else weights()
            save_safetensors_shards(tensors, temporary, 2 << 30)
            if model:
                save_source_config(model, dtype, temporary)
        commit_folder(temporary, target)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError("OUT", f"{target}: {error.strerror or error}") from None
    print(f"model written to {target}")


def without_weights(folder: str):
    """Build the model of a config.json on the meta device. None if its class is not in transformers (custom code)."""
    import torch
    import transformers

    with open(os.path.join(folder, "config.json")) as file:
        [name] = json.load(file)["architectures"]
    if not hasattr(transformers, name):
        return None
    with torch.device("meta"):
        return getattr(transformers, name)(transformers.AutoConfig.from_pretrained(folder))


def pretrained_folder(checkpoint: str) -> str:
    """The folder that the run began with. A saved model has the names of its tensors. "" if it is not here."""
    from huggingface_hub import snapshot_download

    from trainer.checkpoints.run_state import read_state

    name = read_state(checkpoint).get("arguments", {}).get("pretrain") or ""
    if os.path.isdir(name) or not name:
        return name
    try:
        return snapshot_download(name, local_files_only=True)
    except (OSError, ValueError):  # its errors for a snapshot that is not in the cache, and for a path
        return ""


def main() -> None:
    run_command(run)


if __name__ == "__main__":
    main()
