"""tokenize_sft: the ids and targets that one would write down by hand, nothing forged, nothing dropped in silence."""

import json
import os
import struct
import subprocess
import sys
from hashlib import blake2b
from pathlib import Path

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from trainer.compare.zoo.check_model import template_rows
from trainer.datasets.files.loading import load_rows
from trainer.datasets.samples.parts import Part
from trainer.datasets.samples.sft_samples import render_sample, tokenize_sft
from trainer.errors import UserError
from trainer.flags.common_flags import SFTArguments, SFTDataArguments
from trainer.flags.rules import refuse

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="real tokenizers absent: ../shared/data")

CHATML = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
CHATML += "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "It is 2."},
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("hf")))


def tiny(template=None, eos="<|im_end|>"):
    file = DATA / "tokenizers" / "torchtune-tiny-bpe-2k" / "tokenizer.json"
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file), eos_token=eos)
    tokenizer.chat_template = template
    return tokenizer


def stories():
    return AutoTokenizer.from_pretrained(DATA / "models" / "stories260K-hf")


def tokenize(rows, tokenizer, **options):
    rows = datasets.Dataset.from_list(rows) if isinstance(rows, list) else rows
    defaults = {"input_key": None, "output_key": None, "input_template": None, "apply_chat_template": False}
    defaults |= {"train_on": None, "pretrain_mode": False, "max_len": 4096, "flag": "--dataset"}
    return tokenize_sft(rows, tokenizer, **defaults | options)


def by_keys(rows, tokenizer, **options):
    return tokenize(rows, tokenizer, **{"input_key": "q", "output_key": "a"} | options)


def whole_ids(tokenizer, prompt: str, answer: str) -> tuple[list[int], list[int]]:
    """The ids of the whole text and eos, split where the answer's first character is."""
    encoded = tokenizer(prompt + answer, return_offsets_mapping=True)
    ids, ends = encoded["input_ids"], [b if b > a else 0 for a, b in encoded["offset_mapping"]]
    start = next((i for i, end in enumerate(ends) if end > len(prompt)), len(ids))
    return ids[:start], [*ids[start:], tokenizer.eos_token_id]


def error_of(rows, tokenizer, **options) -> UserError:
    with pytest.raises(UserError) as caught:
        tokenize(rows, tokenizer, **options)
    error = caught.value
    assert "\n" not in str(error) and error.__cause__ is None and error.__suppress_context__ == bool(error.__context__)
    return error


def gsm8k(num) -> list[dict]:
    with open(DATA / "gsm8k" / "train.jsonl", encoding="utf-8") as file:
        rows = [json.loads(next(file)) for _ in range(num)]
    return [{"q": row["question"], "a": row["answer"]} for row in rows]


def answer_of(sample, tokenizer) -> str:
    return tokenizer.decode([t for t, target in zip(sample["input_ids"], sample["loss_mask"], strict=True) if target])


def test_keys_give_prompt_answer_and_eos_on_real_rows():
    rows = gsm8k(40)
    for tokenizer in (tiny(), stories()):
        samples, ledger = by_keys(rows, tokenizer)
        num_tokens = num_loss_tokens = 0
        assert samples["row"][:] == list(range(40))
        for sample, row in zip(samples, rows, strict=True):
            prompt, answer = whole_ids(tokenizer, row["q"], row["a"])
            assert sample["input_ids"] == prompt + answer
            assert sample["loss_mask"] == [0] * len(prompt) + [1] * len(answer)
            assert (sample["num_tokens"], sample["num_loss_tokens"]) == (len(prompt + answer), len(answer))
            num_tokens, num_loss_tokens = num_tokens + len(prompt + answer), num_loss_tokens + len(answer)
        assert list(ledger.counts.values()) == [40, 0, 0, 40, num_tokens, num_loss_tokens, 40]
    assert samples[0]["input_ids"].count(tokenizer.bos_token_id) == 1


def test_result_columns_and_types():
    samples, _ = by_keys(gsm8k(2), tiny())
    assert {name: str(kind) for name, kind in samples.features.items()} == {
        "input_ids": "List(Value('int32'))",
        "loss_mask": "List(Value('int8'))",
        "num_tokens": "Value('int64')",
        "num_loss_tokens": "Value('int64')",
        "digest": "Value('string')",
        "row": "Value('int64')",
    }


