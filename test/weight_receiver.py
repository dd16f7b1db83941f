"""A process that takes weights as a rollout server does; test_weight_stream.py starts it."""

import os

from trainer.rollout.engines.weight_stream import WeightStream


def receive(port: int, token: str, rank: int, size: int, dies_after: int, answer) -> None:
    """Put what comes into the queue `answer`. After `dies_after` tensors (0: never) the process dies."""
    stream = WeightStream("127.0.0.1", port, rank, size, token)
    for number, (name, tensor) in enumerate(stream.received(), start=1):
        if number == dies_after:
            os._exit(1)
        answer.put((rank, name, tensor.dtype, list(tensor.shape), tensor.double().sum().item()))
