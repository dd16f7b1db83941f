"""Two nodes of two ranks prepare data; each node has caches of its own, or both share one. Argument: an empty folder.

With one torchrun of 4 ranks, the nodes are pretended.
"""

import os
import sys
import time
from pathlib import Path

import datasets
import torch.distributed as dist

from trainer.datasets.library import map_cached
from trainer.distributed.collectives import gather_objects, rank_0_first
from trainer.entry import end_well

ROWS = 5
folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
if os.environ["LOCAL_WORLD_SIZE"] == "4":
    os.environ |= {"LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2"}
dist.init_process_group("gloo")
rows, features = datasets.Dataset.from_dict({"x": list(range(ROWS))}), datasets.Features(y=datasets.Value("int64"))
for kind, expected in (("own", [ROWS, 0, ROWS, 0]), ("shared", [ROWS, 0, 0, 0])):
    datasets.config.HF_DATASETS_CACHE = str(folder / (f"node-{rank // 2}" if kind == "own" else "shared"))
    tokenized = []

    def tokenize(row: dict, index: int, kind=kind, tokenized=tokenized) -> dict:
        tokenized.append(index)
        (folder / f"{kind}-{rank}").touch()
        deadline = time.monotonic() + 60
        while kind == "own" and not (folder / f"own-{2 - rank}").exists():  # both nodes work at the same time
            assert time.monotonic() < deadline, "one node waits for the other"
            time.sleep(0.01)
        return {"y": row["x"]}

    made = rank_0_first(lambda: map_cached(rows, tokenize, folder="f", key=[], features=features), in_caches=True)
    assert made["y"] == list(range(ROWS))
    assert gather_objects(len(tokenized)) == expected, (kind, gather_objects(len(tokenized)))
    files = [file.name for file in Path(datasets.config.HF_DATASETS_CACHE).iterdir()]
    assert files == ["f"], files
if rank == 0:
    print("each node prepared its rows", flush=True)
end_well()
