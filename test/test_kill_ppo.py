"""SIGKILL of train_ppo in each phase, once, on either backend; `kill_ppo.py` does more of it."""

import pytest
from kill_ppo import assert_same_run, command_line, killed_run, kills_of, prepare
from launch import read_rows, train_many

# in this order, each of a run that goes on from where the one before died: some before the first checkpoint, some after
KILLS = {
    "fsdp2": [("generate", 2, 0), ("train", 0, 1), ("save", 0, "all")],
    "deepspeed": [("sync", 2, "all"), ("score", 1, 0)],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Undisturbed runs of both backends."""
    folder = tmp_path_factory.mktemp("kill_ppo")
    prepare(folder)
    lines = [["train_ppo", *command_line(folder, name, ["--backend", name])] for name in KILLS]
    train_many(2, lines, folder, timeout=600)
    return folder


@pytest.mark.parametrize("backend", KILLS)
def test_a_run_killed_in_any_phase_goes_on_to_the_bit(folder, backend):
    plans = [{"phase": p, "skip": skip, "victim": victim, "delay": 0.002} for p, skip, victim in KILLS[backend]]
    kills = killed_run(folder, f"{backend}-killed", ["--backend", backend], plans)
    assert [kill["phase"] for kill in kills] == [plan["phase"] for plan in plans], kills_of(folder)
    assert_same_run(folder, f"{backend}-killed", backend)
    assert any(row.get("event") == "resume" for row in read_rows(folder / f"{backend}-killed"))
    # what was drawn and scored before the last kill is not drawn and scored again
    assert (
        "were generated before the resume: they are trained as they are"
        in (folder / f"{backend}-killed.log").read_text()
    )
