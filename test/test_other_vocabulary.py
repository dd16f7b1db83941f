"""A model that reads the policy's tokens has the policy's vocabulary, or it is refused before data is read."""

import json
import shutil
from types import SimpleNamespace

import pytest

from trainer.datasets.demos.demo import make_demo
from trainer.errors import UserError
from trainer.models.model_loading import load_tokenizer
from trainer.runs.feature_list import FEATURES
from trainer.runs.features import distillation, reference
from trainer.runs.rl.rl_features import RL_FEATURES


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """demo/model; `same` in another folder; `swapped`, whose ids are in range; `bare` and `wide` without a tokenizer."""
    folder = tmp_path_factory.mktemp("vocabulary")
    make_demo(str(folder / "demo"))
    for name in ("same", "swapped", "bare", "wide"):
        shutil.copytree(folder / "demo/model", folder / name)
    path = folder / "swapped/tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = [word for word in vocab if len(word) == 1 and word.isalpha()][:2]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    path.write_text(json.dumps(tokenizer))
    for name in ("bare", "wide"):
        for file in (folder / name).glob("tokenizer*"):
            file.unlink()
    config = json.loads((folder / "wide/config.json").read_text())
    (folder / "wide/config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 1}))
    return folder


def run_with(folder, name: str, teacher=None):
    tokenizer = load_tokenizer(str(folder / "demo/model"))
    setup = SimpleNamespace(folder=str(folder / "demo/model"), tokenizer=tokenizer, trust_remote_code=False)
    flags, place = SimpleNamespace(ref_model=str(folder / name), teacher=teacher), (str(folder / name), None)
    return SimpleNamespace(flags=flags, setup=setup, references=[place])


@pytest.mark.parametrize("name", ["same", "swapped", "bare", "wide"])
def test_a_reference_has_the_ids_of_the_policy(folder, name):
    if name in ("same", "bare"):
        return reference.REFERENCE.before_data(run_with(folder, name))
    for teacher, flag in ((None, "--ref_model"), ("t", "--teacher")):
        with pytest.raises(UserError) as found:
            reference.REFERENCE.before_data(run_with(folder, name, teacher))
        expected = (
            f"{flag}: {folder / name} has another vocabulary than --pretrain (allowed: a model with the same one)"
        )
        assert str(found.value) == expected


def test_every_run_with_a_reference_is_checked(folder):
    """train_dpo takes the features of all runs, train_ppo and --online those of RL."""
    for features in (FEATURES, RL_FEATURES):
        assert reference.REFERENCE in features
    assert reference.REFERENCE.is_used(run_with(folder, "same"))
    assert not reference.REFERENCE.is_used(SimpleNamespace(flags=SimpleNamespace(ref_model=None)))


@pytest.mark.parametrize("name", ["swapped", "wide"])
def test_teachers_of_train_kd_have_the_ids_of_the_student(folder, name, monkeypatch):
    monkeypatch.setattr(distillation, "rank_0_first", lambda build: build())
    run = run_with(folder, name)
    run.args = SimpleNamespace(
        teacher=SimpleNamespace(kd_coef=None, teacher_answers=0), model=SimpleNamespace(trust_remote_code=False)
    )
    with pytest.raises(UserError, match=r"--teacher: .* has another vocabulary than --pretrain .allowed: a model with"):
        distillation.load_teacher(run, str(folder / name))
