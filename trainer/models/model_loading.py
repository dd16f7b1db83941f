"""What a run needs of a model besides its weights: its folder, its tokenizer, its class, no dropout.

The second part says in one line what is wrong with a folder, its tokenizer or its model, after a reader has failed.
"""

import copy
import json
import os
import stat
import struct
import zipfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Optional

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from transformers import CONFIG_MAPPING, AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedModel

from trainer.errors import UserError, one_line
from trainer.limits import MB, is_inside, limit, read_model_config, too_large
from trainer.metrics import counted
from trainer.model_folders.adapter_folder import (
    ADAPTER_CONFIG,
    adapter_here,
    base_folder,
    how_to_merge,
    is_adapter,
    read_adapter,
)
from trainer.model_folders.folder_names import INDEX, SINGLE
from trainer.model_folders.model_folder import check_weights

TEMPLATES = "additional_chat_templates"  # a folder in that of a model, as transformers names it
OF_TEXT = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".bpe", ".vocab", ".py")  # what is read whole
MOST_GROWTH = 1000  # of a text in a tokenizer's normalizer
WEIGHT_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.py"]  # .py: for --trust_remote_code
LFS_POINTER = b"version https://git-lfs"
TOKENIZER_FILES = ("tokenizer", "special_tokens_map", "vocab", "added_tokens", "chat_template")
DOWNLOAD = "complete files: download the folder again"


def resolve_model_folder(name: str, flag: str = "--pretrain") -> str:
    """Return the local folder of a model: `name` itself, or the snapshot of a hub name.

    Raises:
        UserError: there is no such model, or a file is broken. `flag` is the flag that named it.
    """
    cached = adapter_here(name)
    name = cached if is_adapter(cached) else name
    if os.path.isdir(name):
        if is_adapter(name):
            raise UserError(flag, f"{name} is an adapter, not a model", instead=how_to_merge(name))
        if not os.path.exists(os.path.join(name, "config.json")):
            found, inner = f"{name} contains no config.json", os.path.join(name, "model")  # where a run saves its model
            if any(os.path.exists(os.path.join(inner, file)) for file in ("config.json", ADAPTER_CONFIG)):
                raise UserError(flag, found, instead=f"Did you mean {inner}?")
            raise UserError(flag, found, "a Hugging Face model folder")
        return _readable(name, flag)
    if os.path.exists(name) or name.startswith((".", "/", "~")):
        raise UserError(flag, f"{name} is not a folder", "a Hugging Face model folder or hub name")
    try:
        folder = snapshot_download(name, allow_patterns=WEIGHT_PATTERNS)
        if is_adapter(folder):
            raise UserError(flag, f"{name} is an adapter, which is now in the cache", instead="Give the command again.")
        return _readable(folder, flag)
    except UserError:
        raise
    except Exception as error:  # the hub raises a dozen error types: not found, gated, offline, bad name
        found = f"{name} is not a folder, and the hub does not give it ({one_line(error)})"
        raise UserError(flag, found) from None


def resolve_adapted_model(name: str, flag: str) -> tuple[str, Optional[str]]:
    """`resolve_model_folder` of a model or of the base of an adapter folder, and that adapter folder or None."""
    name = adapter_here(name)
    if not is_adapter(name):
        return resolve_model_folder(name, flag), None
    _refuse_special_files(name, flag)
    read_adapter(name, flag)
    return resolve_model_folder(base_folder(name, flag), flag), name


def _readable(folder: str, flag: str) -> str:
    """`folder`, after a look into its configs, its index, and the header of each file of weights."""
    _refuse_special_files(folder, flag)
    try:
        held, stored = os.listdir(folder), set()
        names = [name for name in ("config.json", "generation_config.json", INDEX) if name in held]
        contents = {name: json.loads(Path(folder, name).read_text("utf-8")) for name in names}
        if contents["config.json"].get("model_type") == "cpmant":
            raise ValueError("it wants padding on the left")
        listed = contents[INDEX]["weight_map"] if INDEX in contents else {}
        indexes = [json.loads(Path(folder, name).read_text("utf-8")) for name in held if name.endswith(".index.json")]
        if not all(is_inside(file) for index in indexes for file in index.get("weight_map", {}).values()):
            raise ValueError("its index names a file outside of its folder")
        for name in set(listed.values()) or ({SINGLE} & set(held)):
            with safe_open(os.path.join(folder, name), framework="pt") as weights:
                stored |= {(tensor, name) for tensor in weights.keys()}  # noqa: SIM118 (no mapping)
        if not stored.issuperset(listed.items()):
            raise ValueError("its index names tensors that no file holds")
        if "auto_map" not in contents["config.json"]:  # else the class of its config comes with the model
            AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if "generation_config.json" in contents:
            GenerationConfig.from_pretrained(folder)
    except Exception as error:  # of many types: each reader has its own
        raise unreadable(folder, flag, error) from None
    return folder


