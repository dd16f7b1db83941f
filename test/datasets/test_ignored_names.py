"""--ignore_columns: a name that no column and no key of a message has is named, for every kind of data."""

import json

import datasets
import pytest
from tiny_tokenizers import byte_tokenizer, template

from trainer.cli import prepare_data, train_dpo, train_kd, train_ppo, train_sft
from trainer.datasets.demos.demo import make_demo
from trainer.models.model_loading import load_tokenizer
from trainer.rollout.rewards.reward_functions import load_reward_functions
from trainer.runs.features.distillation import _prompts
from trainer.runs.features.streamed_run import open_stream
from trainer.runs.preference_runs import load_dpo
from trainer.runs.rl.rl_run import load_data
from trainer.runs.run_data import load_sft, note_unknown_names

ANSWER = {"role": "assistant", "content": "b", "thinking": "hm"}
ROW = {"messages": [{"role": "user", "content": "a"}, ANSWER], "videos": ["v"], "meta": {"seed": 1}, "good": True}
PROMPTS = ["--label_key", "gold", "--teacher", "x", "--reward_func", "exact_match"]
KINDS = {
    "sft": (train_sft, load_sft, []),
    "pairs": (train_dpo, load_dpo, ["--rejected_key", "gold"]),
    "answers": (train_dpo, load_dpo, ["--loss", "kto", "--label_key", "good"]),
    "prompts": (train_ppo, load_data, PROMPTS),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("hf")))


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({**ROW, "gold": "c"}) + "\n")
    return path


def warnings(data, kind, ignored, *more) -> list[str]:
    command, load, flags = KINDS[kind]
    line = ["--pretrain", "x", "--dataset", str(data), "--ignore_columns", ignored, *flags, *more]
    args, _ = command.parse(line)
    options = {"functions": load_reward_functions("exact_match")} if kind == "prompts" else {}
    named, said = (str(data), "train", "--dataset"), []
    _, ledger = load(args, byte_tokenizer(template("<|im_end|>")), *named, **options)
    note_unknown_names(said.append, args.data, [(ledger, *named)])
    return said


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_that_nothing_has_is_named(kind, data):
    assert warnings(data, kind, "videos, thinking,meta.seed") == []
    [said] = warnings(data, kind, "videos, thinking,thinkin,meta.seeds")
    assert said.startswith(
        "WARNING: --ignore_columns meta.seeds, thinkin: no column and no key of a message has this name"
    )


def test_names_of_one_set_of_a_list(data):
    own = ["--dataset_flags", '[{"ignore_columns": "videos,thinking,video"}]']
    [said] = warnings(data, "sft", "videos,thinking", *own)
    assert said.startswith("WARNING: --ignore_columns video:")


def test_prompts_of_a_teacher_prepared_rows_and_streams(data, tmp_path, capsys):
    make_demo(str(tmp_path / "demo"))
    pretrain, ignored = ["--pretrain", str(tmp_path / "demo/model")], ["--ignore_columns", "videos,thinking,typo"]
    tokenizer, tokens = load_tokenizer(pretrain[1]), str(tmp_path / "tokens")
    line = [*pretrain, "--dataset", str(data), *ignored]
    prepare_data.run([*line, "--output_dir", tokens])
    assert "--ignore_columns typo: no column" in capsys.readouterr().out

    def said(args, names, ledger, streaming=False) -> str:
        note_unknown_names(print, args.data, [(ledger, names, "train", "--dataset")], streaming)
        return capsys.readouterr().out

    args, _ = train_sft.parse([*pretrain, "--dataset", tokens, *ignored])
    assert said(args, tokens, load_sft(args, tokenizer, tokens, "train", "--dataset")[1]) == ""
    args, _ = train_sft.parse([*line, "--streaming", "--max_steps", "1"])
    found = said(args, str(data), open_stream(args, tokenizer).ledger, True)
    assert "--ignore_columns typo: no column and no key of a message has this name in the first rows" in found
    args = train_kd.parse([*line, "--teacher", "t", "--teacher_answers", "1", "--generate_max_len", "8"])
    assert "--ignore_columns typo: no column" in said(args, str(data), _prompts(args, tokenizer)[1])
