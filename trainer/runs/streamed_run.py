"""The data of `train_sft --streaming`: what it refuses, the stream, and its loader."""

from trainer.datasets.files.stream_rows import open_rows
from trainer.datasets.samples.ledger import Ledger
from trainer.datasets.samples.streaming import SampleStream, StreamedBatches
from trainer.errors import UserError
from trainer.runs import run_training


def check_flags(args) -> None:
    """Raise UserError for flags that do not go together with --streaming."""
    if not args.max_steps:
        raise UserError("--max_steps", "missing with --streaming, whose length nobody knows", "a number of steps")
    if args.dataset_num_proc > 1:
        found = f"{args.dataset_num_proc} with --streaming, which tokenizes in the ranks"
        raise UserError("--dataset_num_proc", found, "leave it out")
    if args.vision_learning_rate or not args.freeze_vision:
        raise UserError("--streaming", "with flags of images", "rows of text, or a run without --streaming")


def open_stream(args, tokenizer) -> tuple[SampleStream, Ledger]:
    """Return (stream, ledger) of --dataset. The ledger counts while the run reads."""
    check_flags(args)
    flag = "--dataset"
    rows, digest = open_rows(
        args.dataset,
        flag=flag,
        split=args.dataset_split,
        probs=args.dataset_probs,
        max_samples=args.max_samples,
        seed=args.seed,
    )
    stream = SampleStream(
        rows,
        tokenizer,
        flag=flag,
        digest=digest,
        buffer=args.streaming_buffer,
        seed=args.seed,
        shuffle=not args.no_shuffle,
        input_key=args.input_key,
        output_key=args.output_key,
        input_template=args.input_template,
        apply_chat_template=args.apply_chat_template,
        multiturn=args.multiturn,
        pretrain_mode=args.pretrain_mode,
        max_len=args.max_len,
    )
    return stream, stream.ledger


def build_loader(args, setup, stream: SampleStream, collate, **_shuffle) -> StreamedBatches:
    """The loader of a stream, called like `run_training.build_loader`. The stream itself shuffles."""

    def build(samples):
        return run_training.build_loader(args, setup, samples, collate, shuffle=False)

    return StreamedBatches(stream, build, args.train_batch_size)
