"""What the name of a model tells, and the names of the files in its folder. Nothing is opened, and no library but that of
the hub is used. The hub is asked early, in one short request: its libraries ask again and again, seconds apart.
"""

import os
from typing import Literal

from trainer.errors import UserError, one_line

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONVERT = "Convert it: trainer export {} MODEL"
TIMEOUT_SECONDS = 10  # of one request to the hub


def check_model_name(name: str, flag: str) -> None:
    """Raise UserError for a path without a model, which `flag` names. A name on the hub passes if the hub has it."""
    if only_on_hub(name, flag):
        check_on_hub(name, flag, "model")


def only_on_hub(name: str, flag: str) -> bool:
    """Whether only the hub can tell of this name. Raises UserError for a path without a model. Nothing is asked."""
    if not name.strip():
        raise UserError(flag, "names no model", "a Hugging Face model folder or hub name")
    if os.path.isdir(name):
        held = os.listdir(name)
        if "config.json" in held and "adapter_config.json" not in held:
            find_weights(name, flag)
        elif "adapter_config.json" not in held:
            inner = os.path.join(name, "model")
            is_run = any(os.path.isfile(os.path.join(inner, file)) for file in ("config.json", "adapter_config.json"))
            instead = f"Did you mean {inner}?" if is_run else export_of(name)
            raise UserError(flag, f"{name} contains no config.json", "a Hugging Face model folder", instead)
    elif is_gguf(name):
        raise UserError(flag, f"{name} is a GGUF file", instead=CONVERT.format(name))
    elif os.path.exists(name):
        raise UserError(flag, f"{name} is not a folder", "a Hugging Face model folder or hub name")
    elif name.startswith((".", "/", "~")):
        raise UserError(flag, f"{name} is not found", "a Hugging Face model folder or hub name")
    return not os.path.exists(name)


def export_of(folder: str) -> str:
    """What to do with a folder that has files in the format of llama.cpp, and no model that trains; "" without them."""
    found = sorted(name for name in os.listdir(folder) if is_gguf(os.path.join(folder, name)))
    return CONVERT.format(os.path.join(folder, found[0])) if found else ""


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
    raise UserError(
        flag or folder, f"{folder} holds no weights", f"a folder with {SINGLE} or {INDEX}", export_of(folder)
    )


def weights_size(folder: str) -> int:
    """The bytes of the files of weights in a model folder, of the kind that is read."""
    end = f".{find_weights(folder)}"
    return sum(entry.stat().st_size for entry in os.scandir(folder) if entry.is_file() and entry.name.endswith(end))


def check_on_hub(name: str, flag: str, kind: Literal["model", "dataset"]) -> None:
    """Raise UserError if neither the hub nor the cache has this repository. If the hub is silent, the cache serves alone."""
    # only who names no folder waits for it
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import GatedRepoError, HFValidationError, OfflineModeIsEnabled, RepositoryNotFoundError

    home = os.environ.get("HF_DATASETS_CACHE") or os.path.join(constants.HF_HOME, "datasets")
    places = [os.path.join(constants.HF_HUB_CACHE, f"{kind}s--{name.replace('/', '--')}")]
    places += [os.path.join(home, name.replace("/", "___"))] if kind == "dataset" else []
    is_cached = any(map(os.path.isdir, places))
    try:
        HfApi().repo_info(name, repo_type=kind, timeout=TIMEOUT_SECONDS)
        return
    except HFValidationError as error:
        reason = one_line(error)
    except GatedRepoError:
        reason = "its owner must let you in: ask on its page, and set HF_TOKEN"
    except RepositoryNotFoundError:
        reason = f"there is no such {kind}, or it is private: set HF_TOKEN"
    except OfflineModeIsEnabled:
        reason = "HF_HUB_OFFLINE is set, and the cache does not have it"
    except Exception as error:  # no network, a wrong certificate, a proxy: each has its own type
        reason = f"no answer from {constants.ENDPOINT}: {one_line(error)}; HF_ENDPOINT=ADDRESS asks a mirror"
        if is_cached:
            os.environ["HF_HUB_OFFLINE"] = "1"  # for ranks, and for libraries that are imported later
            constants.HF_HUB_OFFLINE = True
            if int(os.environ.get("RANK", 0)) == 0:
                print(f"{flag} {name}: {reason}. It is taken from the cache", flush=True)
    if not is_cached:
        what = "folder" if kind == "model" else "file or folder"
        raise UserError(flag, f"{name} is not a {what}, and the hub does not give it ({reason})")
