"""Say in one line why a model folder whose files can be read gives no model. This is used only after that failed."""

import torch

from trainer.errors import UserError
from trainer.model_folders.model_folder import check_weights
from trainer.models.folder_faults import reason


def load_fault(folder: str, auto_class, trust_remote_code: bool, flag: str, error: Exception) -> UserError:
    """Why `auto_class` made no model of `folder`, which `flag` names. `error` is what transformers said."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    is_ours = type(config).__module__.startswith("transformers.models.")  # else its code came with the model
    if is_ours and type(config) not in auto_class._model_mapping:
        task = auto_class.__name__.removeprefix("AutoModelFor")
        return UserError(flag, f"{folder}: transformers has no {task} for {config.model_type}", "another model")
    try:
        with torch.device("meta"):
            model = auto_class.from_config(config, trust_remote_code=trust_remote_code)
    except Exception as fault:  # of many types: each model computes its sizes in its own way
        return UserError(flag, f"{folder}/config.json describes no model that can be built: {reason(fault)}")
    try:
        check_weights(model, folder, flag)
    except UserError as fault:
        return fault
    return UserError(flag, f"{folder} cannot be loaded: {type(error).__name__}: {reason(error)}")