def check_code(folder: str, flag: str, trust_remote_code: bool) -> None:
    """Raise UserError if the config of a model can only be read by code of its folder, which nobody has allowed."""
    config = read_model_config(folder)
    if "auto_map" in config and config.get("model_type") not in CONFIG_MAPPING and not trust_remote_code:
        found = f"{folder} is a {config.get('model_type')}, which only its own code reads"
        raise UserError(flag, found, "--trust_remote_code after a look at that code, or another model")


def _refuse_special_files(folder: str, flag: str) -> None:
    """A FIFO would wait for a writer, and a device may never end. No file of text is large, also of chat templates."""
    templates = os.path.join(folder, TEMPLATES)
    for entry in [*os.scandir(folder), *(os.scandir(templates) if os.path.isdir(templates) else ())]:
        kind = os.stat(entry.path).st_mode if os.path.exists(entry.path) else 0
        if kind and not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):
            raise UserError(flag, f"{entry.path} is no regular file", "a folder of files")
        if entry.name.endswith(OF_TEXT) and kind and entry.stat().st_size > limit("json_mb") * MB:
            raise too_large(flag, f"{entry.path} has {entry.stat().st_size // MB} MB", "json_mb")


def load_tokenizer(folder: str, trust_remote_code: bool = False):
    """Load the tokenizer of a model folder. It pads with eos if it has no pad token. Raises UserError if it is broken."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # of many types: a broken tokenizer.json raises a bare Exception
        raise tokenizer_fault(folder, error) from None
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # transformers makes one up where no file says it
        raise tokenizer_fault(folder)
    _check_growth(tokenizer, folder)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _check_growth(tokenizer, folder: str) -> None:
    """Refuse replacements that make a text so much longer that the library, which is Rust, ends this process."""
    normalizer = tokenizer.backend_tokenizer.normalizer if tokenizer.is_fast else None
    found = list(_replacements(json.loads(normalizer.__getstate__()))) if normalizer else []
    copies: list[int] = []  # of the new text of each replacement, for one letter; a later one may replace its letters
    for pattern, _ in found:
        before = zip(copies, (text for _, text in found))
        copies.append(max([1, *(count * (text.count(pattern) if pattern else len(text)) for count, text in before)]))
    growth = max((count * len(text) for count, (_, text) in zip(copies, found)), default=0)
    if growth > MOST_GROWTH:
        problem = f"its normalizer replaces a letter by up to {growth} letters"
        raise UserError(f"{folder}/tokenizer.json", problem, f"at most {MOST_GROWTH}")


def _replacements(step: dict) -> Iterator[tuple[str, str]]:
    """(what is replaced, "" for an expression; the new text) in order."""
    for own in step.get("normalizers", ()):
        yield from _replacements(own)
    if step["type"] == "Replace":
        yield step["pattern"].get("String", ""), step["content"]


def has_sdpa(folder: str, auto_class, trust_remote_code: bool) -> bool:
    """Whether transformers computes this model's attention correctly with sdpa, which drops soft caps (Gemma 2)."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    found = model_class(config, auto_class._model_mapping)
    if found is None:  # code of the model folder
        return True
    return found._supports_sdpa and not getattr(config.get_text_config(), "attn_logit_softcapping", None)


def model_class(config, mapping) -> Optional[type]:
    """The class of transformers for a config, from the mapping of an auto class. None: code of the model folder."""
    found = mapping.get(type(config), None)
    return found[0] if isinstance(found, tuple) else found


