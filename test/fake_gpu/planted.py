"""Faults that cells must see: `run_cells.py --plant NAME` has one of them on each rank of the fake GPU, and none on the CPU."""

import torch

from trainer.models.losses import distances, policy_loss
from trainer.training import loop

FACTOR = 1.01


def policy():
    """A wrong factor of the policy loss."""
    right = policy_loss.POLICY_LOSSES["ppo"]

    def wrong(tokens, options):
        values, *more = right(tokens, options)
        return values * FACTOR, *more

    policy_loss.POLICY_LOSSES["ppo"] = wrong


def distance():
    """A wrong factor of a teacher's distance."""
    right = distances.DISTANCES["kl"]
    distances.DISTANCES["kl"] = lambda *args: right(*args) * FACTOR


def wait():
    """One more wait in each step."""
    right = loop.step_row

    def wrong(*args):
        torch.ones(1, device="cuda").item()
        return right(*args)

    loop.step_row = wrong


def full():
    """Linear layers that multiply in fp32."""

    def wrong(layer, inputs):
        return torch.nn.functional.linear(inputs.float(), layer.weight.float()).to(inputs.dtype)

    torch.nn.Linear.forward = wrong


FAULTS = {"policy": policy, "distance": distance, "wait": wait, "full": full}
