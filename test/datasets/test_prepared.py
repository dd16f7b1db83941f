"""`prepare_data`: training on its folder sees the samples that training on the rows sees, and refuses what differs."""

import functools
import json
import shutil
from types import SimpleNamespace

import datasets
import pytest

from trainer.cli import prepare_data, train_sft
from trainer.datasets.demos.demo import make_demo
from trainer.datasets.samples import sft_samples
from trainer.datasets.samples.bounds import Bounds
from trainer.datasets.samples.sft_samples import render_sample
from trainer.errors import UserError
from trainer.models.model_loading import load_tokenizer
from trainer.runs import run_data
from trainer.runs.run_data import load_sets, load_sft, with_files

SHORT = ["--max_len", "22"]  # some rows are cut off, and some have no loss token left


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The demo with three parts of its rows, as the folder DEMO."""
    folder = tmp_path_factory.mktemp("prepared")
    make_demo(str(folder))
    rows = (folder / "sft.jsonl").read_text().splitlines(keepends=True)
    (folder / "sft.jsonl").write_text("".join(rows[:2100]))
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("hf")))


def prepare(demo, target, *flags, data="sft.jsonl"):
    paths = ["--pretrain", str(demo / "model"), "--dataset", str(demo / data), "--output_dir", str(target)]
    prepare_data.run([*paths, "--rows_per_part", "1000", *SHORT, *flags])


def load(demo, *names, flags=()):
    """(samples, ledger) as train_sft loads them."""
    names = ",".join(str(name) for name in names)
    args, _ = train_sft.parse(["--pretrain", str(demo / "model"), "--dataset", names, *SHORT, *flags])
    return load_sft(args, load_tokenizer(str(demo / "model"), False), names, "train", "--dataset")


def test_samples_and_ledger_are_those_of_the_rows(demo, tmp_path, capsys):
    prepare(demo, tmp_path / "tokens", "--dataset_num_proc", "2")
    (tmp_path / "copy").symlink_to(tmp_path / "tokens")
    expected, ledger = load(demo, demo / "sft.jsonl")
    assert 0 < ledger["num_excluded"] < ledger["num_truncated"] < ledger["num_rows"], "the data should show every case"
    for folder in (tmp_path / "tokens", tmp_path / "copy"):
        found, same = load(demo, folder)
        assert same == ledger and found.column_names == expected.column_names
        assert found.to_dict() == expected.to_dict()
    facts = json.loads((tmp_path / "tokens/prepared.json").read_text())
    assert facts["ledger"] == ledger.counts and ledger.summary() in capsys.readouterr().out
    # the first rows, and two sets together, as of the rows themselves
    few = ["--max_samples", "100"]
    assert (
        load(demo, tmp_path / "tokens", flags=few)[0].to_dict()
        == load(demo, demo / "sft.jsonl", flags=few)[0].to_dict()
    )
    prepare(demo, tmp_path / "more", data="sft_eval.jsonl")
    mixed = ["--dataset_probs", "2,1"]
    for flags in ((), mixed):
        found, same = load(demo, tmp_path / "tokens", tmp_path / "more", flags=flags)
        expected, ledger = load(demo, demo / "sft.jsonl", demo / "sft_eval.jsonl", flags=flags)
        assert same == ledger and found.to_dict() == expected.to_dict()


def test_a_new_start_goes_on_after_the_finished_parts(demo, tmp_path, monkeypatch):
    rows, tokenize = [], sft_samples._from_chat

    def count_and_fail(row, tokenizer, options):
        rows.append(row)
        if len(rows) == 1500:
            raise KeyboardInterrupt
        return tokenize(row, tokenizer, options)

    monkeypatch.setattr(sft_samples, "_from_chat", count_and_fail)
    with pytest.raises(KeyboardInterrupt):
        prepare(demo, tmp_path / "tokens")
    prepare(demo, tmp_path / "tokens")
    total = sum(1 for _ in (demo / "sft.jsonl").open())
    assert total > 2000 and len(rows) == total + 500, (total, len(rows))
    assert load(demo, tmp_path / "tokens")[1]["num_rows"] == total


def test_rows_named_at_the_start_have_their_file(demo, tmp_path, capsys, monkeypatch):
    """Two files: rows of the second one hold control tokens. A long row is named by the check of positions."""
    files = [tmp_path / name for name in ("a.jsonl", "b.jsonl")]
    for file, texts in zip(files, (["x", "y", "z"], ["u", "<|im_end|>", "v " * 20]), strict=True):
        talks = [[{"role": "user", "content": text}, {"role": "assistant", "content": "no"}] for text in texts]
        file.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    names, said = (
        ",".join(map(str, files)),
        f"1 row holds control tokens, read as plain text (--read_control_tokens keeps them): --dataset {files[1]} row 2\n",
    )
    paths = ["--pretrain", str(demo / "model"), "--dataset", names]
    prepare_data.run([*paths, "--output_dir", str(tmp_path / "tokens")])
    assert said in capsys.readouterr().out
    args, _ = train_sft.parse(paths)
    setup = {"folder": str(demo / "model"), "tokenizer": load_tokenizer(str(demo / "model"), False)}
    setup = SimpleNamespace(strategy=SimpleNamespace(print=print), trust_remote_code=False, **setup)
    monkeypatch.setattr(run_data, "rank_0_first", lambda build, **_: build())
    monkeypatch.setattr(run_data, "bounds_of", lambda *_: Bounds(10**6, 20))
    load_sets(args.data, 42, setup, functools.partial(load_sft, args, setup.tokenizer), render_sample)
    out = capsys.readouterr().out
    assert said in out and f"WARNING: --dataset {files[1]} row 3 has" in out
    one = with_files("--dataset row 2", args.data, 42, str(files[1]), "train", "--dataset")
    assert one == "--dataset row 2"


def test_what_does_not_fit_is_one_line(demo, tmp_path):
    prepare(demo, tmp_path / "tokens", "--rows_per_part", "5000")
    with pytest.raises(UserError, match=r"--max_len: 50, but .* was prepared with 22"):
        load(demo, tmp_path / "tokens", flags=["--max_len", "50"])
    with pytest.raises(UserError, match=r"--train_on: all, but .* was prepared with last"):
        load(demo, tmp_path / "tokens", flags=["--multiturn"])
    load(demo, tmp_path / "tokens", flags=["--train_on", "last"])
    with pytest.raises(UserError, match="tokenized, and others"):
        load(demo, tmp_path / "tokens", demo / "sft.jsonl")
    with pytest.raises(UserError, match="tokenized already"):
        prepare(demo, tmp_path / "again", data=tmp_path / "tokens")
    with pytest.raises(UserError, match="exists already"):
        prepare(demo, tmp_path / "tokens")
    with pytest.raises(UserError, match="--eval_dataset"):
        prepare(demo, tmp_path / "again", "--eval_dataset", "x.jsonl")
    tokenizer = load_tokenizer(str(demo / "model"), False)
    tokenizer.chat_template += " "
    args, _ = train_sft.parse(["--pretrain", str(demo / "model"), "--dataset", "x", *SHORT])
    with pytest.raises(UserError, match="another tokenizer or chat template"):
        load_sft(args, tokenizer, str(tmp_path / "tokens"), "train", "--dataset")
    (tmp_path / "tokens/prepared.json").unlink()
    with pytest.raises(UserError, match=r"tokens without the file prepared\.json"):
        load(demo, tmp_path / "tokens")


def test_what_the_model_cannot_take_is_refused_as_in_training(demo, tmp_path, capsys):
    model = tmp_path / "model"
    shutil.copytree(demo / "model", model, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 20}))
    paths = ["--pretrain", str(model), "--dataset", str(demo / "sft_eval.jsonl"), "--output_dir"]
    prepare_data.run([*paths, str(tmp_path / "long"), *SHORT])
    assert "more than the model's 20 positions" in capsys.readouterr().out
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 12}))
    with pytest.raises(UserError, match=r"--dataset row .*: token .* beyond the 12 rows of the model's embedding"):
        prepare_data.run([*paths, str(tmp_path / "beyond"), *SHORT])
    assert not (tmp_path / "beyond").exists()


def test_a_row_that_fails_is_named_by_its_file(demo, tmp_path):
    for name, answers in (("a", "one two"), ("b", ["one", None])):
        rows = [{"question": "Which?", "answer": answer} for answer in (answers.split() if name == "a" else answers)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths = ["--pretrain", str(demo / "model"), "--output_dir", str(tmp_path / "tokens"), "--dataset"]
    for names in ("a.jsonl,{}/b.jsonl", "*.jsonl"):
        with pytest.raises(UserError, match=r"^--dataset \S*/b.jsonl row 2: column answer: no value"):
            prepare_data.run([*paths, f"{tmp_path}/{names.format(tmp_path)}"])
    with pytest.raises(UserError, match=r"^--dataset row 2: column answer: no value"):
        prepare_data.run([*paths, str(tmp_path / "b.jsonl")])
