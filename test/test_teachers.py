"""Several teachers of train_ppo: which teacher a row has, what each counts at a token, and what records of a run say."""

from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset

from trainer.cli.train_ppo import parse
from trainer.comma_separated import named_in, named_models
from trainer.errors import UserError
from trainer.flags.policy_flags import KLArguments
from trainer.methods.roles import mean_of_teachers, reference_log_probs
from trainer.reports import certificate
from trainer.runs.features.certify import hash_models
from trainer.runs.flag_checks import models_of, named_sources
from trainer.runs.rl.rl_teachers import shares_of_rows, weigh_teachers, with_teachers

TWO = {"teacher": "math=m,code=c", "teacher_key": "info.domain"}
ROWS = Dataset.from_list([{"info": {"domain": name}} for name in ("math", "code", "chess", "code")])
KEPT = Dataset.from_dict({"row": [0, 1, 3]})


def test_a_column_names_the_teacher_of_a_row():
    flags = KLArguments(**TWO)
    prompts = with_teachers(KEPT, ROWS, flags, "--dataset")
    assert prompts["teacher"] == ["math", "code", "code"]
    assert shares_of_rows(flags, prompts) == {0: [1.0, 0.0], 1: [0.0, 1.0], 3: [0.0, 1.0]}


def test_a_row_without_a_teacher_is_refused_with_its_number():
    prompts = Dataset.from_dict({"row": [0, 2]})
    with pytest.raises(UserError) as found:
        with_teachers(prompts, ROWS, KLArguments(**TWO), "--dataset")
    expected = "--dataset row 3: info.domain: chess, no teacher of --teacher (allowed: math, code)"
    assert str(found.value) == expected
    gap = Dataset.from_list([{"info": {"domain": "math"}}, {"info": {"domain": None}}])
    with pytest.raises(UserError, match=r"--dataset row 2: info\.domain: None, no teacher"):
        with_teachers(Dataset.from_dict({"row": [0, 1]}), gap, KLArguments(**TWO), "--dataset")
    with pytest.raises(UserError, match="--teacher_key: no key 'kind' in the rows of --dataset"):
        with_teachers(KEPT, ROWS, KLArguments(teacher="math=m", teacher_key="kind"), "--dataset")


def test_several_teachers_without_a_key_have_weights():
    assert with_teachers(KEPT, ROWS, KLArguments(teacher="a,b"), "--dataset") is KEPT
    assert shares_of_rows(KLArguments(teacher="a,b"), KEPT)[3] == [0.5, 0.5]
    assert shares_of_rows(KLArguments(teacher="a,b", teacher_weights=[0.3, 0.7]), KEPT)[1] == [0.3, 0.7]


def test_the_mean_of_teachers_is_that_of_their_samples():
    """Two samples in a packed row, with a token of padding behind them, whose number is 0 as in `collate_samples`."""
    ids = torch.tensor([[0, 0, 1, 1, 0]])
    first, second = torch.randn(2, 1, 5, dtype=torch.float64)
    own = mean_of_teachers([first, second], {"teacher_shares": torch.eye(2).double(), "sequence_ids": ids})
    assert own[0, :4].tolist() == [*first[0, :2].tolist(), *second[0, 2:4].tolist()]
    shares = torch.tensor([[0.3, 0.3], [0.7, 0.7]]).double()
    mixed = mean_of_teachers([first, second], {"teacher_shares": shares, "sequence_ids": ids})
    torch.testing.assert_close(mixed, 0.3 * first + 0.7 * second)


def test_a_teacher_without_a_share_may_not_be_finite():
    """A specialist gives no probability to a token of another domain."""
    lost = torch.full((1, 2), -torch.inf)
    micro_batch = {"teacher_shares": torch.tensor([[1.0], [0.0]]).double(), "sequence_ids": torch.zeros(1, 2).long()}
    models = {"a": torch.tensor([[-1.0, -2.0]]), "b": lost}
    found = reference_log_probs(("a", "b"), lambda model, *_, **__: models[model], None, micro_batch)
    assert found.tolist() == [[-1.0, -2.0]]


def test_each_micro_batch_gets_the_shares_of_its_samples():
    batch = {"sample_numbers": torch.tensor([2, 0])}
    samples = [SimpleNamespace(row=row) for row in (0, 1, 3)]
    make = lambda found, episode: ([SimpleNamespace(micro_batches=[batch])], found)  # noqa: E731
    prompts = with_teachers(KEPT, ROWS, KLArguments(**TWO), "--dataset")
    args = SimpleNamespace(kl=KLArguments(**TWO), rollout=SimpleNamespace(rollouts_from="r.jsonl"))
    run = SimpleNamespace(args=args, samples=prompts, ppo=SimpleNamespace(make_batches=make), frozen=None)
    weigh_teachers(run)
    run.ppo.make_batches(samples, 0)
    assert batch["teacher_shares"].tolist() == [[0.0, 1.0], [1.0, 0.0]]
    with pytest.raises(UserError, match="--load_checkpoint: a rollout of the checkpoint has a sample of row 8, which"):
        run.ppo.make_batches([SimpleNamespace(row=7)], 0)  # the data was changed before the resume
    run.frozen = [[SimpleNamespace(row=7)]]
    with pytest.raises(UserError, match=r"--rollouts_from: r\.jsonl has a sample of row 8, which is no prompt"):
        weigh_teachers(run)


def test_records_name_each_teacher():
    assert named_models("teacher", TWO["teacher"], "k") == {"teacher math": "m", "teacher code": "c"}
    assert named_models("teacher", "a,b") == {"teacher": "a", "teacher 2": "b"}
    arguments = {"pretrain": "p", "teacher": TWO["teacher"], "teacher_key": "k", "ref_model": "m,c"}
    expected = {"pretrain": "p", "ref_model": "m", "ref_model 2": "c", "teacher math": "m", "teacher code": "c"}
    assert models_of(arguments) == expected
    flags = SimpleNamespace(**{**arguments, "lora_adapter": None})
    assert named_sources(flags, ("pretrain", "teacher")) == {"pretrain": "p", "teacher": "m,c"}


def test_the_models_are_the_references():
    args, _ = parse(["--pretrain", "p", "--dataset", "d", "--teacher", "math=m, code=c", "--teacher_key", "k"])
    assert args.kl.ref_model == "m,c" and args.kl.init_kl_coef == 1.0
    assert named_in(" a=b=c, d=e", "--teacher", "") == {"a": "b=c", "d": "e"}


def test_a_certificate_reads_a_teacher_once(tmp_path, monkeypatch):
    """A teacher is also --ref_model. The record names it twice, with one reading of its files."""
    for name in "mc":
        (tmp_path / name).mkdir()
        (tmp_path / name / "w").write_text(name)
    read, whole = [], certificate.hash_path
    monkeypatch.setattr(certificate, "hash_path", lambda path: read.append(path) or whole(path))
    monkeypatch.chdir(tmp_path)
    found = hash_models(
        models_of({"teacher": TWO["teacher"], "teacher_key": "k", "ref_model": "m,c", "pretrain": "hub"})
    )
    assert read == [str(tmp_path / "m"), str(tmp_path / "c")]
    assert found["teacher math"] == found["ref_model"] == whole("m") != found["teacher code"] == found["ref_model 2"]
