"""Adapter folders as peft writes them: what their adapter_config.json says. Nothing else is opened."""

import contextlib
import json
import os
import shlex
from dataclasses import dataclass
from typing import Any, Optional

from trainer.errors import UserError, one_line
from trainer.limits import read_text
from trainer.model_folders.folder_names import INDEX, SINGLE

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
# fields of peft's LoraConfig that change what is computed, and that are read here or by peft's layers
USED = {"r", "lora_alpha", "target_modules", "target_parameters", "modules_to_save", "exclude_modules"}
USED |= {"rank_pattern", "alpha_pattern", "layers_to_transform", "layers_pattern", "use_dora", "use_rslora"}
# fields that change nothing of a trained adapter; the dropout is a choice of each run
WITHOUT_EFFECT = {"peft_type", "task_type", "base_model_name_or_path", "revision", "auto_mapping", "inference_mode"}
WITHOUT_EFFECT |= {"peft_version", "lora_dropout", "fan_in_fan_out", "megatron_core", "qalora_group_size"}
WITHOUT_EFFECT |= {"runtime_config"}
FIRST_VALUES = (True, False, None, "gaussian", "orthogonal", "eva")  # others change the weights of the base


@dataclass(frozen=True)
class AdapterFacts:
    """What an adapter folder says of itself."""

    rank: int
    alpha: int | float
    dropout: float
    target_modules: tuple[str, ...] | str  # a text is peft's regular expression
    has_experts: bool
    use_dora: bool
    use_rslora: bool
    base: Optional[str]  # folder or hub name of its base model
    config: dict[str, Any]  # the fields in USED, for peft's LoraConfig


def adapter_here(name: Optional[str]) -> Optional[str]:
    """The folder of an adapter that is in the cache of Hugging Face under this hub name, else `name` as it is."""
    return cached_folder(name, ADAPTER_CONFIG) or name


def cached_folder(name: Optional[str], file: str) -> Optional[str]:
    """The snapshot folder of a hub name that holds `file`; None if the cache has no such file. It asks no network."""
    if not name or os.path.exists(name) or name.startswith((".", "/", "~")):
        return None
    from huggingface_hub import try_to_load_from_cache  # only who names no folder waits for it

    try:
        found = try_to_load_from_cache(name, file)
    except ValueError:  # no name of a repository
        return None
    return os.path.dirname(found) if isinstance(found, str) else None


def is_adapter(name: Optional[str]) -> bool:
    """Whether `name` is the folder of an adapter, and not of a whole model that keeps an adapter's config."""
    held = os.listdir(name) if name and os.path.isdir(name) else []
    return ADAPTER_CONFIG in held and not {SINGLE, INDEX} & set(held)


def read_adapter(folder: str, flag: str) -> AdapterFacts:
    """The facts of an adapter folder, which `flag` named.

    Raises:
        UserError: it is no complete LoRA adapter, or it needs what this trainer does not compute.
    """
    path = os.path.join(folder, ADAPTER_CONFIG)
    if not is_adapter(folder):
        raise UserError(flag, f"{folder} is no adapter folder", f"a folder with {ADAPTER_CONFIG}")
    if not os.path.isfile(os.path.join(folder, ADAPTER_WEIGHTS)):
        raise UserError(flag, f"{folder} holds no {ADAPTER_WEIGHTS}", "a complete adapter")
    try:
        config = json.loads(read_text(path, flag))
        facts = _facts(config)
    except (OSError, ValueError, TypeError, AttributeError, KeyError, ArithmeticError, RecursionError) as error:
        raise UserError(flag, f"{path} cannot be read: {one_line(error)}", "the file as peft wrote it") from None
    instead = how_to_merge(folder)
    if config.get("peft_type") != "LORA":
        raise UserError(flag, f"{folder} is an adapter of the kind {config.get('peft_type')}", "LORA", instead)
    odd = [name for name, value in config.items() if value and name not in USED | WITHOUT_EFFECT]
    odd = [name for name in odd if name != "init_lora_weights" and (name, config[name]) != ("bias", "none")]
    if config.get("init_lora_weights") not in FIRST_VALUES:
        odd.append("init_lora_weights")
    if odd:
        raise UserError(flag, f"{path} has {odd[0]} {config[odd[0]]}, which is not built", instead=instead)
    return facts


def how_to_merge(folder: str) -> str:
    """A sentence with the command that merges an adapter, and with --base where export cannot find its base model."""
    named = None
    with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError, UserError):
        named = json.loads(read_text(os.path.join(folder, ADAPTER_CONFIG), folder)).get("base_model_name_or_path")
    base = "" if isinstance(named, str) and os.path.isdir(named) and not is_adapter(named) else " --base BASE"
    return f"Merge it: python -m trainer.cli.export {shlex.quote(folder)} MODEL{base}"


def _facts(config: dict[str, Any]) -> AdapterFacts:
    targets = config.get("target_modules") or ()
    rank, alpha, dropout = int(config["r"]), config["lora_alpha"], float(config.get("lora_dropout") or 0.0)
    if rank < 1 or rank != float(config["r"]) or not float(alpha) > 0:
        raise ValueError(f"rank {config['r']}, alpha {alpha}")
    alpha = int(alpha) if float(alpha).is_integer() else float(alpha)
    base = config.get("base_model_name_or_path")
    if not isinstance(base, (str, type(None))):
        raise TypeError(f"the base model {base}")
    return AdapterFacts(
        rank=rank,
        alpha=alpha,
        dropout=dropout,
        target_modules=targets if isinstance(targets, str) else tuple(sorted(map(str, targets))),
        has_experts=bool(config.get("target_parameters")),
        use_dora=bool(config.get("use_dora")),
        use_rslora=bool(config.get("use_rslora")),
        base=base or None,
        config={name: config[name] for name in sorted(USED & config.keys())} | {"r": rank, "lora_alpha": alpha},
    )


def base_folder(folder: str, flag: str) -> str:
    """The folder of an adapter's base model, also one in the cache under its hub name. A file grants no network.

    Raises:
        UserError: the adapter names none, or none that is a model folder here.
    """
    base = read_adapter(folder, flag).base
    base = cached_folder(base, "config.json") or base
    if base and os.path.isdir(base) and not is_adapter(base):
        return base
    found = f"{folder} names the base model {base}, which is no model folder here"
    found = found if base else f"{folder} names no base model"
    instead = f"Name it: --pretrain BASE --lora_adapter {folder}"
    if flag != "--pretrain":
        instead = how_to_merge(folder)
    raise UserError(flag, found, instead=instead)
