"""A flag that is given more than once: small commands refuse it, and training says which value counts."""

import pytest
from test_name_answers import answer_of

from trainer.errors import UserError
from trainer.flags.names.repeats import ANNOUNCED, lines_of, repeated
from trainer.flags.names.sources import naming_sources


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("--dataset a --seed 1 --dataset b", {"dataset": ["a", "b"]}),
        ("--dataset=a --dataset b=c", {"dataset": ["a", "b=c"]}),
        ("--seed 1 --seed 1", {}),  # nothing is lost
        ("--bf16 --bf16 false", {"bf16": ["", "false"]}),
        ("--adam_betas 0.9 0.9 --adam_betas 0.9 0.95 RUN", {"adam_betas": ["0.9 0.9", "0.9 0.95 RUN"]}),
        ("--config a.yaml --config b.yaml --limits a=1 --limits b=2", {}),  # they add to each other
        ("RUN --key a -- --seed 1 --seed 2", {}),  # flags of another command
        ("RUN a b", {}),
    ],
)
def test_what_is_given_more_than_once(line, found):
    assert repeated(line.split()) == found


def test_training_says_which_value_counts(capsys, monkeypatch):
    ran = []
    act, line = (
        naming_sources(ran.append),
        ["--dataset", "a.jsonl", "--seed", "1", "--dataset", "b.jsonl", "--seed", "2"],
    )
    act(line)
    assert capsys.readouterr().out.splitlines() == [
        "WARNING: --dataset is given 2 times, and the last one counts: b.jsonl; all of them: --dataset a.jsonl,b.jsonl",
        "WARNING: --seed is given 2 times, and the last one counts: 2",
    ]
    monkeypatch.setenv("RANK", "1")
    act(line)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv(ANNOUNCED, "1")
    act(line)
    assert ran == [line] * 3 and capsys.readouterr().out == ""
    assert lines_of(["--packing_samples", "false", "--packing_samples"])[0].endswith("counts: on")


@pytest.mark.parametrize(
    "line",
    [
        "plan m --gpus 8 --gpus 16",
        "export a b --dtype bf16 --dtype fp32",
        "serve_rm --port 1 --port 2",
        "make_demo --output_dir a --output_dir b",
    ],
)
def test_a_small_command_refuses_it(line, capsys):
    name, first, second = line.split()[-2][2:], line.split()[-3], line.split()[-1]
    assert answer_of(capsys, *line.split()) == f"--{name}: given 2 times: {first}, {second} (allowed: one of them)"


def test_the_same_value_twice_is_one():
    from trainer.cli.plan import parse

    with pytest.raises(UserError, match="--gpus: given 2 times: 8, 9"):
        parse(["m", "--gpus", "8", "--gpus", "9"])
    assert parse(["m", "--gpus", "8", "--gpus", "8"])
