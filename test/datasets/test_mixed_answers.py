"""Rows of single answers and rows of pairs in one set: each row is read for what it is, or refused by its number."""

import json

import datasets
import pytest
from tiny_tokenizers import DATA, bpe, template

from trainer.datasets.files.loading import load_rows
from trainer.datasets.samples.parts import Part
from trainer.datasets.samples.preference import tokenize_preference
from trainer.datasets.samples.sets import Sets
from trainer.datasets.samples.unpaired import tokenize_unpaired
from trainer.errors import UserError

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="real tokenizers absent: ../shared/data")
COMMON = {"flag": "--dataset", "prompt_key": None, "input_template": None, "apply_chat_template": False, "max_len": 99}
PAIR = {"chosen_key": "chosen", "rejected_key": "rejected"}
KEYS = {**COMMON, **PAIR, "completion_key": "completion", "label_key": "label"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))


@pytest.fixture(scope="module")
def tokenizer():
    return bpe("<|endoftext|>", template("<|im_end|>"))


def load(rows: list[dict], folder) -> datasets.Dataset:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_rows(str(path), flag="--dataset", split="train")


def answers(tokenizer, rows, **flags) -> list[tuple[int, str, bool]]:
    """(row, answer, label) of each sample."""
    samples, _ = tokenize_unpaired(rows, tokenizer, **KEYS | flags)
    return [(s["row"], tokenizer.decode(s["input_ids"][s["start"] :]).split("<")[0], s["label"]) for s in samples]


ASK = [{"role": "user", "content": "q"}]
ANSWERS = {  # the columns of a single answer
    "completion": {"prompt": "q", "completion": "one"},
    "response": {"question": "q", "response": "one"},
    "messages": {"messages": [*ASK, {"role": "assistant", "content": "one"}]},
    "messages and response": {"messages": ASK, "response": "one"},
}
PAIRS = {
    "texts": {"prompt": "q", "chosen": "good", "rejected": "bad"},
    "messages": {"prompt": "q"} | {k: [{"role": "assistant", "content": v}] for k, v in [("chosen", "good"), ("rejected", "bad")]},
    "responses": {"prompt": "q", "chosen_response": "good", "rejected_response": "bad"},
    "ms-swift": {"messages": [*ASK, {"role": "assistant", "content": "good"}], "rejected_response": "bad"},
    "OpenAI": {"input": {"messages": ASK}, "preferred_output": [{"role": "assistant", "content": "good"}],
               "non_preferred_output": [{"role": "assistant", "content": "bad"}]},
}  # fmt: skip


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("single", ANSWERS)
@pytest.mark.parametrize("label", ["label", "kto_tag"])
def test_each_row_of_a_file_is_a_pair_or_a_single_answer(single, pair, label, tokenizer, tmp_path):
    flags = {"prompt_key": "input.messages"} if pair == "OpenAI" else {}
    if flags and single != "completion":
        pytest.skip("one flag names the prompt of all rows")
    one = {"input": {"messages": ASK}, "completion": "one"} if flags else ANSWERS[single]
    one, two = [{**one, label: verdict} for verdict in (True, False)]
    rows = load([PAIRS[pair], one, two, PAIRS[pair], two], tmp_path)
    wanted = [(0, "good", True), (0, "bad", False), (1, "one", True), (2, "one", False), (3, "good", True)]
    assert answers(tokenizer, rows, **flags) == [*wanted, (3, "bad", False), (4, "one", False)]
    [pairs] = tokenize_preference(
        load([PAIRS[pair]], tmp_path), tokenizer, **COMMON | PAIR | flags | {"margin_key": None}
    )[0]
    samples = tokenize_unpaired(rows, tokenizer, **KEYS | flags)[0]
    assert [samples[number]["input_ids"] for number in (0, 1)] == [pairs["chosen_ids"], pairs["rejected_ids"]]
    assert [samples[number]["loss_mask"] for number in (0, 1)] == [pairs["chosen_mask"], pairs["rejected_mask"]]


@pytest.mark.parametrize(
    "row,said",
    [
        ({"prompt": "q", "completion": "a"}, "--label_key label: no value, and no pair"),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "label": False}, "column label: a label of its own"),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "kto_tag": True}, "column kto_tag: a label of its own"),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "completion": "c"}, "column completion: a single answer beside a pair"),
        ({"prompt": "q", "chosen": "a"}, "--rejected_key rejected: no value"),
        ({"prompt": "q", "rejected": "a"}, "--chosen_key chosen: no value"),
        ({"prompt": "q", "completion": "a", "label": True, "rejected": "b"}, "column label: a label of its own"),
        ({"prompt": "q", "label": True}, "--completion_key: no key 'completion' in the row"),
    ],
)  # fmt: skip
def test_a_row_that_is_both_or_neither_is_refused_by_its_number(row, said, tokenizer, tmp_path):
    pair, one = {"prompt": "q", "chosen": "a", "rejected": "b"}, {"prompt": "q", "completion": "a", "label": True}
    rows = [pair, one, row, pair] if "kto_tag" not in row else [pair, pair, row]
    with pytest.raises(UserError) as error:
        tokenize_unpaired(load(rows, tmp_path), tokenizer, **KEYS)
    assert f"--dataset row 3: {said}" in str(error.value)


