"""The data of a run: rows from the flags, samples with their ledger, and loaders."""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

from trainer.comma_separated import names_in
from trainer.datasets.batches.global_batches import column_of
from trainer.datasets.files.image_files import has_images
from trainer.datasets.files.loading import columns_of_sets, load_rows, place_of_row
from trainer.datasets.files.set_names import names_of_sets
from trainer.datasets.images.image_processor import PixelLimits
from trainer.datasets.images.image_samples import tokenize_with_images
from trainer.datasets.samples.bounds import check_bounds
from trainer.datasets.samples.parts import WHOLE, Part
from trainer.datasets.samples.sets import Sets
from trainer.datasets.samples.sft_samples import tokenize_sft
from trainer.datasets.samples.streaming import SampleStream
from trainer.datasets.text_flags import parse_probs
from trainer.distributed.collectives import rank_0_first
from trainer.errors import UserError
from trainer.flags.common_flags import BatchArguments, DataArguments, SFTDataArguments
from trainer.flags.groups import flat, with_flags
from trainer.flags.names.own_flags import FLAGS_OF, SPLIT, as_flags, read
from trainer.metrics import counted, in_words
from trainer.models.model_bounds import bounds_of
from trainer.models.model_loading import resolve_model_folder
from trainer.runs.run_setup import Setup

SHOWN = 2000  # characters of the first sample


def load_flag_rows(data: DataArguments, seed: int, names: str, split: str, flag: str):
    """The rows of --dataset or --eval_dataset. `seed` mixes several sets."""
    return load_rows(names, **reading(data, seed, split, flag), ignored=names_in(data.ignore_columns))


def own_flags_of(data: DataArguments, names: str, flag: str) -> list[dict[str, Any]]:
    """The own flags of each set of --dataset or --eval_dataset; empty if all sets are read in the same way."""
    return read(vars(data)[FLAGS_OF[flag[2:]]], flag[2:], names)


def reading(data: DataArguments, seed: int, split: str, flag: str) -> dict[str, Any]:
    """How `load_rows` reads --dataset or --eval_dataset, but for the own flags of each set."""
    is_trained = flag == "--dataset"
    probs = data.dataset_probs if is_trained else None
    max_samples = data.max_samples if is_trained else data.max_eval_samples or data.max_samples
    return {"flag": flag, "split": split, "probs": probs, "max_samples": max_samples, "seed": seed}


@contextlib.contextmanager
def files_in_errors(data: DataArguments, seed: int, names: str, split: str, flag: str) -> Iterator[None]:
    """Where rows come from several files, a UserError about a row gets its file, and its number there."""
    try:
        yield
    except UserError as error:
        where = with_files(error.where, data, seed, names, split, flag)
        if where == error.where:
            raise
        raise UserError(where, error.found, error.allowed, error.instead) from None


def with_files(text: str, data: DataArguments, seed: int, names: str, split: str, flag: str) -> str:
    """A text in which each "--dataset row N" has its file, and its number there, if rows come from several files."""

    own, paths = own_flags_of(data, names, flag), names_of_sets(names, flag)
    shown = shown_names(paths, own)

    def place(found: re.Match) -> str:
        how, number = reading(data, seed, split, flag) | {"own": own}, shown.index(found[1]) if found[1] else None
        if number is not None:  # a set that is read by itself
            how |= {"probs": None, "own": own[number : number + 1]}
        file = place_of_row(int(found[2]) - 1, names if number is None else paths[number], **how)
        return f"{flag} {file}" if file else found[0]

    return re.sub(rf"{flag} (?:({'|'.join(map(re.escape, shown))}) )?row (\d+)", place, text)


def shown_names(paths: list[str], own: list[dict[str, Any]]) -> list[str]:
    """The names of sets in lines and errors, with their own splits."""
    splits = [one.get(SPLIT) for one in own or [{}] * len(paths)]
    return [f"{path} split {split}" if split else path for path, split in zip(paths, splits, strict=True)]


def load_sft(args, tokenizer, names: str, split: str, flag: str, part=WHOLE):
    """Return (tokenized samples, ledger) of a part of --dataset or --eval_dataset for SFT and distillation."""
    rows = load_sets_of(args, args.batch.seed, options_of_sft, names, split, flag)
    return tokenized(args, tokenizer, rows, tokenize_sft, options_of_sft, flag, part)


def options_of_sft(args) -> dict[str, Any]:
    """What `tokenize_sft` takes from the flags of a run, or of one set."""
    return text_options(args.data) | {"max_len": args.length.max_len, **sft_options(args.sft)}