def test_an_eos_that_is_there_is_not_doubled():
    tokenizer = tiny()
    samples, _ = by_keys([{"q": "hi", "a": "yes<|im_end|>"}, {"q": "hi", "a": "yes"}], tokenizer)
    assert samples[0]["input_ids"] == samples[1]["input_ids"]
    assert samples[0]["input_ids"].count(tokenizer.eos_token_id) == 1
    text, _ = tokenize([{"text": "yes<|im_end|>"}], tokenizer, pretrain_mode=True)
    assert text[0]["input_ids"] == tokenizer("yes<|im_end|>")["input_ids"]


def test_a_tokenizer_that_closes_every_text_does_not_close_the_prompt():
    tokenizer = stories()
    plain, _ = by_keys([{"q": "Once", "a": " upon"}], tokenizer)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<s> $A </s>", None, [("<s>", 1), ("</s>", 2)])
    assert tokenizer("Once")["input_ids"][-1] == tokenizer.eos_token_id
    closing, _ = by_keys([{"q": "Once", "a": " upon"}], tokenizer)
    assert closing[:] == plain[:]


def test_input_template_fills_its_one_place_and_leaves_braces_alone():
    tokenizer = tiny()
    rows = [{"q": "a {} {x} {{y}} %s", "a": "yes {}"}]
    samples, _ = by_keys(rows, tokenizer, input_template="{Q}: {}\nA:")
    prompt = tokenizer("{Q}: a {} {x} {{y}} %s\nA:")["input_ids"]
    assert samples[0]["input_ids"][: len(prompt)] == prompt and sum(samples[0]["loss_mask"][: len(prompt)]) == 0
    assert answer_of(samples[0], tokenizer) == "yes {}<|im_end|>"
    for template in ("no place", "{} and {}"):
        error = error_of(rows, tokenizer, input_key="q", output_key="a", input_template=template)
        assert error.where == "--input_template"


def test_a_cut_answer_gets_no_eos_and_is_counted():
    tokenizer, rows = tiny(), gsm8k(30)
    whole, _ = by_keys(rows, tokenizer)
    cut, ledger = by_keys(rows, tokenizer, max_len=150)
    lengths = [len(ids) for ids in whole["input_ids"]]
    prompts = [n - loss for n, loss in zip(lengths, whole["num_loss_tokens"], strict=True)]
    assert 0 < sum(n > 150 for n in lengths) < 30
    assert ledger["num_truncated"] == sum(n > 150 for n in lengths)
    assert ledger["num_excluded"] == sum(n >= 150 for n in prompts)
    assert ledger["num_stop_trained"] == sum(n <= 150 for n in lengths)
    for sample in cut:
        full = whole[sample["row"]]
        assert sample["input_ids"] == full["input_ids"][:150] and sample["loss_mask"] == full["loss_mask"][:150]
        ends = sample["input_ids"][-1] == tokenizer.eos_token_id
        assert ends == (full["num_tokens"] <= 150)
    assert by_keys(rows[:1], tokenizer, max_len=lengths[0])[1]["num_truncated"] == 0


def test_rows_without_a_loss_token_are_left_out_and_counted():
    rows = [{"q": "x " * 50, "a": "cut"}, {"q": "b", "a": ""}, {"q": "", "a": "ab"}, {"q": "d", "a": " \n"}]
    samples, ledger = by_keys([*rows, {"q": "e", "a": "yes"}], tiny(), max_len=20)
    assert samples["row"][:] == [2, 4]
    assert (ledger["num_rows"], ledger["num_samples"], ledger["num_excluded"], ledger["num_truncated"]) == (5, 2, 3, 1)
    # Without a prompt nothing predicts the first token.
    assert samples[0]["loss_mask"] == [0] + [1] * (samples[0]["num_tokens"] - 1)
    assert ledger["num_loss_tokens"] == sum(map(sum, samples["loss_mask"]))
    assert all(part in ledger.summary() for part in ("5 rows", "2 samples", "3 excluded", "1 truncated"))
    assert ledger.counts["num_excluded"] == 3
    error = error_of(rows[:2], tiny(), input_key="q", output_key="a", max_len=20)
    assert error.where == "--dataset" and "2 excluded" in error.found and "--max_len 20" in error.allowed


