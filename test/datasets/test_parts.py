"""--eval_fraction: rows that evaluate are chosen by the seed, are never trained, and keep their numbers in the file."""

import json
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
from tiny_tokenizers import byte_tokenizer

from trainer.cli import train_dpo, train_sft
from trainer.datasets.samples.bounds import Bounds
from trainer.datasets.samples.parts import _connected, evaluation_mask
from trainer.datasets.samples.preparation import prepare_rows
from trainer.datasets.samples.prepared import OPTIONS
from trainer.errors import UserError
from trainer.runs.preference_runs import load_dpo
from trainer.runs.run_data import load_sft, note_long_samples, part_of


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))


def write(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def both_parts(load, args, tokenizer):
    """(samples, ledger) of the training part and of the evaluation part."""
    named = args.data.dataset, args.data.dataset_split, "--dataset"
    return [load(args, tokenizer, *named, part_of(args.data, args.batch.seed, last)) for last in (False, True)]


@pytest.mark.parametrize(("num_rows", "fraction", "limit"), [(1000, 0.05, None), (10, 0.25, None), (400, 0.5, 7)])
def test_the_share_is_rounded_and_follows_the_seed(num_rows, fraction, limit):
    kinds = np.arange(num_rows)[::-1]
    chosen = evaluation_mask(kinds, fraction, 42, limit)
    assert chosen.sum() == min(round(num_rows * fraction), limit or num_rows)
    assert (chosen == evaluation_mask(kinds + 5, fraction, 42, limit)).all()  # what the rows hold does not decide
    assert (chosen != evaluation_mask(kinds, fraction, 43, limit)).any()
    spread = np.flatnonzero(chosen).mean() / num_rows
    assert limit or 0.2 < spread < 0.8  # not the first rows, nor the last


def test_equal_rows_are_in_one_part():
    kinds = np.random.default_rng(0).integers(0, 60, 200)
    chosen = evaluation_mask(kinds, 0.2, 1)
    assert not set(kinds[chosen]) & set(kinds[~chosen])
    assert 30 < chosen.sum() <= 40


@pytest.mark.parametrize(("kinds", "fraction", "found"), [
    (range(9), 0.05, "--eval_fraction 0.05: no row of 9 would evaluate"),
    (range(9), 0.99, "--eval_fraction 0.99: every row of 9 would evaluate"),
    ([0, 0, 0, 1, 1, 1], 0.3, "each row stands there 3 times or more"),
])  # fmt: skip
def test_a_part_without_rows_is_refused(kinds, fraction, found):
    with pytest.raises(UserError, match=found):
        evaluation_mask(np.array(kinds), fraction, 0)


def test_parts_of_sft_share_no_row_and_keep_the_numbers_of_the_file(tmp_path):
    tokenizer = byte_tokenizer(None)
    rows = [{"prompt": f"{n % 30} and", "completion": " one" if n % 7 else ""} for n in range(40)]  # 10 rows twice
    data = write(tmp_path / "a.jsonl", rows)
    flags = ["--pretrain", "x", "--dataset", data, "--eval_fraction", "0.25", "--seed", "3", "--max_len", "64"]
    args, _ = train_sft.parse(flags)
    (trained, counts), (evaluated, eval_counts) = both_parts(load_sft, args, tokenizer)
    assert (counts["num_rows"], eval_counts["num_rows"]) == (30, 10)
    assert len(trained) == counts["num_samples"] and len(evaluated) == eval_counts["num_samples"]
    for samples in (trained, evaluated):
        for sample in samples:  # the number is that of the row in the file
            assert tokenizer.decode(sample["input_ids"]).startswith(rows[sample["row"]]["prompt"])
    assert sorted([*trained["row"], *evaluated["row"]]) == [n for n, row in enumerate(rows) if row["completion"]]
    texts = [{rows[n]["prompt"] + rows[n]["completion"] for n in part["row"]} for part in (trained, evaluated)]
    assert not texts[0] & texts[1]

    target, loaded = str(tmp_path / "tokens"), datasets.load_dataset("json", data_files=data, split="train")
    given = vars(args.data) | vars(args.sft) | {"max_len": 64}
    sizes = {"bounds": Bounds(1000), "rows_per_part": 16, "num_proc": 1}
    prepare_rows(loaded, tokenizer, target, {name: given[name] for name in OPTIONS}, **sizes)
    args, _ = train_sft.parse([*flags[:2], "--dataset", target, *flags[4:]])
    for (prepared, _), plain in zip(both_parts(load_sft, args, tokenizer), (trained, evaluated), strict=True):
        assert list(prepared["row"]) == list(plain["row"])


def test_both_answers_of_a_pair_are_in_one_part_of_kto(tmp_path):
    pairs = [{"prompt": f"{n} and", "chosen": " one", "rejected": " two"} for n in range(20)]
    data = write(tmp_path / "pairs.jsonl", pairs)
    flags = ["--pretrain", "x", "--dataset", data, "--eval_fraction", "0.2", "--loss", "kto", "--prompt_key", "prompt"]
    args, _ = train_dpo.parse(flags)
    (trained, _), (evaluated, _) = both_parts(load_dpo, args, byte_tokenizer(None))
    assert (len(trained), len(evaluated)) == (32, 8)
    assert not set(trained["row"]) & set(evaluated["row"]) and set(trained["row"]) | set(evaluated["row"]) == set(
        range(20)
    )


def test_an_answer_of_several_pairs_is_in_one_part_of_kto(tmp_path):
    pairs = [{"prompt": f"{n // 2} and", "chosen": " one", "rejected": f" {n}"} for n in range(20)]
    data = write(tmp_path / "pairs.jsonl", pairs)
    flags = ["--pretrain", "x", "--dataset", data, "--eval_fraction", "0.2", "--loss", "kto", "--prompt_key", "prompt"]
    args, _ = train_dpo.parse(flags)
    (trained, _), (evaluated, _) = both_parts(load_dpo, args, byte_tokenizer(None))
    assert (len(trained), len(evaluated)) == (32, 8) and not set(trained["digest"]) & set(evaluated["digest"])


def test_rows_that_share_a_sample_by_others_are_connected():
    rows = np.array([[0, 1], [2, 3], [4, 1], [3, 4], [5, 5]])
    found = _connected(rows)
    assert found[0] == found[1] == found[2] == found[3] != found[4]
    assert (_connected(np.array([[3], [1], [3]])) == [3, 1, 3]).all()


def test_samples_beyond_the_tokens_of_a_micro_batch_are_told():
    said = []
    strategy, samples = SimpleNamespace(print=said.append), datasets.Dataset.from_dict({"num_tokens": [3, 9, 8, 9]})
    for max_tokens in (None, 9, 8, 7):
        note_long_samples(strategy, max_tokens, samples)
    note_long_samples(strategy, 8, iter(samples))  # a stream
    told = "more tokens, and each is a micro-batch of its own"
    assert said == [
        f"--max_tokens_per_micro_batch {limit}: {count} samples have {told}" for limit, count in ((8, 2), (7, 3))
    ]
