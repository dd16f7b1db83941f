"""Run by torchrun on 2 ranks: rank 0 works for longer than the group of training may wait. Argument: an empty folder."""

import datetime
import os
import sys
import time

import torch
import torch.distributed as dist

from trainer.checkpoints import checkpoint_store, run_state
from trainer.checkpoints.shards import whole_shard
from trainer.distributed import collectives
from trainer.entry import end_well

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=3))
collectives.make_patient_group(dist.group.WORLD)
is_first = dist.get_rank() == 0
for communicate in (
    lambda: collectives.broadcast_object("hash" if is_first else None),
    lambda: collectives.gather_objects("hash")[0],
    lambda: collectives.rank_0_first(lambda: "hash"),
):
    if is_first:
        time.sleep(5)  # hashes a checkpoint, say
    assert communicate() == "hash"


def export(folder: str) -> None:
    os.makedirs(folder, exist_ok=True)
    if is_first:
        time.sleep(5)  # writes the Hugging Face part


flush = checkpoint_store.flush_folder
checkpoint_store.flush_folder = lambda folder: time.sleep(2) or flush(folder)  # a slow disk: rank 0 commits for 4 s
shards = [whole_shard("weight/x", torch.arange(4.0), is_first)]
folder, device, form = os.path.join(sys.argv[1], "step_1"), torch.device("cpu"), run_state.CheckpointForm()
states = {run_state.MAIN: {"scheduler_step": 1}}
assert run_state.save(folder, shards, {"k": 1}, states, device, form, export).finish() == folder
shards[0].tensor.zero_()
assert run_state.load(folder, shards, device, "adamw")["k"] == 1
assert shards[0].tensor.tolist() == [0, 1, 2, 3]
if is_first:
    print("the checkpoint is whole", flush=True)
    time.sleep(5)
try:
    dist.all_reduce(torch.ones(1))
except RuntimeError:
    print("training does not wait so long", flush=True)
end_well()
