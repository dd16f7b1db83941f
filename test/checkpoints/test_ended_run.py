"""A run that has ended is not trained again by --load_checkpoint, whatever steps its checkpoints have."""

import json
import sys

import pytest

from trainer.checkpoints.checkpoint_store import commit
from trainer.entry import run_command
from trainer.errors import NothingLeft, UserError
from trainer.flags.groups import flat, from_flat
from trainer.flags.rules import COMMANDS
from trainer.runs.flag_checks import check_files_of

STEPS = 125
END = {"event": "end", "steps": STEPS}


def arguments(folder, command: str = "train_sft", **flags):
    own = {"dataset": f"{folder}/data.jsonl", "pretrain": str(folder), "output_dir": f"{folder}/run"}
    return from_flat(COMMANDS[command], {**own, "load_checkpoint": "latest", **flags})


@pytest.fixture
def ended(tmp_path):
    """A run of one epoch that has ended with a model, and whose last checkpoint, if any, is of step 100."""
    (tmp_path / "run/model").mkdir(parents=True)
    (tmp_path / "data.jsonl").write_text("{}")
    write_rows(tmp_path, {"step": STEPS}, END)
    return tmp_path


def write_rows(folder, *rows) -> None:
    begin = {"event": "start", "config": flat(arguments(folder)), "total_steps": STEPS}
    (folder / "run/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (begin, *rows)))


def save(folder, step: int) -> None:
    temporary = folder / f"run/checkpoints/step_{step}.tmp"
    temporary.mkdir(parents=True)
    (temporary / "state.json").write_text("{}")
    commit(str(temporary), str(temporary).removesuffix(".tmp"), {})


def check(args) -> None:
    """The checks of files, without those of the model: they come later."""
    with pytest.raises(UserError, match=r"^--pretrain: "):
        check_files_of(args)


@pytest.mark.parametrize("saved", [(), (50, 100)])
@pytest.mark.parametrize("flags", [{}, {"max_steps": STEPS}, {"max_steps": 10, "max_epochs": 3}, {"logging_steps": 7}])
def test_the_same_run_has_nothing_left_to_do(ended, saved, flags):
    for step in saved:
        save(ended, step)
    with pytest.raises(
        NothingLeft, match=f"^nothing left to do: the run ended at step {STEPS}, and .*run/model is its"
    ):
        check_files_of(arguments(ended, **flags))


@pytest.mark.parametrize(
    "flags", [{"max_steps": 200}, {"max_epochs": 2}, {"early_stopping_patience": 3}, {"seed": 1}, {"dataset": "other"}]
)
def test_more_steps_or_another_run_are_refused_with_the_cure(ended, flags):
    for kept in ("without a checkpoint", "whose last checkpoint is of step 100"):
        with pytest.raises(UserError) as found:
            check_files_of(arguments(ended, **flags))
        assert f"ended at step {STEPS}, {kept}. With other --{next(iter(flags))}, it would" in str(found.value)
        assert str(found.value).endswith(f"Train on with --pretrain {ended}/run/model and another --output_dir.")
        save(ended, 100) if kept.startswith("without") else None


def test_other_names_of_the_same_files_are_the_same_run(ended, monkeypatch):
    monkeypatch.chdir(ended)
    (ended / "link.jsonl").symlink_to("data.jsonl")
    for name in ("data.jsonl", "./data.jsonl", "link.jsonl"):
        with pytest.raises(NothingLeft):
            check_files_of(arguments(ended, dataset=name, pretrain="."))
    with pytest.raises(UserError, match="With other --dataset"):
        check_files_of(arguments(ended, dataset="data.jsonl#5"))


def test_another_command_is_refused(ended):
    with pytest.raises(UserError, match="With other flags"):
        check_files_of(arguments(ended, "train_dpo"))


def test_what_has_not_ended_goes_on(ended):
    """Killed before the first save, killed after it, the model removed, the last step saved, a named checkpoint."""
    args, metrics = arguments(ended), ended / "run/metrics.jsonl"
    whole = metrics.read_text()
    write_rows(ended, {"step": 1}, {"step": 2})
    check(args)
    metrics.write_text(whole[:-5])
    check(args)
    metrics.write_text(whole + json.dumps({"event": "resume", "step": 0}) + "\n")
    check(args)
    metrics.write_text(whole)
    save(ended, 100)
    check(arguments(ended, load_checkpoint=f"{ended}/run/checkpoints/step_100"))
    check(arguments(ended, verify_resume=2))
    save(ended, STEPS)
    check(args)
    check(arguments(ended, max_steps=200))


def test_a_run_without_its_model_is_trained_again(ended):
    (ended / "run/model").rmdir()
    check(arguments(ended))
    check(arguments(ended, no_save=True))


def test_nothing_left_is_one_line_and_exit_code_0(monkeypatch, capsys):
    codes = []
    monkeypatch.setattr("trainer.entry.leave", codes.append)
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    monkeypatch.setattr("trainer.entry.atexit._run_exitfuncs", lambda: None)

    def main(_argv):
        raise NothingLeft("nothing left to do: x")

    run_command(main, [])
    assert codes == [0] and capsys.readouterr() == ("nothing left to do: x\n", "")
