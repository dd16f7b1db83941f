"""Measure whether training steps wait for images.

    python scripts/bench/image_loader.py

JPEGs of --size pixels are read, decoded and prepared for a tiny Qwen3-VL by the loader of train_sft, on one rank. First
the loader alone: images per second. Then with steps beside it that take --ratio times as long as a batch of images: how
long each step waits for its batch. The work of a step is products of matrices, on one core.
"""

import argparse
import functools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from PIL import Image
from transformers import AutoTokenizer

from trainer.cli import train_sft
from trainer.datasets.batches.global_batches import GlobalBatchLoader
from trainer.datasets.images.image_batches import ImageCollate
from trainer.runs.run_data import load_sft


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, nargs=2, default=[1024, 768])
    parser.add_argument("--num_images", type=int, default=96)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--ratio", type=float, nargs="+", default=[0.5, 1.5, 3.0])
    return parser.parse_args()


def write_rows(folder: Path, args: argparse.Namespace) -> str:
    generator = torch.Generator().manual_seed(0)
    rows = []
    for number in range(args.num_images):
        small = torch.randint(0, 256, (24, 32, 3), generator=generator, dtype=torch.uint8)
        Image.fromarray(small.numpy()).resize(args.size, Image.Resampling.BICUBIC).save(folder / f"{number}.jpg")
        talk = [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "A picture."}]
        rows.append({"messages": talk, "images": [f"{number}.jpg"]})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "rows.jsonl")


def make_model(folder: Path) -> str:
    """The vision demo's model, with an image processor of the size of Qwen3-VL's."""
    from trainer.datasets.demos.vision_demo import write_model

    write_model(folder / "model", 0)
    sizes = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2}
    sizes["size"] = {"shortest_edge": 65536, "longest_edge": 16777216}
    values = {"image_processor_type": "Qwen2VLImageProcessor", **sizes}
    (folder / "model" / "preprocessor_config.json").write_text(json.dumps(values))
    return str(folder / "model")


def work(seconds: float) -> None:
    """Products of matrices for some seconds."""
    ended, matrix = time.perf_counter() + seconds, torch.ones(256, 256)
    while time.perf_counter() < ended:
        matrix @ matrix


def waits(loader, seconds: float) -> list[float]:
    """How long each step of one epoch waits for its batch, if a step works for some seconds."""
    found, batches = [], iter(loader)
    for _ in range(len(loader)):
        started = time.perf_counter()
        next(batches)
        found.append(time.perf_counter() - started)
        work(seconds)
    list(batches)
    loader.load_state_dict({"epoch": 0, "next_index": 0})
    return found


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="image-loader-") as name:
        folder = Path(name)
        data, model = write_rows(folder, args), make_model(folder)
        flags, _ = train_sft.parse(["--pretrain", model, "--dataset", data, "--max_len", "4096"])
        tokenizer = AutoTokenizer.from_pretrained(model)
        samples, ledger = load_sft(flags, tokenizer, data, "train", "--dataset")
        collate = ImageCollate(samples.processor)
        from transformers import AutoModelForImageTextToText

        collate.use(AutoModelForImageTextToText.from_pretrained(model))
        collate = functools.partial(collate, pad_token_id=tokenizer.pad_token_id)
        loader = GlobalBatchLoader(samples, collate, batch_size=args.batch_size, micro_batch_size=args.batch_size)
        loader.num_workers = args.workers
        started = time.perf_counter()
        waits(loader, 0)
        alone = (time.perf_counter() - started) / len(loader)
        rate, tokens = args.batch_size / alone, ledger["num_image_tokens"] // ledger["num_images"]
        print(f"loader alone: {rate:.1f} images per second ({args.size[0]} x {args.size[1]}, {tokens} tokens each)")
        for ratio in args.ratio:
            found = waits(loader, ratio * alone)
            later = found[1:]
            print(
                f"steps of {ratio:g} times a batch ({1000 * ratio * alone:.0f} ms): the first waits "
                f"{1000 * found[0]:.0f} ms, then median {1000 * statistics.median(later):.1f} ms, "
                f"largest {1000 * max(later):.1f} ms"
            )


if __name__ == "__main__":
    sys.exit(main())
