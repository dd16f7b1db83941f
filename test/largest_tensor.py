"""Which tensors exist while a piece of code runs."""

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestTensor(TorchDispatchMode):
    """The most elements of a tensor that an operation returns. A sharded tensor counts by its local parts."""

    def __init__(self):
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        plain = [
            leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor)
        ]
        self.most = max([self.most, *(leaf.numel() for leaf in plain if leaf.dtype == torch.float32)])
        return result