def test_rows_of_a_csv_file_are_single_answers_or_pairs(tokenizer, tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("prompt,completion,label,chosen,rejected\nq,one,0,,\nq,,,good,bad\nq,,,good,\nq,,,,\n")
    rows = load_rows(str(path), flag="--dataset", split="train")
    samples, ledger = tokenize_unpaired(rows, tokenizer, **KEYS)
    found = [(s["row"], s["label"]) for s in samples]
    assert found == [(0, False), (1, True), (1, False), (2, True)] and ledger["num_empty"] == 3


def test_sets_and_parts_keep_the_rows_of_mixed_files(tokenizer, tmp_path):
    pair, one = (
        {"prompt": "q", "chosen": "good", "rejected": "bad"},
        {"prompt": "q", "completion": "one", "label": True},
    )
    numbered = [{**[pair, one, one][n % 3], "prompt": f"q {n}"} for n in range(12)]
    sets = [load(numbered[:6], tmp_path), load(numbered[6:], tmp_path)]
    for odds in (None, [0.5, 0.5]):
        both = Sets(["a", "b"], sets, [{}, {}], odds, 3, "--dataset")
        samples, _ = tokenize_unpaired(both, tokenizer, **KEYS)
        asked = both.select_columns(["prompt", "completion"])
        for sample in samples:
            row = asked[sample["row"]]
            assert f"user\n{row['prompt']}<" in tokenizer.decode(sample["input_ids"])
        sizes = [samples["row"][:].count(number) for number in range(len(asked))]
        assert sizes == [1 if row["completion"] else 2 for row in asked]
    parts = [Part(0.25, 5, None, is_evaluation) for is_evaluation in (False, True)]
    found = [tokenize_unpaired(load(numbered, tmp_path), tokenizer, part=part, **KEYS)[0]["row"][:] for part in parts]
    assert not set(found[0]) & set(found[1]) and set(found[0]) | set(found[1]) == set(range(12))


@pytest.mark.parametrize("other", ["kto_tag", "Label", "is_desirable"])
def test_labels_that_contradict_each_other_are_refused(other, tokenizer, tmp_path):
    row = {"prompt": "q", "completion": "a", "label": True}
    rows = load([{**row, other: True}, {**row, other: False}], tmp_path)
    with pytest.raises(UserError) as error:
        tokenize_unpaired(rows, tokenizer, **KEYS)
    assert f"--dataset row 2: columns label and {other}: True and False" in str(error.value)
    with (
        pytest.raises(UserError, match="row 2: columns kto_tag and label")
        if other == "kto_tag"
        else pytest.raises(UserError, match="row 2: columns label and")
    ):
        tokenize_unpaired(rows, tokenizer, **KEYS | {"label_key": other if other == "kto_tag" else "label"})
    assert answers(tokenizer, rows, ignore_columns=other) == [(0, "a", True), (1, "a", True)]
    assert answers(tokenizer, rows.select([0])) == [(0, "a", True)]


def test_a_label_may_stand_under_either_name(tokenizer, tmp_path):
    rows = [{"prompt": "q", "completion": "a", "label": True}, {"prompt": "q", "completion": "b", "kto_tag": False}]
    assert answers(tokenizer, load(rows, tmp_path)) == [(0, "a", True), (1, "b", False)]
    own = [{"prompt": "q", "completion": "a", "label": True, "good": False}]
    assert answers(tokenizer, load(own, tmp_path), label_key="good") == [(0, "a", False)]


@pytest.mark.parametrize("flags", [{"completion_key": "reply"}, {"label_key": "good"}, {"chosen_key": "better"}])
def test_a_flag_that_names_no_column_is_refused_for_pairs_too(flags, tokenizer, tmp_path):
    with pytest.raises(UserError, match=f"--{next(iter(flags))}: no key '{next(iter(flags.values()))}'"):
        tokenize_unpaired(load([PAIRS["texts"]], tmp_path), tokenizer, **KEYS | flags)


@pytest.mark.parametrize(
    "verdicts, kind", [([True, True], "desirable"), ([False, False], "undesirable"), ([True, False], None)]
)
def test_answers_that_are_all_good_or_all_bad_are_told(verdicts, kind, tokenizer, tmp_path):
    rows = [{"prompt": "q", "completion": f"answer {n}", "label": label} for n, label in enumerate(verdicts)]
    _, ledger = tokenize_unpaired(load(rows, tmp_path), tokenizer, **KEYS)
    warning = f"WARNING: all answers are {kind}, and KTO learns from both kinds"
    assert (warning in ledger.lines) == (kind is not None) and (kind or "all answers" not in str(ledger.lines))
