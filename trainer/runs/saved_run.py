"""What `export` takes from a checkpoint besides its tensors. Others may have written it, so each value is checked."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any, NamedTuple, Optional

import torch
import transformers
from transformers import AutoConfig, PreTrainedModel

from trainer.checkpoints.run_state import read_state
from trainer.errors import UserError, one_line
from trainer.flags.rules import COMMANDS
from trainer.limits import read_model_config
from trainer.training.checkpointing import Progress, of_its_state, progress_of

TEXT, NUMBER, OTHER = (str,), (int, type(None)), (str, int, float, bool, type(None))
KINDS = {"pretrain": TEXT, "dataset": (str, type(None)), "lora_rank": NUMBER}
KINDS |= {"image_min_pixels": NUMBER, "image_max_pixels": NUMBER}


class SavedRun(NamedTuple):
    """The run of a checkpoint. Older ones lack the flags."""

    command: str
    flags: dict[str, Any]
    progress: Progress


def read_saved_run(folder: str) -> SavedRun:
    """Raises UserError for values that no run writes."""
    with of_its_state(folder):
        state = read_state(folder)
        flags, identity = _checked("arguments", state.get("arguments", {}), dict), state.get("identity", {})
        for name, value in flags.items():
            many = value if name not in KINDS and isinstance(value, list) else [value]
            for own in many:
                _checked(name, own, *KINDS.get(name, OTHER))
        command = _checked("identity", identity, dict).get("command", "train_sft")
        if command not in list(COMMANDS):
            raise ValueError(f"command is {shown(command)}")
        return SavedRun(command, flags, progress_of(state))


def _checked(name: str, value: Any, *kinds: type) -> Any:
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise TypeError(f"{name} is {shown(value)}")
    return value


def shown(value: Any) -> str:
    return repr(value)[:40]


# --- the config of its model


def build_saved_model(folder: str, shapes: dict[str, tuple[int, ...]]) -> Optional[torch.nn.Module]:
    """Build the model of a config.json on the meta device. None if its class is not in transformers (custom code).

    `shapes` are those of the weights of the checkpoint, by name. Raises UserError for a config that is not theirs.
    """
    where = os.path.join(folder, "config.json")
    with in_one_line(where, "the file as a run writes it"):
        if (kind := _class_of(read_model_config(folder), where, len(shapes))) is None:
            return None
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if not isinstance(config, kind.config_class or ()):
            raise UserError(where, f"{kind.__name__} with the config of {config.model_type}", "its own config")
        with torch.device("meta"):
            model = kind(config)
    for name, tensor in model.named_parameters():
        found, expected = shapes.get(name, ()), tuple(tensor.shape) or (1,)
        if found and found != expected:
            raise UserError(
                where, f"says shape {expected} for {name}, which has {found}", "the config of these weights"
            )
    return model


def _class_of(config: dict, where: str, num_tensors: int) -> Optional[type]:
    names = config.get("architectures")
    if not (isinstance(names, list) and len(names) == 1 and isinstance(names[0], str)):
        raise UserError(where, f"architectures {shown(names)}", "a list with the name of one class")
    for part in (config, config.get("text_config") or {}):
        layers = part.get("num_hidden_layers", 0)
        if not isinstance(layers, int) or layers > num_tensors:  # building them takes memory
            raise UserError(
                where, f"num_hidden_layers {shown(layers)}", f"a number up to that of tensors: {num_tensors}"
            )
    if not hasattr(transformers, names[0]):
        return None
    kind = getattr(transformers, names[0])
    if not (isinstance(kind, type) and issubclass(kind, PreTrainedModel)):
        raise UserError(where, f"architectures {shown(names)}, which is no model", "a class of models")
    return kind


@contextlib.contextmanager
def in_one_line(where: str, allowed: str) -> Iterator[None]:
    """Raise UserError for whatever a reader inside raises: each has its own errors for odd files."""
    try:
        yield
    except (UserError, OSError):
        raise
    except Exception as error:
        raise UserError(where, f"cannot be read: {type(error).__name__}: {one_line(error)[:200]}", allowed) from None
