"""Whether the nodes of a run share a folder. Without it, a run of many nodes would fail at its first checkpoint."""

import os
import socket

from trainer.distributed.collectives import gather_objects
from trainer.errors import UserError


def check_shared_folder(flag: str, folder: str, file: str) -> None:
    """Raise UserError on all ranks unless each of them sees `file`, which rank 0 has just written in `folder`.

    All ranks call this together.
    """
    sees = os.path.exists(os.path.join(folder, file))
    without = sorted({host for host, seen in gather_objects((socket.gethostname(), sees)) if not seen})
    if without:
        found = f"{folder} is not the same folder on all nodes: {', '.join(without)} cannot see what rank 0 wrote"
        raise UserError(flag, found, "a folder on a file system that all nodes share")
