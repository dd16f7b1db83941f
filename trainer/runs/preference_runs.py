"""Data code of `train_rm` and `train_dpo`: pairs from the flags, and loaders with both sides in one forward pass."""

import functools

from trainer.errors import UserError
from trainer.runs import run_training
from trainer.runs.image_runs import tokenizer_of_rows


def validate_pairs(args, eval_metrics: tuple[str, ...]) -> None:
    """Raise UserError for flags that do not work if a sample is a pair."""
    run_training.validate_shared(args, eval_metrics)
    if args.max_tokens_per_micro_batch and not args.packing_samples:
        found = "without --packing_samples: the padding between the two sides of a pair is not counted"
        raise UserError("--max_tokens_per_micro_batch", found, "--packing_samples or --micro_train_batch_size")


def load_pairs(args, tokenizer, names: str, split: str, flag: str, margin_key=None, mean_flag=None):
    """Return (tokenized pairs, ledger) of --dataset or --eval_dataset. See `tokenize_preference`."""
    from trainer.datasets.samples.preference import tokenize_preference

    rows = run_training.load_flag_rows(args, names, split, flag)
    return tokenizer_of_rows(args, rows, tokenize_preference)(
        rows,
        tokenizer,
        flag=flag,
        prompt_key=args.prompt_key,
        chosen_key=args.chosen_key,
        rejected_key=args.rejected_key,
        margin_key=margin_key,
        mean_flag=mean_flag,
        input_template=args.input_template,
        apply_chat_template=args.apply_chat_template,
        max_len=args.max_len,
        num_proc=args.dataset_num_proc,
    )


def load_unpaired(args, tokenizer, names: str, split: str, flag: str):
    """Return (tokenized answers, ledger) of rows with single answers, or of pairs split into single answers."""
    from trainer.datasets.samples.unpaired import tokenize_unpaired, unpair

    rows = run_training.load_flag_rows(args, names, split, flag)
    keys = {args.chosen_key, args.rejected_key}
    if args.completion_key not in rows.column_names and keys <= set(rows.column_names):
        rows = unpair(rows, args.chosen_key, args.rejected_key, args.completion_key, args.label_key)
    return tokenizer_of_rows(args, rows, tokenize_unpaired)(
        rows,
        tokenizer,
        flag=flag,
        prompt_key=args.prompt_key,
        completion_key=args.completion_key,
        label_key=args.label_key,
        input_template=args.input_template,
        apply_chat_template=args.apply_chat_template,
        max_len=args.max_len,
        num_proc=args.dataset_num_proc,
    )


def build_unpaired_loader(args, setup: run_training.Setup, samples, *, shuffle: bool, rows_of=None):
    """The loader of single answers. `rows_of` makes rows of sequences with images; see `collate_sequences`."""
    from trainer.datasets.samples.unpaired import collate_unpaired

    collate = functools.partial(collate_unpaired, packed=args.packing_samples, max_len=args.max_len, collate=rows_of)
    return run_training.build_loader(args, setup, samples, collate, shuffle=shuffle, with_previous=True)


def build_pair_loader(args, setup: run_training.Setup, pairs, *, shuffle: bool, rows_of=None):
    """The loader of pairs. `rows_of` makes rows of sequences with images; see `collate_sequences`."""
    from trainer.datasets.samples.preference import collate_pairs

    collate = functools.partial(collate_pairs, packed=args.packing_samples, collate=rows_of)
    return run_training.build_loader(args, setup, pairs, collate, shuffle=shuffle, sequences_per_sample=2)
