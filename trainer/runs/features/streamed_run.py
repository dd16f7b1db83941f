"""`--streaming`: rows of --dataset are read while the run trains, and never copied."""

from trainer.datasets.files.stream_rows import open_rows, places_of
from trainer.datasets.samples.parts import Part
from trainer.datasets.samples.streaming import SampleStream, StreamedBatches
from trainer.runs.feature import Feature
from trainer.runs.run_data import sft_options, text_options


def read_stream(run) -> None:
    """Let --dataset be a stream, whose ledger counts while the run reads. --eval_dataset is read as a whole."""
    read_whole, build_whole, batch = run.load_data, run.build_loader, run.args.batch

    def load(names: str, split: str, flag: str, part: Part):
        if flag != "--dataset":
            return read_whole(names, split, flag, part)
        stream = open_stream(run.args, run.setup.tokenizer)
        return stream, stream.ledger

    def build_loader(stream: SampleStream, *, shuffle: bool) -> StreamedBatches:
        """The stream itself shuffles."""
        return StreamedBatches(stream, lambda samples: build_whole(samples, shuffle=False), batch.train_batch_size)

    run.load_data, run.build_loader = load, build_loader


def open_stream(args, tokenizer) -> SampleStream:
    """The stream of --dataset."""
    data, flag = args.data, "--dataset"
    kind = {"split": data.dataset_split, "probs": data.dataset_probs, "max_samples": data.max_samples}
    kind |= {"flag": flag, "seed": args.batch.seed}
    rows, digest = open_rows(data.dataset, **kind)

    def places(numbers: list[int]) -> list[str]:
        return places_of(open_rows(data.dataset, **kind, with_places=True)[0], numbers) if numbers else []

    options = text_options(data) | {"max_len": args.length.max_len, **sft_options(args.sft)}
    del options["num_proc"]  # the ranks tokenize a stream themselves
    options |= {"buffer": args.streaming.streaming_buffer, "seed": args.batch.seed}
    options |= {"shuffle": not args.batch.no_shuffle, "places": places}
    return SampleStream(rows, tokenizer, flag=flag, digest=digest, **options)


STREAMING = Feature("streaming", lambda run: run.flags.streaming, before_data=read_stream)
