"""Measure the start of train_sft on millions of prepared rows: the loader, seconds to the third step, and memory.

    python scripts/bench/many_rows.py [--rows 10000 1000000 10000000] [--ranks 2]

Rows are synthetic tokens in the form that prepare_data writes. A start of the smallest set is mostly imports. The second
start of each set finds the facts that the first one kept. "Own" memory is that of a rank without the pages of files.
"""

import argparse
import contextlib
import hashlib
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from datasets import Dataset, concatenate_datasets, load_from_disk
from sft_speed import environment, machine, timed
from transformers import AutoTokenizer

from trainer.datasets.batches.global_batches import GlobalBatchLoader, epoch_order
from trainer.datasets.samples.prepared import OPTIONS, write_prepared
from trainer.datasets.samples.sft_samples import sft_features

LENGTH, CHUNK = 6, 1_000_000


class Start(NamedTuple):
    """One start of train_sft. `processor`: seconds of a processor for each rank."""

    seconds: float
    processor: float
    own_bytes: int


def synthetic(first: int, count: int) -> Dataset:
    """`count` rows of LENGTH tokens with their digests, made as columns."""
    numbers = np.arange(first, first + count)
    ids = ((numbers[:, None] * 31 + np.arange(LENGTH) * 7) % 200).astype(np.int32)
    offsets = pa.array(np.arange(count + 1, dtype=np.int32) * LENGTH)
    mask = np.ones((count, LENGTH), np.int8)
    mask[:, 0] = 0
    columns = {
        "input_ids": pa.ListArray.from_arrays(offsets, pa.array(ids.ravel())),
        "loss_mask": pa.ListArray.from_arrays(offsets, pa.array(mask.ravel())),
        "num_tokens": pa.array(np.full(count, LENGTH)),
        "num_loss_tokens": pa.array(np.full(count, LENGTH - 1)),
        "digest": pa.array([f"{number:016x}" for number in numbers.tolist()]),
        "row": pa.array(numbers),
    }
    features = sft_features()
    for name in set(features) - set(columns):
        columns[name] = pa.array(np.zeros(count, np.int64))
    table = pa.table({name: columns[name] for name in features})
    return Dataset(table.cast(features.arrow_schema))


def prepare(folder: Path, num_rows: int, demo: Path) -> None:
    parts = [synthetic(first, min(CHUNK, num_rows - first)) for first in range(0, num_rows, CHUNK)]
    options = dict.fromkeys(OPTIONS) | {"max_len": 128, "train_on": "last", "pretrain_mode": False}
    options |= {"apply_chat_template": False}
    tokenizer = AutoTokenizer.from_pretrained(demo / "model")
    write_prepared(concatenate_datasets(parts), tokenizer, options, {}, str(folder), num_proc=2)


def started(folder: Path, demo: Path, ranks: int) -> Start:
    """Run train_sft for three steps."""
    run = folder.with_name("run")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    command += ["-m", "trainer.cli.train_sft", "--pretrain", str(demo / "model"), "--dataset", str(folder)]
    command += ["--max_len", "128", "--train_batch_size", "8", "--micro_train_batch_size", "4", "--max_steps", "3"]
    command += ["--no_save", "--output_dir", str(run), "--overwrite"]
    with open(folder.with_name("log"), "w+") as log:
        begun, before = time.time(), resource.getrusage(resource.RUSAGE_CHILDREN)
        process = subprocess.Popen(command, env=environment(1), stdout=log, stderr=log)
        peaks: dict[int, int] = {}
        while process.poll() is None:
            for pid, size in own_memory(process.pid):
                peaks[pid] = max(size, peaks.get(pid, 0))
            time.sleep(0.05)
        log.seek(0)
        if process.returncode:
            raise SystemExit(log.read()[-4000:])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Start(time.time() - begun, processor / ranks, max(peaks.values()))


def own_memory(parent: int) -> list[tuple[int, int]]:
    """(pid, bytes that are no file's) of the ranks that torchrun with the pid `parent` has started."""
    found = []
    for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        with contextlib.suppress(OSError, StopIteration):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            found.append((int(pid), 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])))
    return found


def loaded(folder: Path) -> tuple[float, float]:
    """(seconds, bytes per row) of a loader. Its first batch is hashed again, row by row."""
    rows = load_from_disk(str(folder))["train"]
    begun = time.perf_counter()
    loader = GlobalBatchLoader(rows, collate=len, batch_size=8, micro_batch_size=4, seed=1, shuffle=True)
    seconds = time.perf_counter() - begun
    order = epoch_order(len(rows), 1, 0, True)
    batch = loader.global_batch(order[:8].tolist(), 0)
    digests = "".join(rows[int(number)]["digest"] for number in order[:8])
    assert batch.batch_hash == hashlib.blake2b(digests.encode(), digest_size=8).hexdigest()
    held = (loader._num_tokens, loader._num_targets, loader._digests, order)
    return seconds, sum(array.nbytes for array in held) / len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 1_000_000, 10_000_000])
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    print(f"`python scripts/bench/many_rows.py`, {args.ranks} ranks: {machine()}.\n")
    print(
        "| rows | loader, s | loader, bytes a row | first start, s | second start, s | processor s a rank | own MiB |"
    )
    print("|---:|---:|---:|---:|---:|---:|---:|", flush=True)
    with tempfile.TemporaryDirectory() as name:
        demo = Path(name) / "demo"
        timed([sys.executable, "-m", "trainer.cli.make_demo", "--output_dir", str(demo)], 1)
        for num_rows in args.rows:
            folder = Path(name) / f"tokens-{num_rows}"
            prepare(folder, num_rows, demo)
            loader = loaded(folder)
            first, second = (started(folder, demo, args.ranks) for _ in range(2))
            found = f"{loader[0]:.2f} | {loader[1]:.0f} | {first.seconds:.1f} | {second.seconds:.1f}"
            print(f"| {num_rows:,} | {found} | {second.processor:.1f} | {second.own_bytes / 2**20:.0f} |", flush=True)


if __name__ == "__main__":
    main()
