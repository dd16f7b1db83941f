"""Prompts of preferences under other names: a known name in another spelling is used, any other one is refused."""

import datasets
import pytest
from tiny_tokenizers import DATA, bpe, template

from trainer.datasets.samples.preference import tokenize_preference
from trainer.datasets.samples.unpaired import tokenize_unpaired
from trainer.errors import UserError

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="real tokenizers absent: ../shared/data")
COMMON = {"flag": "--dataset", "prompt_key": None, "input_template": None, "apply_chat_template": False, "max_len": 99}
COMMON |= {"chosen_key": "chosen", "rejected_key": "rejected"}
KINDS = {
    "pairs": (tokenize_preference, {"chosen": "good", "rejected": "bad"}, {"margin_key": None}),
    "kto": (tokenize_unpaired, {"completion": "good", "label": True}, {"completion_key": "completion", "label_key": "label"}),
    "kto of pairs": (tokenize_unpaired, {"chosen": "good", "rejected": "bad"}, {"completion_key": "completion", "label_key": "label"}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))


def tokens(kind: str, row: dict, **flags):
    tokenize, answers, keys = KINDS[kind]
    tokenizer = bpe("<|endoftext|>", template("<|im_end|>"))
    samples, ledger = tokenize(datasets.Dataset.from_list([{**row, **answers}]), tokenizer, **COMMON | keys | flags)
    return [sample.get("chosen_ids") or sample["input_ids"] for sample in samples], ledger


ASK = [{"role": "user", "content": "q w"}]
SPELLED = [("Prompt", "q w"), ("QUESTION", "q w"), ("Instruction", "q w"), ("Messages", ASK), ("In-puts", "q w")]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name,value", SPELLED)
def test_a_known_name_in_another_spelling_is_used(kind, name, value):
    found, ledger = tokens(kind, {name: value})
    assert found == tokens(kind, {"prompt": "q w"})[0]
    known = name.lower().replace("-", "")
    assert f"column {name} is read as {known}" in ledger.lines and "not used" not in ledger.report("data")
    plain = tokens(kind, {name: "q w"}, ignore_columns=name)[1]  # then the answers are whole texts
    assert "is read as" not in plain.report("data")


@pytest.mark.parametrize("kind", ["pairs", "kto of pairs"])
def test_answers_in_another_spelling_are_used(kind):
    tokenize, _, keys = KINDS[kind]
    tokenizer = bpe("<|endoftext|>", template("<|im_end|>"))
    row = {"Prompt": "q w", "Chosen": "good", "Rejected": "bad"}
    samples, _ = tokenize(datasets.Dataset.from_list([row]), tokenizer, **COMMON | keys)
    assert [sample.get("chosen_ids") or sample["input_ids"] for sample in samples] == tokens(kind, {"prompt": "q w"})[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", ["user_query", "userMessage", "prompt_text", "human", "chat", "text", "task", "input_text"]
)
def test_an_unknown_name_that_may_be_the_prompt_is_refused(kind, name):
    with pytest.raises(UserError) as error:
        tokens(kind, {name: "q w"})
    said = (
        f"column {name}: may be the prompt, and is not used (allowed: --prompt_key {name}, or --ignore_columns {name})"
    )
    assert str(error.value) == f"--dataset row 1: {said}"
    assert "columns not used" in tokens(kind, {name: "", "id": "7"})[1].report("data")
    assert tokens(kind, {name: "q w", "prompt": "x"})[0] == tokens(kind, {"prompt": "x"})[0] if name != "text" else True
    assert tokens(kind, {name: "q w"}, prompt_key=name)[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["prompt_id", "question_type", "source", "task_category", "user_score", "chat_model"])
def test_facts_of_a_row_are_named_and_no_prompt(kind, name):
    assert f"columns not used: {name}" in tokens(kind, {name: "q w"})[1].lines


@pytest.mark.parametrize("kind", KINDS)
def test_two_spellings_with_other_texts_are_refused(kind):
    with pytest.raises(UserError, match="row 1: column Prompt: another text than that of prompt"):
        tokens(kind, {"Prompt": "x", "prompt": "q w"})
    with pytest.raises(UserError, match="row 1: columns question and prompt: each could be meant"):
        tokens(kind, {"Prompt": "x", "Question": "q w"})