def test_no_sample_left_names_the_reason_that_counted_most():
    long, empty = {"q": "hi\n", "a": "no " * 30}, {"q": "hi", "a": ""}
    error = error_of([empty, empty, long], tiny(), input_key="q", output_key="a", max_len=2)
    assert "2 rows have no answer to train, 1 is cut off" in error.found and error.allowed.startswith(
        "answers that are not"
    )
    error = error_of([empty, long, long], tiny(), input_key="q", output_key="a", max_len=2)
    assert "1 row has no answer to train, 2 are cut off" in error.found and "--max_len 2" in error.allowed


def test_pretrain_mode_is_text_and_eos_with_loss_on_all_but_the_first():
    texts = (DATA / "tinystories-sample" / "tinystories_sample.txt").read_text(encoding="utf-8").split("\n\n")
    tokenizer = stories()
    rows = [{"text": text} for text in texts if text.strip()] + [{"text": ""}]
    samples, ledger = tokenize(rows, tokenizer, pretrain_mode=True)
    assert (ledger["num_excluded"], ledger["num_samples"]) == (1, len(rows) - 1)
    for sample, row in zip(samples, rows[:-1], strict=True):
        assert sample["input_ids"] == tokenizer(row["text"])["input_ids"] + [tokenizer.eos_token_id]
        assert sample["loss_mask"] == [0] + [1] * (sample["num_tokens"] - 1)
    other, _ = tokenize([{"body": row["text"]} for row in rows], tokenizer, pretrain_mode=True, input_key="body")
    assert other[:] == samples[:]


def test_absent_keys_name_the_flag_the_key_and_the_keys_there_are():
    rows = [{"q": "x", "a": "y"}]
    for flag, keys in (
        ("--input_key", {"input_key": "question", "output_key": "a"}),
        ("--output_key", {"input_key": "q", "output_key": "answer"}),
        ("--input_key", {"pretrain_mode": True}),
        ("--input_key", {"output_key": "a"}),
    ):
        error = error_of(rows, tiny(), **keys)
        assert error.where == flag and error.allowed == "q, a" and "--dataset" in error.found
    assert "'question'" in error_of(rows, tiny(), input_key="question", output_key="a").found
    text = str(error_of(rows, tiny(), input_key="q"))
    assert all(word in text for word in ("q, a", "--output_key", "--apply_chat_template", "--pretrain_mode"))
    assert error_of(rows, tiny(CHATML), apply_chat_template=True).where == "--input_key"
    assert "--output_key" in error_of(rows, tiny(CHATML), apply_chat_template=True, input_key="q").allowed


def test_values_that_are_no_texts_name_the_row():
    good = {"q": "x", "a": "y"}
    error = error_of([good, good, {"q": "x", "a": None}], tiny(), input_key="q", output_key="a")
    assert str(error) == "--dataset row 3: --output_key a: no value (allowed: a text)"
    error = error_of([{"q": 5, "a": "y"}], tiny(), input_key="q", output_key="a")
    assert str(error) == "--dataset row 1: --input_key q: a number (allowed: a text)"
    error = error_of([{"q": TALK, "a": "y"}], tiny(), input_key="q", output_key="a")
    assert "row 1" in error.where and error.found == "a list"
    for bad in ([{"role": "user"}], [{"content": "x"}], [{"role": "user", "content": ["x"]}], None):
        rows = datasets.Dataset.from_list([{"messages": TALK}, {"messages": bad}], on_mixed_types="use_json")
        error = error_of(rows, tiny(CHATML))
        assert error.where.startswith("--dataset row 2: --input_key messages")


