"""The process groups of some layouts of 16 ranks, as rank 11 sees them, in a process group without communication.

Run by test_mesh_groups.py. Prints "ok" for each layout: each group has the right ranks, and no two have the same.
"""

import itertools

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainer.distributed.mesh import AXES, _build_meshes
from trainer.distributed.mesh_sizes import MeshSizes

LAYOUTS = [
    (1, 16, 1, 1),
    (1, 1, 1, 16),
    (2, 8, 1, 1),
    (1, 8, 2, 1),
    (4, 1, 4, 1),
    (1, 4, 1, 4),
    (16, 1, 1, 1),
    (2, 2, 2, 2),
]
RANKS = 16


def main() -> None:
    own = 11
    dist.init_process_group("fake", store=FakeStore(), rank=own, world_size=RANKS)
    for layout in LAYOUTS:
        place = dict(enumerate(itertools.product(*map(range, layout))))  # rank -> its place on each axis

        def beside(*axes, place=place):
            """The ranks that differ from this one in these axes only."""
            fixed = [number for number, axis in enumerate(AXES) if axis not in axes]
            return [rank for rank in place if all(place[rank][n] == place[own][n] for n in fixed)]

        meshes = _build_meshes(MeshSizes(*layout), "cpu", dist.group.WORLD)
        found = {axis: (meshes.root.get_group(axis), beside(axis)) for axis in AXES}
        found["dp"] = meshes.dp.get_group(), beside("dp_replicate", "dp_shard")
        found["loss"] = meshes.loss.get_group(), beside("dp_replicate", "dp_shard", "sp")
        found["fsdp"] = meshes.params.get_group("fsdp"), beside("dp_shard", "sp")
        found["replicas"] = meshes.params.get_group("dp_replicate"), beside("dp_replicate")
        found["tp of params"] = meshes.params.get_group("tp"), beside("tp")
        groups = {}
        for name, (group, expected) in found.items():
            assert dist.get_process_group_ranks(group) == expected, (layout, name)
            groups.setdefault(tuple(expected), set()).add(group.group_name)
        shared = {ranks: names for ranks, names in groups.items() if len(ranks) > 1}
        assert all(len(names) == 1 for names in shared.values()), (layout, shared)
        print("ok", layout, len(shared))


if __name__ == "__main__":
    main()
