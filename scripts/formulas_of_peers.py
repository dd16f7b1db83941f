"""The formulas of RL against the functions of peers: python scripts/formulas_of_peers.py verl=CHECKOUT trl=CHECKOUT ...

Each formula runs on 200 random and extreme inputs, in fp64. The table has the largest difference of values and of gradients,
as a share of the largest value. No peer is installed: the script takes the files of its checkout that hold the formulas, and
puts empty modules in place of its frameworks. A peer that needs other conventions says so in its file of `formulas/`.
"""

import argparse
import os
import sys
from multiprocessing import get_context

import torch
from formulas import areal, authors, nemo_rl, prime_rl, skyrl, slime, swift, trl, verl
from formulas.rollouts import INPUTS, LIMIT, measure

PEERS = {
    "verl": (verl.load, verl.ROWS),
    "nemo_rl": (nemo_rl.load, nemo_rl.ROWS),
    "skyrl": (skyrl.load, skyrl.ROWS),
    "slime": (slime.load, slime.ROWS),
    "trl": (trl.load, trl.ROWS),
    "swift": (swift.load, swift.ROWS),
    "prime_rl": (prime_rl.load, prime_rl.ROWS),
    "areal": (areal.load, areal.ROWS),
    "stable_rl": (authors.load, authors.STABLE_RL),
    "entropy_mechanism": (authors.load, authors.ENTROPY_MECHANISM),
    "skywork_or1": (authors.load, authors.SKYWORK_OR1),
    "maxrl": (authors.load, authors.MAXRL),
}


def differences(peer: str, checkout: str) -> dict[str, float]:
    """{formula: the largest difference from the peer}, in a process of its own."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # some compile their functions
    torch.set_default_dtype(torch.float64)  # of the peer's own constants
    return measure(*PEERS[peer], checkout)


def table(of_peers: dict[str, dict[str, float]]) -> list[str]:
    """A row for each formula, with the peers that have it and the difference from each."""
    formulas = dict.fromkeys(formula for found in of_peers.values() for formula in found)
    lines = ["| Formula | Largest difference from each peer |", "|---|---|"]
    for formula in formulas:
        cells = [f"{peer} {found[formula]:.0e}" for peer, found in of_peers.items() if formula in found]
        lines.append(f"| {formula} | {', '.join(cells)} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="+", metavar="PEER=CHECKOUT", help=f"PEER is one of {', '.join(PEERS)}")
    pairs = [pair.split("=", 1) for pair in parser.parse_args().checkouts]
    if unknown := [pair[0] for pair in pairs if len(pair) != 2 or pair[0] not in PEERS]:
        parser.error(f"{unknown[0]}: no such peer (allowed: {', '.join(PEERS)}, each with =CHECKOUT)")
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:  # forks of verl have its name: a process for each
        found = dict(zip(dict(pairs), pool.starmap(differences, pairs, chunksize=1)))
    worst = max(value for of_peer in found.values() for value in of_peer.values())
    print("\n".join(table(found)))
    print(f"\nThe largest difference on {INPUTS} inputs is {worst:.0e}, at most {LIMIT:g} is allowed.")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
