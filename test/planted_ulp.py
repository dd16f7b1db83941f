"""Runs of --exact with a fault: on rank 1, one element of one gradient of one sample is off by one ulp.

`python test/planted_ulp.py FILE NAME`: FILE is that of many_runs.py, and NAME the parameter.
"""

import os
import sys

import torch

from trainer.compare.runs.many_runs import main
from trainer.exact.exact_gradients import ExactGradients


def plant(parameter: str) -> None:
    """Change what autograd returns for the first sample of this rank."""
    add, grad, left = ExactGradients.add, torch.autograd.grad, [1]

    def faulty(self, loss_sum, leaves, num_targets):
        def changed(*args, **options):
            found = grad(*args, **options)
            values = found[list(leaves).index(parameter)].view(-1)
            values[5] = torch.nextafter(values[5], torch.tensor(torch.inf))
            return found

        torch.autograd.grad = changed if left and left.pop() else grad
        add(self, loss_sum, leaves, num_targets)
        torch.autograd.grad = grad

    ExactGradients.add = faulty


if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        plant(sys.argv[2])
    main(sys.argv[1:2])
