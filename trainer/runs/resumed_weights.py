"""A resume does not read the weights of the model folders: a checkpoint replaces all of them."""

import contextlib
import os
from collections.abc import Iterator

from trainer.checkpoints.checkpoint_store import checkpoints_to_load
from trainer.distributed.collectives import broadcast_object
from trainer.model_folders import model_folder
from trainer.training.checkpointing import FOLDER


@contextlib.contextmanager
def left_to_checkpoint(args) -> Iterator[None]:
    """Inside, no weights are read if there is a checkpoint to load (broadcast)."""
    folder = os.path.join(args.output_dir or "", FOLDER)
    model_folder.left_out = broadcast_object(bool(checkpoints_to_load(folder, args.load_checkpoint)))
    try:
        yield
    finally:
        model_folder.left_out = False
