"""Tensors in host memory, once for all ranks of a machine.

The first rank of a machine writes them to memory without a name (memfd), and every rank maps it. The kernel frees it with the
last mapping, also after a kill. /dev/shm would not do: in containers it is often 64 MB.
"""

import os
from collections.abc import Iterable

import torch
import torch.distributed as dist

from trainer.distributed.collectives import gather_objects, local_rank

ALIGNMENT = 64  # bytes; views of other dtypes must begin at a multiple of their size


def node_copy(tensors: Iterable[tuple[str, torch.Tensor]], needed: bool) -> dict[str, torch.Tensor]:
    """Copies of (name, tensor) pairs on the CPU, to read only (collective over the world; every rank has the same pairs).

    The ranks of a machine share them. Empty where not `needed`. A machine where no rank needs them has none.
    """
    rank, here = dist.get_rank(), local_rank()
    first, size = rank - here, int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    of_node = gather_objects(needed)[first : first + size]
    writes = here == 0 and any(of_node)
    file = os.fdopen(os.memfd_create("weights"), "wb") if writes else None
    places, end = [], 0
    for name, tensor in tensors:
        places.append((name, tensor.dtype, tensor.shape, end, tensor.nbytes))
        if file:
            file.seek(end)
            file.write(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy())
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    if file:
        file.truncate(end)
        file.flush()
    path = gather_objects(f"/proc/{os.getpid()}/fd/{file.fileno()}" if file else "")[first]
    found = {}
    if needed and end:
        every = torch.from_file(path, shared=False, size=end, dtype=torch.uint8)
        for name, dtype, shape, start, num_bytes in places:
            found[name] = every[start : start + num_bytes].view(dtype).view(shape)
    gather_objects(None)  # all ranks have mapped it
    if file:
        file.close()
    return found
