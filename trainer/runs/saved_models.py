"""Whether a run may write its model where it wants to."""

import os

from trainer.errors import UserError
from trainer.runs.outputs import holds_run, saved_models


def check_saved_models(args) -> None:
    """Raise UserError if saving would replace anything but an old model. Saving replaces the whole folder."""
    flag, other = "--save_path", "a new or empty folder, or a model to replace"
    if not args.save_path:
        flag, other = "--output_dir", "another folder, or --save_path"
    for path in saved_models(args, args.output_dir):
        target = os.path.realpath(path)
        for name in ("output_dir", "pretrain", "reward_pretrain", "critic_pretrain", "ref_model"):
            for folder in filter(None, (vars(args).get(name) or "").split(",")):
                if os.path.commonpath([target, os.path.realpath(folder)]) == target:
                    raise UserError(flag, f"{path} would replace --{name}", "another folder, or one within it")
        if os.path.isfile(target):
            raise UserError(flag, f"{path} is a file", "a folder")
        if os.path.ismount(target):
            raise UserError(flag, f"{path} is a mount point, which cannot be replaced", "a folder within it")
        held = set(os.listdir(target)) if os.path.isdir(target) else set()
        if held and not held & {"config.json", "adapter_config.json"}:
            raise UserError(flag, f"{path} holds no model", other)
        if held and not (args.save_path or args.overwrite or holds_run(args.output_dir)):
            raise UserError(flag, f"{path} holds a model that no run in --output_dir wrote", other)