def test_flags_that_the_mode_would_ignore_are_refused():
    rows, chat = [{"q": "x", "a": "y"}], [{"messages": TALK}]
    keys = {"input_key": "q", "output_key": "a"}
    plain, talk = tiny(), tiny(CHATML)
    for found, wanted in (
        (error_of(rows, plain, **keys, train_on="all"), "--train_on all without conversations"),
        (
            error_of(rows, talk, **keys, apply_chat_template=True, input_template="{}"),
            "--input_template {} with --apply_chat_template",
        ),
        (error_of(chat, talk, input_template="{}"), "--input_template {} with rows of conversations"),
        (error_of(rows, plain, **keys, pretrain_mode=True), "--output_key a with --pretrain_mode"),
        (
            error_of(chat, talk, pretrain_mode=True, apply_chat_template=True),
            "--apply_chat_template with --pretrain_mode",
        ),
        (error_of([{"text": "x"}], plain, pretrain_mode=True, train_on="all"), "--train_on all with --pretrain_mode"),
        (
            error_of([{"text": "x"}], plain, pretrain_mode=True, input_template="{}"),
            "--input_template {} with --pretrain_mode",
        ),
    ):
        assert found.where == wanted and found.instead.endswith(".")
    missing = error_of(chat, tiny())
    assert missing.where == "--tokenizer_chat_template" and "no chat template" in missing.found
    assert missing.allowed.startswith("chatml ")
    assert "eos" in error_of(rows, tiny(eos=None), **keys).found


def test_messages_are_a_conversation_without_being_asked():
    tokenizer = tiny(CHATML)
    last, _ = tokenize([{"messages": TALK}], tokenizer)
    assert answer_of(last[0], tokenizer) == "It is 2.<|im_end|>"
    every, ledger = tokenize([{"messages": TALK}], tokenizer, train_on="all")
    assert answer_of(every[0], tokenizer) == "Hello.<|im_end|>It is 2.<|im_end|>"
    assert every[0]["input_ids"] == last[0]["input_ids"] == tokenizer.apply_chat_template(TALK)["input_ids"]
    assert ledger["num_stop_trained"] == 1


def test_every_spelling_of_a_conversation_gives_the_same_samples():
    tokenizer = tiny(CHATML)
    wanted, _ = tokenize([{"messages": TALK}], tokenizer)
    names = {"user": "human", "assistant": "gpt"}
    shared = [{"from": names[m["role"]], "value": m["content"]} for m in TALK]
    history, answer = TALK[:-1], TALK[-1]
    for row, options in (
        ({"conversations": shared}, {}),
        ({"talk": TALK, "id": "7"}, {"input_key": "talk", "apply_chat_template": True}),
        ({"p": history, "a": answer["content"]}, {"input_key": "p", "output_key": "a", "apply_chat_template": True}),
        ({"p": history, "a": [answer]}, {"input_key": "p", "output_key": "a", "apply_chat_template": True}),
    ):
        assert tokenize([row], tokenizer, **options)[0][:] == wanted[:]
    short, _ = tokenize([{"messages": TALK[:2]}], tokenizer)
    row = {"q": TALK[0]["content"], "a": TALK[1]["content"]}
    assert by_keys([row], tokenizer, apply_chat_template=True)[0][:] == short[:]


def test_keys_that_only_other_messages_have_are_not_shown_to_the_template():
    template = CHATML.replace("m.role +", "m.role + (m.name if m.name is defined else '') +")
    named = [{"role": "user", "content": "hi", "name": "Bob"}, TALK[1]]
    rows = datasets.Dataset.from_list([{"messages": named}, {"messages": TALK}])
    assert "name" in rows[1]["messages"][0]  # arrow filled it in
    samples, _ = tokenize(rows, tiny(template))
    assert "userBob" in tiny().decode(samples[0]["input_ids"]) and "None" not in tiny().decode(samples[1]["input_ids"])


def test_a_pure_tool_call_is_an_answer():
    template = CHATML.replace("m.content +", "m.content + (m.tool_calls | tojson if m.tool_calls else '') +")
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add", "arguments": {"x": 1}}]}
    samples, _ = tokenize([{"messages": [TALK[0], call]}], tiny(template))
    assert answer_of(samples[0], tiny()) == '[{"name": "add", "arguments": {"x": 1}}]<|im_end|>'


