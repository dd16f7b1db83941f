"""Weights for rollout servers: what comes is what was sent, and a receiver that dies leaves the rest to the sender."""

import multiprocessing
import time
from pathlib import Path

import pytest
import torch
from weight_receiver import receive

from trainer.rollout.engines import weight_stream
from trainer.rollout.engines.weight_stream import Update, WeightStream

COUNT, SIZE = 12, 400_000
OTHERS = [("int", torch.arange(7)), ("bf16", torch.randn(3, 5).bfloat16()), ("empty", torch.zeros(0, 4))]


def tensors():
    yield from (Update(*other) for other in OTHERS)
    for number in range(COUNT):
        yield Update(f"weight {number}", torch.full((SIZE,), float(number)))


def stream_to(dies_after: list[int], source) -> list:
    """Send `source` to a process for each entry, which dies after so many tensors. Returns what came."""
    context = multiprocessing.get_context("spawn")
    stream, answer = WeightStream("127.0.0.1", 0, 0, 1 + len(dies_after)), context.Queue()
    processes = [
        context.Process(
            target=receive, args=(stream.port, stream.token, rank, 1 + len(dies_after), most, answer), daemon=True
        )
        for rank, most in enumerate(dies_after, start=1)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 120

    def while_waiting() -> None:
        assert time.monotonic() < deadline

    try:
        stream.send(source, while_waiting)
        return [answer.get(timeout=60) for _ in range(len(dies_after) * (COUNT + len(OTHERS)))]
    finally:
        for process in processes:
            process.kill()
            process.join()


def test_two_receivers_get_every_tensor():
    came = stream_to([0, 0], tensors())
    sent = [(u.name, u.value.dtype, list(u.value.shape), u.value.double().sum().item()) for u in tensors()]
    for rank in (1, 2):
        assert [rest for of, *rest in came if of == rank] == [list(row) for row in sent]


def test_the_rest_of_the_weights_is_left_when_a_receiver_dies(monkeypatch):
    """Other ranks gather them too. So the sender has to go through all of them."""
    monkeypatch.setattr(weight_stream, "MESSAGE_BYTES", 4 * SIZE)  # a message for each weight
    source = tensors()
    with pytest.raises(ConnectionError):
        stream_to([6], source)
    left = [update.name for update in source]
    assert 0 < len(left) < COUNT and left[-1] == f"weight {COUNT - 1}"


def test_a_receiver_that_will_not_come_is_no_wait():
    def gone() -> None:
        raise ConnectionError("the server says no")

    with pytest.raises(ConnectionError, match="says no"):
        WeightStream("127.0.0.1", 0, 0, 2).send(tensors(), gone)


def test_a_stranger_registers_as_no_receiver_and_finds_no_open_port():
    stream, looks = WeightStream("127.0.0.1", 0, 0, 2), []
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    bound = [words[1] for words in lines if words[3] == "0A" and words[1].endswith(f":{stream.port:04X}")]
    assert bound == [f"0100007F:{stream.port:04X}"]  # 127.0.0.1
    for name in ("", "receiver 1"):
        stranger = WeightStream("127.0.0.1", stream.port, 1, 2, token="guessed")
        stranger._store.set("receiver 1", name)

    def while_waiting() -> None:
        looks.append(1)
        if len(looks) > 20:
            raise ConnectionError("nobody has come")

    with pytest.raises(ConnectionError, match="nobody has come"):
        stream.send(tensors(), while_waiting)
