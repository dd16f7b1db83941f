"""What `train_rm` and `train_dpo` share: pairs from the flags, and loaders that put both sides through one forward pass."""

import functools

from trainer.cli import common
from trainer.errors import UserError


def validate_pairs(args, eval_metrics: tuple[str, ...]) -> None:
    """Raises UserError for flags that mean nothing, or not what they say, where a sample is a pair."""
    common.validate_shared(args, eval_metrics)
    if args.max_tokens_per_micro_batch and not args.packing_samples:
        found = "without --packing_samples: padding between the two sides of a pair is not counted"
        raise UserError("--max_tokens_per_micro_batch", found, "--packing_samples or --micro_train_batch_size")


def load_pairs(args, tokenizer, names: str, split: str, flag: str, margin_key=None):
    """(tokenized pairs, ledger) of --dataset or --eval_dataset."""
    from trainer.datasets.preference import tokenize_preference

    return tokenize_preference(
        common.load_flag_rows(args, names, split, flag),
        tokenizer,
        flag=flag,
        prompt_key=args.prompt_key,
        chosen_key=args.chosen_key,
        rejected_key=args.rejected_key,
        margin_key=margin_key,
        input_template=args.input_template,
        apply_chat_template=args.apply_chat_template,
        max_len=args.max_len,
    )


def build_pair_loader(args, setup: common.Setup, pairs, *, shuffle: bool):
    from trainer.datasets.preference import collate_pairs

    collate = functools.partial(collate_pairs, packed=args.packing_samples)
    return common.build_loader(args, setup, pairs, collate, shuffle=shuffle, sequences_per_sample=2)