@pytest.mark.parametrize("num_proc", [1, 2])
def test_arguments_of_tool_calls_are_trained_as_the_file_has_them(num_proc, tmp_path):
    template = CHATML.replace("m.content +", "m.content + (m.tool_calls | tojson if m.tool_calls else '') +")
    arguments = [{"n": 1}, {"n": 1.5, "opt": None}, {"n": 12345678901234567890}, {"date": "2024-05-01"}]
    calls = [[{"name": "f", "arguments": a}] for a in arguments]
    user = {**TALK[0], "tool_calls": None}  # all messages have the same keys
    talks = [[user, {"role": "assistant", "content": "", "tool_calls": call}] for call in calls]
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    rows = load_rows(str(path), flag="--dataset", split="train")
    samples, _ = tokenize(rows, tiny(template), num_proc=num_proc)
    assert [answer_of(sample, tiny()) for sample in samples] == [json.dumps(call) + "<|im_end|>" for call in calls]


WITH_TOOLS = "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}" + CHATML
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"default": None, "n": 1}}}]


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("form", ["list", "JSON"])
def test_tools_of_a_row_are_shown_by_the_template(form, marked, tmp_path):
    written = TOOLS if form == "list" else json.dumps(TOOLS)
    rows = [{"messages": TALK, "tools": written}, {"messages": TALK, "tools": None}, {"messages": TALK}]
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    template = WITH_TOOLS
    if marked:
        body = "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
        answer = f"{{% if m.role == 'assistant' %}}{{{{ '<|im_start|>assistant\n' }}}}{body}{{{{ '\n' }}}}{{% else %}}"
        template = template.replace("{% for m in messages %}", "{% for m in messages %}" + answer, 1)
        template = template.replace("{% endfor %}", "{% endif %}{% endfor %}", 1)
    samples, _ = tokenize(load_rows(str(path), flag="--dataset", split="train"), tiny(template), train_on="all")
    plain = tokenize([{"messages": TALK}], tiny(CHATML), train_on="all")[0][0]
    shown = tiny()(f"<|im_start|>system\n{json.dumps(TOOLS)}<|im_end|>\n", add_special_tokens=False)["input_ids"]
    assert samples[0]["input_ids"] == shown + plain["input_ids"][: len(samples[0]["input_ids"]) - len(shown)]
    assert answer_of(samples[0], tiny()) == answer_of(plain, tiny()) == "Hello.<|im_end|>It is 2.<|im_end|>"
    assert [sample["input_ids"] for sample in samples][1:] == [samples[1]["input_ids"]] * 2
    assert samples[1]["input_ids"] == plain["input_ids"][: len(samples[1]["input_ids"])]


@pytest.mark.parametrize("tools, found", [(["f"], "not a list of objects"), ("[{", "broken JSON")])
def test_tools_that_are_none_are_named_by_row(tools, found):
    error = error_of([{"messages": TALK, "tools": tools}], tiny(WITH_TOOLS))
    assert error.where == "--dataset row 1: column tools" and found in error.found


def test_a_template_fault_names_the_row():
    strict = "{% if messages | length > 2 %}{{ raise_exception('too long') }}{% endif %}" + CHATML
    error = error_of([{"messages": TALK[:2]}, {"messages": TALK}], tiny(strict))
    assert error.where.startswith("--dataset row 2: ") and "too long" in error.found


def test_real_conversations_have_loss_on_the_answers_alone():
    path = str(DATA / "oasst100" / "sft.jsonl")
    rows, tokenizer = load_rows(path, flag="--dataset", split="train", max_samples=60), tiny(CHATML)
    answers = [[m["content"] for m in row["messages"] if m["role"] == "assistant"] for row in rows]
    sizes = [[len(tokenizer(text)["input_ids"]) + 1 for text in texts] for texts in answers]  # + 1: the stop token
    _, last = tokenize(rows, tokenizer, max_len=100_000)
    _, every = tokenize(rows, tokenizer, max_len=100_000, train_on="all")
    assert last["num_loss_tokens"] == sum(turns[-1] for turns in sizes)
    assert every["num_loss_tokens"] == sum(map(sum, sizes)) > last["num_loss_tokens"]
    assert every["num_tokens"] == last["num_tokens"] and every["num_stop_trained"] == last["num_stop_trained"] == 60