def disable_dropout(model: torch.nn.Module) -> None:
    """Switch off dropout, jitter and sampled experts of a transformers model, in place.

    They would depend on micro-batch and rank. The config that is saved with the model keeps its rates.
    """
    without_rates = {}  # id of a config that layers read in their forward pass -> its copy
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
        if type(module).__name__ in ("PhimoeTopKRouter", "Gemma3nTextAltUp"):  # they sample experts and clip weights
            module.eval().train = lambda mode=True, module=module: module
        for name in _rates(module):
            setattr(module, name, 0.0)
        config = getattr(module, "config", None)
        if isinstance(module, PreTrainedModel) or not isinstance(config, PreTrainedConfig):
            continue
        rates = _rates(config)
        if rates and id(config) not in without_rates:
            without_rates[id(config)] = copy.deepcopy(config)
            without_rates[id(config)].update(dict.fromkeys(rates, 0.0))
        module.config = without_rates.get(id(config), config)


def _rates(owner) -> list[str]:
    """Return names of rates other than 0, also of nan: dropout, attn_pdrop, layerdrop, router_jitter_noise, ..."""
    names = [name for name, value in vars(owner).items() if isinstance(value, float) and value != 0]
    kept = "router_jitter_noise" if "Phimoe" in type(owner).__name__ else None  # decides which experts count
    return [name for name in names if ("drop" in name or "jitter" in name) and name != kept]


# --- what is wrong with a folder


def unreadable(folder: str, flag: str, error: Exception) -> UserError:
    """What is wrong with the files of `folder`, which `flag` names. `error` is what the reader raised."""
    names = sorted(os.listdir(folder))
    for name in names:
        path = os.path.join(folder, name)
        fault = None
        if name.endswith((".safetensors", ".bin", ".json", ".model")):
            fault = _fault_of_any(path)
        if not fault and name.endswith(".safetensors"):
            fault = _fault_of_safetensors(path)
        if not fault and name.startswith("pytorch_model") and name.endswith(".bin"):
            fault = _fault_of_bin(path)
        if fault:
            return UserError(flag, f"{path} {fault}", DOWNLOAD)
        if os.path.isfile(path) and name.endswith(".json") and (fault := _fault_of_json(path)):
            return UserError(flag, f"{path} {fault}", "the file as it was published")
    for name in names:
        if name.endswith(".index.json") and (found := _fault_of_index(folder, name)):
            return UserError(flag, f"{folder}: {found}", DOWNLOAD)
    return _fault_of_config(folder, flag) or UserError(flag, f"{folder} cannot be read: {one_line(error)}")


