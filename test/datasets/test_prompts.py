"""Prompts: what the model is asked, the label beside it, and what is left out and counted."""

import copy
import json

import pytest
from transformers import AutoTokenizer

from trainer.datasets.demos.demo import make_demo
from trainer.datasets.files.loading import load_rows
from trainer.datasets.samples.prompts import tokenize_prompts
from trainer.datasets.shapes.reading import answer_value
from trainer.errors import UserError
from trainer.flags.parse_flags import parse_arguments
from trainer.flags.rl_flags import PPOArguments
from trainer.runs.rl.rl_run import load_data


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prompts") / "demo"
    make_demo(str(folder))
    return folder


@pytest.fixture(scope="module")
def tokenizer(demo):
    return AutoTokenizer.from_pretrained(demo / "model")


def prompts_of(path, tokenizer, **options):
    rows = load_rows(str(path), flag="--dataset", split="train")
    defaults = {"input_key": None, "label_key": None, "input_template": None, "apply_chat_template": False}
    return tokenize_prompts(rows, tokenizer, flag="--dataset", **{**defaults, "max_len": 128, **options})


def write(tmp_path, rows: list[dict]):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_messages_are_rendered_up_to_the_answer(demo, tokenizer):
    prompts, ledger = prompts_of(demo / "prompts.jsonl", tokenizer, label_key="label")
    row = json.loads((demo / "prompts.jsonl").read_text().splitlines()[0])
    text = tokenizer.decode(prompts[0]["prompt_ids"])
    assert text == f"<|im_start|>user\n{row['messages'][0]['content']}<|im_end|>\n<|im_start|>assistant\n"
    assert prompts[0]["label"] == row["label"] and ledger["num_samples"] == ledger["num_rows"] == 2000


def test_tools_of_a_row_are_shown(tmp_path, tokenizer):
    with_tools = copy.copy(tokenizer)
    with_tools.chat_template = "{% if tools %}{{ tools | tojson }}{% endif %}" + tokenizer.chat_template
    row = {"messages": [{"role": "user", "content": "1 2"}], "tools": [{"n": 1}]}
    prompts, _ = prompts_of(write(tmp_path, [row]), with_tools)
    assert tokenizer.decode(prompts[0]["prompt_ids"]).startswith('[{"n": 1}]<|im_start|>user\n1 2')


def test_plain_texts_templates_and_labels(tmp_path, tokenizer):
    path = write(tmp_path, [{"q": "one {}", "a": 72}, {"q": "two", "a": 3}])
    prompts, _ = prompts_of(path, tokenizer, input_key="q", label_key="a", input_template="Q: {} A:")
    assert [tokenizer.decode(ids) for ids in prompts["prompt_ids"]] == ["Q: one {} A:", "Q: two A:"]
    assert list(prompts["label"]) == ["72", "3"]
    chat, _ = prompts_of(path, tokenizer, input_key="q", apply_chat_template=True)
    assert tokenizer.decode(chat[1]["prompt_ids"]).endswith("two<|im_end|>\n<|im_start|>assistant\n")
    assert chat[0]["label"] is None


@pytest.mark.parametrize("number", [72, -3, 2.5, 5.0, 1e20])
def test_a_number_is_the_same_text_as_label_and_as_answer(tmp_path, tokenizer, number):
    """A file keeps the text of its numbers. A number that came without one is refused if its text is in doubt."""

    def found(read) -> str:
        try:
            return read()
        except UserError as error:
            return error.found

    answer = found(lambda: answer_value(number, "column a"))
    path = write(tmp_path, [{"q": "one", "a": number}])
    label = found(lambda: prompts_of(path, tokenizer, input_key="q", label_key="a")[0]["label"][0])
    assert label == json.dumps(number)
    assert answer == label + ", a number that the file may write in another way" * (number in (5.0, 1e20))


def test_a_prompt_has_the_template_arguments_of_its_row(tmp_path, tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = tokenizer.chat_template + "{{ '<think></think>' if quiet else '' }}"
    given = [{"quiet": True}, {"quiet": False}, None]
    turns = [{"role": "user", "content": "1 2"}]
    path = write(tmp_path, [{"messages": turns, "chat_template_kwargs": value} for value in given])
    prompts, ledger = prompts_of(path, tokenizer)
    for prompt, value in zip(prompts, given, strict=True):
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **(value or {}))
        assert prompt["prompt_ids"] == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len({len(ids) for ids in prompts["prompt_ids"]}) == 2 and not hasattr(tokenizer, "template_args")
    assert any("chat_template_kwargs -> arguments of the chat template" in line for line in ledger.lines)
    path = write(tmp_path, [{"messages": turns, "chat_template_kwargs": {"depth": 1}}])
    with pytest.raises(
        UserError, match="row 1: column chat_template_kwargs: the chat template has no argument 'depth'"
    ):
        prompts_of(path, tokenizer)


def test_turns_of_an_environment_have_no_template_arguments_of_a_row(demo, tmp_path, tokenizer):
    path = write(tmp_path, [{"messages": [{"role": "user", "content": "1"}], "chat_template_kwargs": {"quiet": True}}])
    flags = ["--pretrain", str(demo / "model"), "--dataset", str(path), "--env", "env.py"]
    args = parse_arguments(PPOArguments, "train_ppo", flags)
    with pytest.raises(UserError, match=r"--dataset column chat_template_kwargs: .* of the environment"):
        load_data(args, tokenizer, str(path), "train", "--dataset", functions={})


def test_long_and_empty_prompts_are_left_out_and_counted(tmp_path, tokenizer):
    path = write(tmp_path, [{"q": "1 2 3"}, {"q": "1 " * 100}, {"q": " "}])
    prompts, ledger = prompts_of(path, tokenizer, input_key="q", max_len=50)
    assert list(prompts["row"]) == [0]
    assert (ledger["num_rows"], ledger["num_too_long"], ledger["num_empty"], ledger["num_samples"]) == (3, 1, 1, 1)
    with pytest.raises(UserError, match="no prompt is left"):
        prompts_of(path, tokenizer, input_key="q", max_len=2)


WRONG = {
    "absent key": ({"input_key": "p"}, "--input_key: no key 'p'"),
    "no messages": ({}, "--input_key: missing, and no column"),
    "absent label": ({"input_key": "q", "label_key": "b"}, "--label_key: no key 'b'"),
    "template twice": ({"input_key": "q", "input_template": "{}{}"}, "--input_template: 2 times {}"),
    "template and chat": ({"input_key": "q", "input_template": "{}", "apply_chat_template": True}, "--input_template"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_flags(case, tmp_path, tokenizer):
    options, expected = WRONG[case]
    with pytest.raises(UserError) as error:
        prompts_of(write(tmp_path, [{"q": "1", "a": "2"}]), tokenizer, **options)
    assert str(error.value).startswith(expected)


def test_a_conversation_that_ends_with_the_answer_is_refused(demo, tokenizer):
    with pytest.raises(UserError, match=r"row 1: --input_key messages: ends with an assistant message"):
        prompts_of(demo / "sft.jsonl", tokenizer)


def test_gsm8k(shared_data, tokenizer):
    path = shared_data / "gsm8k/test.jsonl"
    prompts, ledger = prompts_of(path, tokenizer, input_key="question", label_key="answer", max_len=2048)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert ledger["num_samples"] == len(rows) and prompts[7]["label"] == rows[7]["answer"]
    assert tokenizer.decode(prompts[7]["prompt_ids"]) == rows[7]["question"]