def load_sets_of(args, seed: int, options_of: Callable, names: str, split: str, flag: str):
    """The rows of --dataset or --eval_dataset. They are `Sets` if the sets have flags of their own.

    `options_of(args)` are the options of a set, from the flags that hold for it.
    """
    own = own_flags_of(args.data, names, flag)
    if not own:
        return load_flag_rows(args.data, seed, names, split, flag)
    paths, probs = names_of_sets(names, flag), reading(args.data, seed, split, flag)["probs"]
    sets = [with_flags(args, dataset_probs=None, **as_flags(flags, flag[2:])) for flags in own]
    splits = [flags.get(SPLIT, split) for flags in own]
    rows = [load_flag_rows(one.data, seed, path, part, flag) for one, path, part in zip(sets, paths, splits)]
    shown = shown_names(paths, own)
    options = [options_of(one) | {"flag": f"{flag} {name}"} for one, name in zip(sets, shown)]
    return Sets(shown, rows, options, probs and parse_probs(probs, len(paths)), seed, flag)


def tokenized(args, tokenizer, rows, tokenize: Callable, options_of: Callable, flag: str, part: Part):
    """(samples, ledger) of the part of `rows`, by `tokenize` with the options of the run, or of each set."""
    tokenize = tokenize_function_of(args, rows, tokenize)
    return tokenize(rows, tokenizer, flag=flag, part=part, **options_of(args))


def text_options(data: DataArguments) -> dict[str, Any]:
    """What every function that tokenizes rows takes from the flags under "Data"."""
    names = ("input_template", "ignore_columns", "system", "apply_chat_template")
    return {name: vars(data)[name] for name in names} | {"num_proc": data.dataset_num_proc}


def sft_options(sft: SFTDataArguments) -> dict[str, Any]:
    """What `tokenize_sft` takes from the flags under "What to learn". --multiturn is a name of --train_on all."""
    options = {name: value for name, value in vars(sft).items() if name != "multiturn"}
    return options | {"train_on": "all" if sft.multiturn else sft.train_on}


def part_of(data: DataArguments, seed: int, is_evaluation: bool = False) -> Part:
    """The part of the rows that is trained, or evaluated. Without --eval_fraction, it is the whole set."""
    return Part(data.eval_fraction, seed, data.max_eval_samples, is_evaluation)


def load_sets(
    data: DataArguments, seed: int, setup: Setup, load: Callable, render: Callable, streaming: bool = False
) -> tuple[Any, Any, Any]:
    """Return (training samples, evaluation samples or None, training ledger). Print ledgers and first sample.

    `load(names, split, flag, part)` returns (samples, ledger). `render(sample, tokenizer)` is the sample as text.
    """
    strategy = setup.strategy
    strategy.print(f"reading {data.dataset}")
    trained = data.dataset, data.dataset_split, "--dataset"
    # a stream has no row of which the file could be found without reading all rows
    with contextlib.nullcontext() if streaming else files_in_errors(data, seed, *trained):
        part = part_of(data, seed)
        samples, ledger = rank_0_first(lambda: load(*trained, part), in_caches=True)
        report(setup, samples, ledger, "training data", data, seed, *trained)
    shown = shortened(render(samples[0], setup.tokenizer))
    strategy.print(f"first sample{', loss tokens in [[ ]]' * ('[[' in shown)}:", shown)  # prompts have no loss tokens
    read = [(ledger, *trained)]
    if not (data.eval_dataset or data.eval_fraction):
        note_unknown_names(strategy.print, data, read, streaming)
        return samples, None, ledger
    evaluated = (data.eval_dataset, data.eval_split, "--eval_dataset") if data.eval_dataset else trained
    with files_in_errors(data, seed, *evaluated):
        part = part_of(data, seed, is_evaluation=True)
        eval_samples, eval_ledger = rank_0_first(lambda: load(*evaluated, part), in_caches=True)
        if data.eval_fraction:
            taken, num_rows = eval_ledger["num_rows"], eval_ledger["num_rows"] + ledger["num_rows"]
            how = f"--eval_fraction {data.eval_fraction:g}, seed {seed}"
            strategy.print(f"evaluation: {taken:,} of {num_rows:,} rows ({how})")
        report(setup, eval_samples, eval_ledger, "evaluation data", data, seed, *evaluated)
    note_unknown_names(strategy.print, data, [*read, (eval_ledger, *evaluated)], streaming)
    return samples, eval_samples, ledger