def _fault_of_any(path: str) -> str | None:
    if not os.path.isfile(path):
        return "is no regular file, or a broken link"
    if not os.path.getsize(path):
        return "is empty"
    with open(path, "rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            return "is a pointer of git-lfs, not the file itself (git lfs pull)"
    return None


def _fault_of_safetensors(path: str) -> str | None:
    """The file is 8 bytes with the length of the header, the header in JSON, and the data."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if 8 + length > size:
            return f"is cut off in its header, or no safetensors file ({counted(size, 'byte')})"
        try:
            header = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return "has a broken header, or is no safetensors file"
    wanted = 8 + length + max(ends, default=0)
    if size < wanted:
        return f"is cut off: {size} of {counted(wanted, 'byte')}"
    return None if size == wanted else f"has {counted(size, 'byte')}, and its header says {wanted}"


def _fault_of_bin(path: str) -> str | None:
    with open(path, "rb") as file:
        is_old = file.read(2) == b"\x80\x02"  # a pickle, as torch wrote before 1.6
    return None if is_old or zipfile.is_zipfile(path) else "is cut off, or no file of torch.save"


def _fault_of_json(path: str) -> str | None:
    try:
        with open(path, "rb") as file:
            content = json.loads(file.read().decode("utf-8-sig"))
    except UnicodeDecodeError:
        return "is not UTF-8 text"
    except RecursionError:
        return "is nested too deep"
    except ValueError as error:
        return f"is broken JSON ({error})"
    return None if isinstance(content, dict) else "holds no JSON object"


def _fault_of_index(folder: str, name: str) -> str | None:
    with open(os.path.join(folder, name), encoding="utf-8-sig") as file:
        weight_map = json.load(file).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        return f"{name} holds no weight_map of names and files"
    files = sorted(set(weight_map.values()))
    if outside := next((file for file in files if not is_inside(file)), None):
        return f"{name} names a file outside of its folder: {outside}"
    missing = [file for file in files if not os.path.exists(os.path.join(folder, file))]
    if missing:
        return f"{len(missing)} of the {counted(len(files), 'file')} of {name} are missing, such as {missing[0]}"
    for file in files if name.startswith("model.safetensors") else []:
        with safe_open(os.path.join(folder, file), framework="pt") as weights:
            held = set(weights.keys())
        for tensor, place in weight_map.items():
            if place == file and tensor not in held:
                return f"{name} names {tensor}, which {file} does not hold"
    return None


def _fault_of_config(folder: str, flag: str) -> UserError | None:
    path, here = os.path.join(folder, "config.json"), f"transformers {version('transformers')}"
    with open(path, encoding="utf-8-sig") as file:
        config = json.load(file)
    kind = config.get("model_type")
    if "auto_map" not in config and not isinstance(kind, str):
        return UserError(flag, f"{path} names no model_type", "the config.json of a Hugging Face model")
    if "auto_map" not in config and kind not in CONFIG_MAPPING:
        written = config.get("transformers_version")
        found = f"{here} does not know the model_type {kind!r} of {folder}"
        return UserError(
            flag, found, f"transformers {written} or newer wrote it" if written else "a newer transformers"
        )
    if kind == "cpmant":
        return UserError(flag, f"{folder} is a {kind}, whose mask wants padding on the left", "another architecture")
    readers = [(path, AutoConfig)] if "auto_map" not in config else []
    for name, reader in [*readers, (os.path.join(folder, "generation_config.json"), GenerationConfig)]:
        try:
            if os.path.exists(name):
                reader.from_pretrained(folder)
        except Exception as error:  # of many types: each class checks its values in its own way
            return UserError(flag, f"{name} is refused by {here}: {_reason(error)}")
    return None


def _reason(error: BaseException) -> str:
    """All lines as one. Validation errors of the hub's dataclasses have a heading first, and then the cause."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def load_fault(folder: str, auto_class, trust_remote_code: bool, flag: str, error: Exception) -> UserError:
    """Why `auto_class` made no model of `folder`, whose files can be read.

    `flag` names the folder. `error` is what transformers raised.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    is_ours = type(config).__module__.startswith("transformers.models.")  # else its code came with the model
    if is_ours and type(config) not in auto_class._model_mapping:
        task = auto_class.__name__.removeprefix("AutoModelFor")
        return UserError(flag, f"{folder}: transformers has no {task} for {config.model_type}", "another model")
    try:
        with torch.device("meta"):
            model = auto_class.from_config(config, trust_remote_code=trust_remote_code)
    except Exception as fault:  # of many types: each model computes its sizes in its own way
        return UserError(flag, f"{folder}/config.json describes no model that can be built: {_reason(fault)}")
    try:
        check_weights(model, folder, flag)
    except UserError as fault:
        return fault
    return UserError(flag, f"{folder} cannot be loaded: {type(error).__name__}: {_reason(error)}")


def tokenizer_fault(folder: str, error: Exception | None = None) -> UserError:
    """Why the tokenizer of `folder` cannot be loaded. Without an `error`, its files hold no vocabulary."""
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if name.startswith(TOKENIZER_FILES):
            fault = _fault_of_any(path) or (_fault_of_json(path) if name.endswith(".json") else None)
            if fault:
                return UserError(path, fault, "the file as it was published")
    if error is None or not any(
        name.startswith(TOKENIZER_FILES) or name.endswith(".model") for name in os.listdir(folder)
    ):
        return UserError(folder, "contains no tokenizer", "a model folder with tokenizer.json, as it was published")
    return UserError(folder, f"contains no tokenizer that transformers reads: {one_line(error)}")


def check_tokens(tokenizer, vocab_size: int, folder: str, flag: str) -> None:
    """Raise UserError if the tokenizer makes a token that the model has no embedding for.

    Special tokens that no text contains, such as the token of an image, may be beyond. Some published models have them.
    """
    used = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    for token, number in sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1]):
        added = tokenizer.added_tokens_decoder.get(number)
        if number >= vocab_size and (number in used or added is None or not added.special):
            found = f"{folder}: token {number} ({token!r}) of the tokenizer is beyond the {vocab_size} of the model"
            raise UserError(flag, found, "the tokenizer of the model, or a model with resized embeddings")
