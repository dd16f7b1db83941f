"""Syncs that send only changed values: what a server then holds, how many bytes go to it, and wrong changes."""

import pytest
import torch
from fake_engine import FakeServer

from trainer.rollout.engines import weight_stream
from trainer.rollout.engines.on_vllm.vllm_server import VLLMServerEngine
from trainer.rollout.engines.weight_stream import Head, LastSync, Update, packed, unpacked

BLOCK = weight_stream.BLOCK


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"embed": (300, 500), "norm": (7,), "scale": (), "none": (0, 3)}
    found = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    return {**found, "steps": torch.arange(9)}


def nudge(tensor: torch.Tensor, places: list[int]) -> None:
    """Flip the last bit of some values."""
    tensor.view(-1).view(torch.int16)[places] ^= 1


def sent_through(messages, kept: dict) -> dict[str, torch.Tensor]:
    return {
        name: tensor.clone()
        for heads, message in messages
        for name, tensor in unpacked([Head(*head) for head in heads], message, kept)
    }


@pytest.mark.parametrize("most_bytes", [1, 200_000, 2**26])
def test_changes_of_any_place_give_the_new_tensors_bit_for_bit(most_bytes):
    tensors, last, kept = weights(), LastSync(), {}
    edges = [0, BLOCK // 2, BLOCK - 1, BLOCK, 2 * BLOCK - 1, 2 * BLOCK, 149_999]
    for places in (None, edges, [], [5], range(100_000)):
        if places is not None:
            nudge(tensors["embed"], list(places))
        expected = {name: tensor.clone() for name, tensor in tensors.items()}
        updates = [last.update(name, tensor) for name, tensor in tensors.items()]
        is_whole = updates[0].changed is None
        assert is_whole == (places is None or len(places) > 75_000)  # then positions cost more than they save
        assert is_whole or updates[0].changed.tolist() == list(places)
        found = sent_through(packed(updates, most_bytes), kept)
        assert list(found) == list(expected)
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_bits_count_and_not_values():
    last, zero = LastSync(), torch.zeros(1000)
    last.update("w", zero)
    zero[3], zero[5] = -0.0, float("nan")
    assert last.update("w", zero.clone()).changed.tolist() == [3, 5]
    assert last.update("w", zero.clone()).changed.tolist() == [], "nan is the nan of before"


def test_a_message_has_the_values_of_the_moment_at_which_they_were_given():
    shared = torch.zeros(4)

    def updates():  # a gathered tensor may be overwritten by the next one
        for number in range(3):
            yield Update(f"w{number}", shared.fill_(number))

    assert [tensor[0] for tensor in sent_through(packed(updates(), 2**20), {}).values()] == [0, 1, 2]


def engine_of(*servers: FakeServer, **options) -> VLLMServerEngine:
    urls = [server.url for server in servers]
    return VLLMServerEngine(urls, device=torch.device("cpu"), batch_size=4, max_len=64, **options)


def test_servers_get_changes_and_one_that_is_back_gets_all(world, capsys):
    servers = [FakeServer("bfloat16", workers=workers) for workers in (1, 2)]
    engine, tensors = engine_of(*servers, deltas=True), weights()
    whole = sum(tensor.nbytes for tensor in tensors.values())

    def sync() -> tuple[int, float]:
        checksum, num_bytes = engine.update_weights(tensors.items())
        held = {server.checksum for server in servers}
        assert num_bytes == whole and held <= {checksum, ""}
        return engine.sync_facts["sync_sent_bytes"], engine.sync_facts["sync_density"]

    first, density = sync()
    assert 2 * whole <= first < 2 * whole + 100 and density == 1
    nudge(tensors["embed"], range(0, 150_000, 100))
    sent, density = sync()
    assert sent < 0.05 * first and density == pytest.approx(0.01, rel=0.01)
    servers[1].die(0)  # it is back at once, without weights
    nudge(tensors["embed"], range(0, 150_000, 100))
    assert whole < sync()[0] < 1.05 * whole, "one gets changes and the other one all"
    assert sync()[0] < 1000, "nothing has changed"
    assert "lost" not in capsys.readouterr().out
    again = engine_of(*servers, deltas=True)  # the next run knows nothing of what servers hold
    again.update_weights(tensors.items())
    assert again.sync_facts["sync_sent_bytes"] == first
    plain = engine_of(*servers)
    for _ in range(2):
        plain.update_weights(tensors.items())
        assert plain.sync_facts == {"sync_sent_bytes": first}


@pytest.mark.parametrize("wrong", ["value", "place", "missing"])
def test_a_wrong_change_ends_the_run(world, monkeypatch, wrong):
    server, tensors = FakeServer("bfloat16"), weights()
    engine, values_of = engine_of(server, deltas=True), weight_stream._values_of

    def planted(update: Update) -> list[torch.Tensor]:
        counts, places, values = values_of(update)
        if wrong == "value":
            values = values.clone()
            nudge(values, [1])
        elif wrong == "place":
            places = places.roll(1)
        else:
            values = update.value.view(-1)[update.changed] * 0
        return [counts, places, values]

    engine.update_weights(tensors.items())
    nudge(tensors["embed"], [3, 70_000, 80_000])
    monkeypatch.setattr(weight_stream, "_values_of", lambda u: planted(u) if u.name == "embed" else values_of(u))
    with pytest.raises(RuntimeError, match="are not the weights that were sent"):
        engine.update_weights(tensors.items())