def test_digest_is_that_of_the_ids_and_of_nothing_else():
    tokenizer = tiny(CHATML)
    samples, _ = by_keys(gsm8k(5), tokenizer)
    for sample in samples:
        packed = struct.pack(f"<{len(sample['input_ids'])}i", *sample["input_ids"])
        assert sample["digest"] == blake2b(packed, digest_size=8).hexdigest() and len(sample["digest"]) == 16
    assert len(set(samples["digest"])) == 5
    text, _ = tokenize([{"x": "1", "text": gsm8k(1)[0]["q"]}], tokenizer, pretrain_mode=True)
    keys, _ = by_keys([{"q": gsm8k(1)[0]["q"], "a": "<|im_end|>"}], tokenizer)
    assert keys[0]["digest"] == text[0]["digest"] and keys[0]["loss_mask"] != text[0]["loss_mask"]


def test_worker_processes_change_nothing_and_their_errors_arrive(monkeypatch, tmp_path):
    rows = gsm8k(20)
    alone = by_keys(rows, tiny())
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    several = by_keys(rows, tiny(), num_proc=2)
    assert several[0][:] == alone[0][:] and several[1] == alone[1]
    assert len(list(tmp_path.rglob("*.arrow"))) == 2
    rows[15]["a"] = None
    error = error_of(rows, tiny(), input_key="q", output_key="a", num_proc=2)
    assert str(error) == "--dataset row 16: --output_key a: no value (allowed: a text)"


FRESH_PROCESS = """
import sys
from trainer.compare.zoo.check_model import template_rows
from trainer.datasets.files.loading import load_rows
from trainer.datasets.samples.parts import Part
from trainer.datasets.samples.sft_samples import tokenize_sft
from transformers import PreTrainedTokenizerFast
path, file, padded = sys.argv[1:]
tokenizer = PreTrainedTokenizerFast(tokenizer_file=file, eos_token="<|im_end|>", pad_token="<|endoftext|>")
if padded == "yes":
    tokenizer(["a", "bb bb bb"], padding="longest", truncation=True, max_length=2)  # leaves its mark on the backend
rows = load_rows(path + "," + path, flag="--dataset", split="train", max_samples=20, probs="1,2", seed=3)
samples, ledger = tokenize_sft(rows, tokenizer, flag="--dataset", input_key="question", output_key="answer",
    input_template=None, apply_chat_template=False, train_on=None, pretrain_mode=False, max_len=200)
print(ledger["num_tokens"], samples[0]["digest"])
"""


def test_another_process_finds_the_cache(tmp_path):
    file = str(DATA / "tokenizers" / "torchtune-tiny-bpe-2k" / "tokenizer.json")
    env = os.environ | {"HF_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    seen = []
    for padded in ("no", "yes"):
        command = [sys.executable, "-c", FRESH_PROCESS, str(DATA / "gsm8k" / "test.jsonl"), file, padded]
        out = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
        seen.append((out, {path: path.stat().st_mtime_ns for path in tmp_path.rglob("trainer_sft/*")}))
    assert len(seen[0][1]) == 1 and seen[0] == seen[1]


def test_what_changes_the_samples_changes_the_cache_file(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    rows, other = gsm8k(3), gsm8k(4)[1:]
    extended = tiny()
    extended.add_tokens(["the"])
    for run in (
        lambda: by_keys(rows, tiny()),
        lambda: by_keys(other, tiny()),
        lambda: by_keys(rows, tiny(), max_len=100),
        lambda: by_keys(rows, tiny(), input_template="Q: {}"),
        lambda: by_keys(rows, extended),
        lambda: by_keys(rows, tiny(eos="<|endoftext|>")),
        lambda: by_keys(rows, tiny(CHATML), apply_chat_template=True),
        lambda: by_keys(rows, tiny(CHATML.replace("m.content", "m.content|trim")), apply_chat_template=True),
    ):
        before = set(tmp_path.rglob("*.arrow"))
        first = run()[0][:]
        assert len(set(tmp_path.rglob("*.arrow")) - before) == 1
        assert run()[0][:] == first
        assert len(set(tmp_path.rglob("*.arrow")) - before) == 1


def test_render_sample_marks_the_targets():
    samples, _ = tokenize([{"messages": TALK}], tiny(CHATML), train_on="all")
    assert render_sample(samples[0], tiny()) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[[Hello.<|im_end|>]]\n"
        "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n[[It is 2.<|im_end|>]]\n"
    )
    tokenizer = stories()
    samples, _ = by_keys([{"q": "Once upon", "a": "a time"}], tokenizer)
    assert render_sample(samples[0], tokenizer) == "<s> Once upon[[a time</s>]]", "as the text has it"


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.fixed_dictionaries({key: st.text("ab {}\n", max_size=12) for key in "qa"}), max_size=6),
    st.integers(2, 16),
)
def test_counts_add_up_for_any_rows_and_length(rows, max_len):
    tokenizer = tiny()
    rows = [*rows, {"q": "", "a": "some answer"}]
    samples, ledger = by_keys(rows, tokenizer, max_len=max_len)
    assert ledger["num_rows"] == len(rows) == ledger["num_samples"] + ledger["num_excluded"]
    assert len(samples) == ledger["num_samples"]
    whole = {}
    for index, row in enumerate(rows):
        prompt, answer = whole_ids(tokenizer, row["q"], row["a"])
        whole[index] = (prompt + answer, len(prompt), row["a"].strip())
    kept = [i for i, (ids, start, answer) in whole.items() if answer and min(len(ids), max_len) > max(start, 1)]
    assert samples["row"][:] == kept
    assert ledger["num_truncated"] == sum(len(ids) > max_len for ids, _, _ in whole.values())
    for sample in samples:
        ids, start, _ = whole[sample["row"]]
        assert sample["input_ids"] == ids[:max_len]
        assert sample["loss_mask"] == [int(i >= max(start, 1)) for i in range(len(sample["input_ids"]))]


