"""Run by torchrun on 2 ranks: rank 0 works for longer than the group of training may wait."""

import datetime
import time

import torch
import torch.distributed as dist

from trainer.cli.entry import end_well
from trainer.distributed import collectives

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
if is_first:
    time.sleep(5)
try:
    dist.all_reduce(torch.ones(1))
except RuntimeError:
    print("training does not wait so long", flush=True)
end_well()
