"""`prepare_data`: tokenize data once, with many processes and without GPUs, into a folder that `--dataset` takes.

python -m trainer.cli.prepare_data --pretrain MODEL --dataset data.jsonl --output_dir tokens --dataset_num_proc 32 ...
"""

import os
from dataclasses import dataclass
from typing import Optional

from trainer.datasets.files.set_names import check_files
from trainer.entry import quiet_libraries, run_command
from trainer.errors import UserError
from trainer.flags.common_flags import DataArguments, LengthArguments, SFTDataArguments
from trainer.flags.names.sources import naming_sources
from trainer.flags.parse_flags import arg, flat, group, parse_arguments
from trainer.limits import raise_limits
from trainer.runs.output_folders import check_rights, make_writable


@dataclass
class OutputArguments:
    """Tokenizer and output"""

    pretrain: Optional[str] = arg(None, "model folder or hub name with the tokenizer")
    trust_remote_code: bool = arg(False, "allow code from the model folder")
    output_dir: Optional[str] = arg(None, "folder to write; --dataset of train_sft takes it")
    rows_per_part: int = arg(1_000_000, "rows tokenized at a time; a new start goes on after them", type="PositiveInt")
    seed: int = arg(42, "seed of --dataset_probs", type="NonNegativeInt")


@dataclass
class PrepareArguments:
    """Tokenize data for train_sft."""

    target: OutputArguments = group(OutputArguments)
    data: DataArguments = group(DataArguments)
    length: LengthArguments = group(LengthArguments)
    sft: SFTDataArguments = group(SFTDataArguments)


NEEDED = {
    "pretrain": "a folder or hub name with the tokenizer",
    "dataset": "files, folders or hub names of rows",
    "output_dir": "a new folder for the tokens",
}


def check(args: PrepareArguments) -> str:
    """The absolute path of the folder to write. Raises UserError for flags and folders that no run could have."""
    flags = flat(args)
    for name, allowed in NEEDED.items():
        if not flags[name]:
            raise UserError(f"--{name}", "missing", allowed)
    for name in ("eval_dataset", "eval_dataset_flags", "eval_split", "eval_fraction", "max_eval_samples"):
        if flags[name] != getattr(DataArguments(), name):
            raise UserError(f"--{name}", "would do nothing here", "give it to train_sft")
    target = os.path.abspath(args.target.output_dir)
    if os.path.exists(target):
        raise UserError("--output_dir", f"{target} exists already", "a new folder")
    check_rights(target)
    raise_limits(flags["limits"] or ())
    check_files(flags["dataset"], "--dataset")
    return target


def run(argv: list[str]) -> None:
    args = parse_arguments(PrepareArguments, "prepare_data", argv)
    target = check(args)
    # torch is imported from here on: --help and a wrong flag have answered
    quiet_libraries()
    from trainer.datasets.samples.preparation import prepare_rows
    from trainer.datasets.samples.prepared import OPTIONS
    from trainer.models.model_bounds import bounds_of
    from trainer.models.model_loading import resolve_model_folder
    from trainer.runs.run_data import files_in_errors, load_sets_of, note_unknown_names, options_of_sft, with_files
    from trainer.runs.run_setup import prepared_tokenizer

    data = args.data
    make_writable("--output_dir", os.path.dirname(target))
    folder, remote_code = resolve_model_folder(args.target.pretrain), args.target.trust_remote_code
    tokenizer = prepared_tokenizer(folder, remote_code, data)
    named = data, args.target.seed, data.dataset, data.dataset_split, "--dataset"

    def options_of(args) -> dict:
        own = options_of_sft(args)
        return {name: own[name] for name in OPTIONS}

    rows = load_sets_of(args, args.target.seed, options_of, *named[2:])
    sizes = {"rows_per_part": args.target.rows_per_part, "num_proc": data.dataset_num_proc}
    sizes["allow_no_stop"] = args.sft.allow_no_stop
    sizes["bounds"] = bounds_of(folder, remote_code)
    with files_in_errors(*named):
        ledger = prepare_rows(rows, tokenizer, target, options_of(args), **sizes)
    note_unknown_names(print, data, [(ledger, *named[2:])])
    print(f"{with_files(ledger.report('data'), *named)}\nwritten to {target}")


def main() -> None:
    run_command(naming_sources(run))


if __name__ == "__main__":
    main()
