"""The table of names of other trainers. docs/coming_from.md is written from it."""

from trainer.flags.names.method_names import METHOD_NAMES
from trainer.flags.names.peer_row import PEERS, PeerName
from trainer.flags.names.training_names import TRAINING_NAMES

__all__ = ["PEERS", "ROWS", "PeerName"]
ROWS = (*TRAINING_NAMES, *METHOD_NAMES)
