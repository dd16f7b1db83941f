"""What the names of the files in a model folder tell. Nothing is opened, and no library but that of the hub is used."""

import os

from trainer.errors import UserError
from trainer.model_folders.hub_names import check_on_hub

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def check_model_name(name: str, flag: str) -> None:
    """Raise UserError for a path without a model, which `flag` names. A name on the hub passes if the hub has it."""
    if not name.strip():
        raise UserError(flag, "names no model", "a Hugging Face model folder or hub name")
    if os.path.isdir(name):
        held = os.listdir(name)
        if "config.json" in held and "adapter_config.json" not in held:
            find_weights(name, flag)
        elif "adapter_config.json" not in held:
            inner = os.path.join(name, "model")
            is_run = any(os.path.isfile(os.path.join(inner, file)) for file in ("config.json", "adapter_config.json"))
            instead = f"Did you mean {inner}?" if is_run else ""
            raise UserError(flag, f"{name} contains no config.json", "a Hugging Face model folder", instead)
    elif is_gguf(name):
        raise UserError(flag, f"{name} is a GGUF file", instead=f"Convert it: trainer export {name} MODEL")
    elif os.path.exists(name):
        raise UserError(flag, f"{name} is not a folder", "a Hugging Face model folder or hub name")
    elif name.startswith((".", "/", "~")):
        raise UserError(flag, f"{name} is not found", "a Hugging Face model folder or hub name")
    else:
        check_on_hub(name, flag, "model")


def is_gguf(path: str) -> bool:
    """Whether `path` is a file in the format of llama.cpp, by its name."""
    return path.endswith(".gguf") and os.path.isfile(path)


def find_weights(folder: str, flag: str = "") -> str:
    """The kind of weights in the model folder: 'safetensors' or 'bin'.

    Raises:
        UserError: there are none; `flag` named the model.
    """
    names = os.listdir(folder)
    if INDEX in names or SINGLE in names:
        return "safetensors"
    if any(name.startswith("pytorch_model") and name.endswith((".bin", ".bin.index.json")) for name in names):
        return "bin"
    raise UserError(flag or folder, f"{folder} holds no weights", f"a folder with {SINGLE} or {INDEX}")
