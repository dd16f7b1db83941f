"""Checkpoints that a stranger made: every hash fits, and the contents are not those of a run. One line, nothing outside."""

import json
import math
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save

from trainer.checkpoints import checkpoint_store as store
from trainer.checkpoints import run_state
from trainer.checkpoints.piece_index import INDEX, Piece, PieceIndex
from trainer.checkpoints.shards import whole_shard, write_shards
from trainer.errors import UserError
from trainer.training.checkpointing import of_its_state, progress_of, rows_of

GOOD = {"step": 2, "tokens_seen": 7, "best_metric": None}
STATE = {"format": 1, "world_size": 1, "optim": "adamw", "others": {}, "progress": GOOD, "scheduler_step": 2}
KEY = "weight/w"


@pytest.fixture
def folder(tmp_path):
    """A checkpoint of one tensor, before its manifest."""
    made = tmp_path / "step_2.tmp"
    made.mkdir()
    _, pieces = write_shards([whole_shard(KEY, torch.arange(6.0).reshape(2, 3), True)], str(made), "pieces-00000")
    PieceIndex.of_pieces(pieces).write(str(made))
    (made / "state.json").write_text(json.dumps(STATE))
    (made / "random-00000.json").write_text(json.dumps(run_state.random_states(torch.device("cpu"))))
    return made


def sealed(folder, **named: dict) -> str:
    """The checkpoint with its manifest, in which further `named` files are."""
    done = folder.with_suffix("")
    store.commit(str(folder), str(done), named)
    return str(done)


def load(path: str) -> torch.Tensor:
    shard = whole_shard(KEY, torch.zeros(2, 3), True)
    run_state.read_intact_state(path)
    run_state.load(path, [shard], torch.device("cpu"), "adamw")
    return shard.tensor


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 1)


def test_a_good_checkpoint_is_read(folder):
    assert torch.equal(load(sealed(folder)), torch.arange(6.0).reshape(2, 3))


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "hf/../../outside", ".", "./state.json", ""])
def test_names_of_a_manifest_stay_in_its_folder(folder, name):
    path = sealed(folder, **{name: {"size": 0, "blake2b": "0"}})
    with pytest.raises(store.DamagedFile, match="is damaged"):
        store.read_manifest(path)
    with pytest.raises(UserError, match="damaged"):
        load(path)


@pytest.mark.parametrize("entry", [{}, {"size": "0", "blake2b": "0"}, {"size": 0, "blake2b": None}, [], None])
def test_entries_of_a_manifest_are_sizes_and_hashes(folder, entry):
    with pytest.raises(store.DamagedFile):
        store.read_manifest(sealed(folder, extra=entry))


def test_a_pipe_or_a_device_is_no_file_of_a_checkpoint(folder):
    path = sealed(folder)
    for target in ("/dev/zero", None):
        os.remove(f"{path}/state.json")
        os.symlink(target, f"{path}/state.json") if target else os.mkfifo(f"{path}/state.json")
        with pytest.raises(UserError, match="is no regular file"):
            load(path)


def index_with(folder, **values) -> None:
    piece = Piece(KEY, (2, 3), "pieces-00000-00000.safetensors", (0, 0), (2, 3), None, 6)
    PieceIndex.of_pieces([piece._replace(**values)]).write(str(folder))


@pytest.mark.parametrize(
    "values",
    [
        {"file": "../step_2/pieces-00000-00000.safetensors"},
        {"file": "/etc/hostname"},
        {"file": "state.json"},
        {"file": "none.safetensors"},
        {"box": (2, 4)},
        {"offset": (1, 0)},
        {"offset": (-1, 0)},
        {"box": (2, 2), "length": 6},
        {"box": (1, 3), "length": 3},
        {"start": 0, "length": 60},
        {"start": 3, "length": 6},
        {"shape": (3, 2), "box": (3, 2)},
        {"key": "weight/other"},
    ],
)
def test_an_index_that_does_not_fit_is_one_line(folder, values):
    index_with(folder, **values)
    with pytest.raises(UserError) as error:
        load(sealed(folder))
    assert "\n" not in str(error.value) and "--load_checkpoint" in str(error.value)


@pytest.mark.parametrize("fault", ["no rows", "text", "other file", "number of a file", "first rows"])
def test_an_index_of_another_form_is_one_line(folder, fault):
    path = folder / INDEX
    with safe_open(path, "pt") as index:
        facts, rows, firsts = index.metadata(), index.get_tensor("rows"), index.get_tensor("firsts")
    tensors = {"rows": rows, "firsts": firsts}
    if fault == "no rows":
        del tensors["rows"]
    elif fault == "other file":
        facts["files"] = json.dumps({"a": 1})
    elif fault == "number of a file":
        rows[:, 0] = 9
    elif fault == "first rows":
        tensors["firsts"] = firsts[:1]
    path.write_bytes(b"text" if fault == "text" else save(tensors, facts))
    with pytest.raises(UserError) as error:
        load(sealed(folder))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("state", [[], {"format": 2}, {"format": 1}, {"format": "\x1b[2J\n"}, 3])
def test_a_state_of_another_form_is_one_line(folder, state):
    (folder / "state.json").write_text(json.dumps(state))
    path = sealed(folder)
    with pytest.raises(UserError) as error, of_its_state(path):
        progress_of(run_state.load(path, [], torch.device("cpu"), "adamw"))
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    "values",
    [
        {"other": 1},
        {"step": "2"},
        {"step": -1},
        {"step": None},
        {"step": True},
        {"step": math.nan},
        {"best_metric": "x"},
        {"wandb_run_id": 3},
        {"skipped_steps": [1]},
    ],
)
def test_progress_of_another_form_is_one_line(values):
    with pytest.raises(UserError, match="values that no run writes: TypeError"), of_its_state("step_2"):
        progress_of({"progress": GOOD | values})


@pytest.mark.parametrize("rows", [["{}"], ["no row\n"], ["[1]\n"], [1], {"a": 1}, 5, ["{}\n{}\n"]])
def test_rows_that_waited_are_rows(rows):
    with pytest.raises(UserError, match="no run writes"), of_its_state("step_2"):
        rows_of({"waiting_rows": rows})
    assert rows_of({"waiting_rows": ['{"step": 1}\n']}) and rows_of({}) == []
