"""`prepare_data`: tokenize data once, with many processes and without GPUs, into a folder that `--dataset` takes.

python -m trainer.cli.prepare_data --pretrain MODEL --dataset data.jsonl --output_dir tokens --dataset_num_proc 32 ...
"""

import os
from dataclasses import dataclass
from typing import Optional

from trainer.entry import quiet_libraries, run_command
from trainer.errors import UserError
from trainer.flags.common_flags import DataArguments, LengthArguments, SFTDataArguments, arg, parse_arguments


@dataclass
class OutputArguments:
    """Tokenizer and output"""

    pretrain: Optional[str] = arg(None, "model folder or hub name with the tokenizer")
    trust_remote_code: bool = arg(False, "allow code from the model folder")
    output_dir: Optional[str] = arg(None, "folder to write; --dataset of train_sft takes it")
    rows_per_part: int = arg(1_000_000, "rows tokenized at a time; a new start goes on after them", type="PositiveInt")
    seed: int = arg(42, "seed of --dataset_probs", type="NonNegativeInt")


@dataclass
class PrepareArguments(SFTDataArguments, LengthArguments, DataArguments, OutputArguments):
    """Tokenize data for train_sft."""


def run(argv: list[str]) -> None:
    args = parse_arguments(PrepareArguments, "prepare_data", argv)
    quiet_libraries()
    # after the flags are read: --help must not import torch
    from trainer.datasets.conversations.templates import load_chat_template
    from trainer.datasets.samples.preparation import prepare_rows
    from trainer.datasets.samples.prepared import OPTIONS
    from trainer.models.model_loading import load_tokenizer, resolve_model_folder
    from trainer.runs.outputs import make_writable
    from trainer.runs.run_training import load_flag_rows, refuse_idle

    for name in ("pretrain", "dataset", "output_dir"):
        if not vars(args)[name]:
            raise UserError(f"--{name}", "needed")
    refuse_idle(args, [("eval_dataset eval_split aux_loss_coef expert_bias_update_rate", False, "a flag of train_sft")])
    target = os.path.abspath(args.output_dir)
    if os.path.exists(target):
        raise UserError("--output_dir", f"{target} exists already", "a new folder")
    make_writable("--output_dir", os.path.dirname(target))
    tokenizer = load_tokenizer(resolve_model_folder(args.pretrain), args.trust_remote_code)
    load_chat_template(args.tokenizer_chat_template, tokenizer)
    rows = load_flag_rows(args, args.dataset, args.dataset_split, "--dataset")
    options = {name: vars(args)[name] for name in OPTIONS}
    sizes = {"rows_per_part": args.rows_per_part, "num_proc": args.dataset_num_proc}
    ledger = prepare_rows(rows, tokenizer, target, options, **sizes)
    print(f"{ledger.summary()}\nwritten to {target}")


def main() -> None:
    run_command(run)


if __name__ == "__main__":
    main()