GLM = CHATML.replace("<|im_end|>\n'", "'")  # the mark of the next role ends a turn
ENDED = (
    GLM + "{% if messages[-1].role == 'assistant' %}{{ '<|im_start|>' }}{% endif %}"
)  # as docs/chat_templates.md says


def test_samples_without_a_stop_token_are_refused(tmp_path):
    rows, one = [{"messages": TALK}] * 2, [{"messages": TALK[:2]}] * 2
    for data, train_on in ((one, "last"), (rows, "all"), (rows, None)):
        error = error_of(data, tiny(GLM), train_on=train_on)
        assert (
            error.where == "--dataset"
            and "trains a stop token" in error.found
            and "--allow_no_stop" in str(error)
            and "\n" not in str(error)
        )
        for way in ({"allow_no_stop": True}, {"part": Part(is_evaluation=True)}):
            ledger = tokenize(data, tiny(GLM), train_on=train_on, **way)[1]
            assert ledger["num_stop_trained"] == 0 and "WARNING: no sample trains a stop" in ledger.report("data")
        tokenizer = tiny(ENDED)
        samples, ledger = tokenize(data, tokenizer, train_on=train_on)
        assert ledger["num_stop_trained"] == 2 and answer_of(samples[0], tokenizer).endswith("<|im_start|>")
    both = tokenize([{"messages": TALK}], tiny(ENDED), train_on="all")[0][0]
    assert answer_of(both, tiny(ENDED)) == "Hello.<|im_start|>It is 2.<|im_start|>"
    empty = tokenize([*one, {"messages": [TALK[0], {"role": "assistant", "content": ""}]}], tiny(CHATML))[1]
    assert "WARNING" not in empty.report("data") and (empty["num_stop_trained"], empty["num_excluded"]) == (2, 1)
    cut = tokenize(one, tiny(CHATML), max_len=len(tokenize(one, tiny(CHATML))[0][0]["input_ids"]) - 3)[1]
    assert "WARNING: no sample trains a stop" in cut.report("data") and "--max_len cuts all" in cut.report("data")
    tiny(GLM).save_pretrained(tmp_path)
    [chat, *_] = template_rows(str(tmp_path), None)
    assert chat[:2] == ("chat", "refused") and chat[2] == str(error_of(one, tiny(GLM)))
    with pytest.raises(UserError, match="--allow_no_stop with --pretrain_mode"):
        refuse("train_sft", SFTArguments(sft=SFTDataArguments(allow_no_stop=True, pretrain_mode=True)))