def report(
    setup: Setup, samples, ledger, name: str, data: DataArguments, seed: int, names: str, split: str, flag: str
) -> None:
    """Print the ledger of a set, with the files of the rows that it names. Check its ids and lengths against the model; a stream checks each row as it is read."""
    bounds = bounds_of(setup.folder, setup.trust_remote_code)
    if isinstance(samples, SampleStream):
        samples.bounds = bounds
    else:
        ledger.lines += check_bounds(samples, setup.tokenizer, flag, bounds)
    setup.strategy.print(with_files(ledger.report(name), data, seed, names, split, flag))


def note_unknown_names(say: Callable, data: DataArguments, read: list[tuple], streaming: bool = False) -> None:
    """Warn of a name of --ignore_columns that no column and no key of a message had.

    `read` has (ledger, names, split, flag) of each set. With `streaming`, the first rows of --dataset are known.
    """
    if any(ledger.left_out is None for ledger, *_ in read):
        return  # rows of prepare_data: it has warned
    given, known = [data.ignore_columns], set()
    for ledger, names, _, flag in read:
        own = own_flags_of(data, names, flag)
        given += [flags.get("ignore_columns") for flags in own]
        known |= ledger.left_out
    unknown = {name for text in given for name in names_in(text)} - known
    for _, names, split, flag in read if unknown else ():
        if not streaming or flag == "--eval_dataset":
            unknown -= columns_of_sets(names, flag, split, own_flags_of(data, names, flag))
    if unknown:
        nowhere = f"no column and no key of a message has this name{' in the first rows' * streaming}"
        say(f"WARNING: --ignore_columns {', '.join(sorted(unknown))}: {nowhere}, so nothing is left out")


def shortened(text: str) -> str:
    """The text, without its middle if it is longer than SHOWN characters."""
    left_out = len(text) - SHOWN
    if left_out <= 0:
        return text
    return f"{text[: SHOWN // 2]}\n... {counted(left_out, 'character')} ...\n{text[-SHOWN // 2 :]}"


def note_small_data(strategy, flag: str, size: int, samples, unit: str) -> None:
    """Say so if a batch of `size` takes more than there is. A stream has no length."""
    if hasattr(samples, "__len__") and len(samples) < size:
        strategy.print(f"{flag} {size} is larger than the data: each pass has one batch of {len(samples)} {unit}")


def note_long_samples(strategy, max_tokens: int | None, samples) -> None:
    """Say so if samples have more tokens than --max_tokens_per_micro_batch. A stream has no columns."""
    if not max_tokens or not hasattr(samples, "__len__"):
        return
    if count := int((column_of(samples, "num_tokens") > max_tokens).sum()):
        longer = in_words("{n:sample has|samples have} more tokens, and each is a micro-batch of its own", n=count)
        strategy.print(f"--max_tokens_per_micro_batch {max_tokens}: {longer}")


def build_loader(
    batch: BatchArguments,
    setup: Setup,
    samples,
    collate: Callable,
    *,
    shuffle: bool,
    sequences_per_sample: int = 1,
    **options,
):
    """Build the strategy's loader from the flags under "Batches". `options` go to `setup_dataloader` too.

    `sequences_per_sample` is 2 for pairs.
    """
    capacity = batch.max_tokens_per_micro_batch or batch.micro_train_batch_size * setup.longest * sequences_per_sample
    return setup.strategy.setup_dataloader(
        samples,
        functools.partial(collate, pad_token_id=setup.tokenizer.pad_token_id),
        batch_size=batch.train_batch_size,
        micro_batch_size=batch.micro_train_batch_size,
        max_tokens=batch.max_tokens_per_micro_batch,
        packed_capacity=capacity if batch.packing_samples else None,
        shuffle=shuffle,
        **options,
    )


def tokenize_function_of(args, rows, tokenize: Callable) -> Callable:
    """`tokenize`, or its form for rows with images and the model of --pretrain. See `tokenize_with_images`."""
    if not has_images(rows):
        return tokenize
    flags = flat(args)  # commands that refuse images have no flags for them
    return functools.partial(
        tokenize_with_images,
        tokenize=tokenize,
        folder=resolve_model_folder(args.model.pretrain),
        remote_code=args.model.trust_remote_code,
        own_template=bool(args.data.tokenizer_chat_template),
        pixels=PixelLimits(flags.get("image_min_pixels"), flags.get("image_max_pixels")),
    )
