"""What a row of the tables of names is, and the trainers whose names they have.

The names are from the arguments of TRL 1.16, transformers 5.19, LLaMA-Factory, axolotl, OpenRLHF (both generations), verl, ms-swift.
"Other names" are what people try first, whatever trainer they know.
docs/coming_from.md is written from this table.
"""

from typing import NamedTuple

PEERS = {
    "H": "HF Trainer",
    "T": "TRL",
    "L": "LLaMA-Factory",
    "A": "axolotl",
    "O": "OpenRLHF",
    "V": "verl",
    "S": "ms-swift",
    "X": "Other names",
}

SFT, RM, DPO, PPO, ONLINE = "train_sft", "train_rm", "train_dpo", "train_ppo", "train_dpo --online"
KD = "train_kd"
FIXED = (SFT, RM, DPO, KD)  # data that is there before the run
RL = (PPO, ONLINE)
ALL = (*FIXED, *RL)


LEAVE_OUT = "off is the default here; leave it out"


class PeerName(NamedTuple):
    """One row: the names (separated by spaces), letters of the trainers that use them, ours, and the conversion in words.

    `ours` is empty where nothing corresponds; then `words` say why. `commands` are those of ours that the row is about,
    and each of them has every flag that the row names. A name of verl is the end of a path: "optim.lr". A name may have a *.
    `off` is the answer to a switch that is false.
    """

    names: str
    peers: str
    ours: str
    words: str = ""
    commands: tuple[str, ...] = ALL
    off: str = LEAVE_OUT
