"""What ends a turn is one set of tokens: generation stops there, and rewards read the tokens that train_rm trained."""

import json
from types import SimpleNamespace

import datasets
import pytest
import torch
from tiny_tokenizers import DATA, bpe, stories, template
from transformers import LlamaConfig, LlamaForSequenceClassification

from trainer.datasets.conversations.rendering import render
from trainer.datasets.conversations.templates import render_prompt
from trainer.datasets.conversations.turn_ends import ENDS_WITH_EOS, as_trained, scored_ends, stop_ids, turn_ends
from trainer.datasets.samples.parts import Part
from trainer.datasets.samples.preference import tokenize_preference
from trainer.datasets.samples.prompts import tokenize_prompts
from trainer.datasets.samples.sft_samples import tokenize_sft
from trainer.datasets.samples.unpaired import tokenize_unpaired
from trainer.errors import UserError
from trainer.flags.parse_flags import parse_arguments
from trainer.flags.preference_flags import DPOArguments, RMArguments
from trainer.models.model_loading import load_tokenizer
from trainer.rollout.rewards.model_scorer import ModelScorer
from trainer.rollout.scoring import response_text
from trainer.runs.reward_model_runs import make_loss

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="real tokenizers absent: ../shared/data")
ASK = [{"role": "user", "content": "1 + 1?"}]


GLM = "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content }}{% endfor %}"
GLM += "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"


PAIRS = {  # (eos, end of a turn): the tokenizer, and the token that ends a turn
    "endoftext, im_end": (lambda: bpe("<|endoftext|>", template("<|im_end|>")), "<|im_end|>"),
    "im_end, im_end": (lambda: bpe("<|im_end|>", template("<|im_end|>")), "<|im_end|>"),
    "endoftext, end_of_turn": (lambda: bpe("<|endoftext|>", template("<eot>"), "<eot>"), "<eot>"),
    "im_end, endoftext": (lambda: bpe("<|im_end|>", template("<|endoftext|>", "")), "<|endoftext|>"),
    "endoftext, the next role": (lambda: bpe("<|endoftext|>", GLM, "<|user|>", "<|assistant|>"), "<|user|>"),
    "</s>, <|end|> (SentencePiece)": (lambda: stories(template("<|end|>"), "<|end|>"), "<|end|>"),
    "</s>, </s> (SentencePiece)": (lambda: stories(template(" </s>", "")), "</s>"),
}


def pairs_of(tokenizer, rows, with_ledger=False, **options):
    """The pairs of train_rm."""
    options = {"prompt_key": "prompt", "chosen_key": "chosen", "rejected_key": "rejected", "margin_key": None} | options
    options |= {"input_template": None, "apply_chat_template": False, "max_len": 200, "flag": "--dataset"}
    options = {"scored": True} | options
    return tokenize_preference(datasets.Dataset.from_list(rows), tokenizer, **options)[
        slice(None) if with_ledger else 0
    ]


def classifier(tokenizer, folder):
    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), num_labels=1, pad_token_id=tokenizer.pad_token_id, **sizes)
    model = LlamaForSequenceClassification(config).eval()
    with torch.no_grad():
        model.score.weight.normal_()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", PAIRS)
def test_rewards_read_the_tokens_that_train_rm_trained(name, tmp_path):
    """The reward of train_ppo and train_dpo --online (`as_trained`), and that of serve_rm, equal the model's own to 1e-5."""
    make, end = PAIRS[name]
    tokenizer = make()
    row = {"prompt": ASK, "chosen": [{"role": "assistant", "content": "ok"}]}
    row["rejected"] = [{"role": "assistant", "content": "okokok so"}]
    pair = pairs_of(tokenizer, [row])[0]
    model, ends = classifier(tokenizer, tmp_path), turn_ends(tokenizer)
    assert tokenizer.convert_ids_to_tokens(ends.end) == end
    server, stops = ModelScorer(str(tmp_path), dtype=torch.float32, device="cpu"), stop_ids(tokenizer, str(tmp_path))
    prompt_ids = render_prompt(tokenizer, ASK)
    texts = {"prompt": ASK[0]["content"], "chosen": "ok", "rejected": "okokok so"}  # that no flag names
    assert pairs_of(tokenizer, [texts], prompt_key=None)[0] == pair
    ask = {"input_key": None, "label_key": None, "input_template": None, "apply_chat_template": False}
    asked = tokenize_prompts(datasets.Dataset.from_list([texts]), tokenizer, **ask, max_len=90, flag="--dataset")[0]
    assert asked[0]["prompt_ids"] == prompt_ids
    for side in ("chosen", "rejected"):
        trained = pair[f"{side}_ids"]
        with torch.no_grad():
            expected = model(torch.tensor([trained])).logits[0, 0].item()
        assert trained[: len(prompt_ids)] == prompt_ids
        text_ids = trained[len(prompt_ids) : -len(ends.after) or None]
        text_ids = text_ids[:-1] if ends.closes else text_ids
        for stop in {ends.end, tokenizer.eos_token_id}:  # whichever of the tokens stopped the policy
            response = [*text_ids, stop]
            assert prompt_ids + as_trained(prompt_ids, response, ends, stops, tokenizer.eos_token_id) == trained
            text = response_text(tokenizer, prompt_ids, response)
            asked = server.input_ids(tokenizer.decode(prompt_ids), text)
            assert asked == trained
            assert server.score([tokenizer.decode(prompt_ids)], [text]) == pytest.approx([expected], abs=1e-5)
        assert as_trained(prompt_ids, text_ids, ends, stops, tokenizer.eos_token_id) == text_ids, "a cut response"


@pytest.mark.parametrize("name", PAIRS)
def test_answers_to_rendered_prompts_end_as_those_to_messages(name, tmp_path):
    """With --read_control_tokens: train_rm, train_sft and the two rewards. Only a bos that the template lacks is more."""
    tokenizer = PAIRS[name][0]()
    ends, stops, eos = turn_ends(tokenizer), stop_ids(tokenizer, str(tmp_path)), tokenizer.eos_token_id
    row = {"prompt": ASK, "chosen": [{"role": "assistant", "content": "ok"}]}
    [chat] = pairs_of(tokenizer, [row | {"rejected": [{"role": "assistant", "content": "so"}]}])
    text = render(tokenizer, ASK, tokenize=False, add_generation_prompt=True)
    tokenizer.reads_control_tokens = True
    row, whole = {"prompt": text, "chosen": "ok", "rejected": "so"}, {"chosen": f"{text}ok", "rejected": f"{text}so"}
    closed = row | {"chosen": f"ok{ends.closing_text.rstrip()}"}
    pair, same = pairs_of(tokenizer, [row, closed], prompt_key=None)
    [texts] = pairs_of(tokenizer, [whole], prompt_key=None)
    ids, mask = pair["chosen_ids"], pair["chosen_mask"]
    num_more = len(ids) - len(chat["chosen_ids"])
    assert (same["chosen_ids"], same["chosen_mask"]) == (ids, mask) and texts["chosen_ids"] == ids
    assert ids[num_more:] == chat["chosen_ids"] and num_more == ids.count(tokenizer.bos_token_id)
    ask = {"input_key": None, "label_key": None, "input_template": None, "apply_chat_template": False, "max_len": 90}
    [asked] = tokenize_prompts(datasets.Dataset.from_list([row]), tokenizer, **ask, flag="--dataset")[0]["prompt_ids"]
    last = len(ids) - len(ends.after) - ends.closes  # of the answer
    for stop in {ends.end, eos}:
        assert asked + as_trained(asked, [*ids[len(asked) : last], stop], ends, stops, eos) == ids
    assert [i for i, has_loss in enumerate(mask) if has_loss] == list(range(len(asked), last + ends.closes))
    classifier(tokenizer, tmp_path)
    server = ModelScorer(str(tmp_path), dtype=torch.float32, device="cpu")
    assert server.input_ids(tokenizer.decode(asked), response_text(tokenizer, asked, ids[len(asked) : last])) == ids
    one = {"flag": "--dataset", "max_len": 90, "input_key": None, "output_key": None, "train_on": None}
    one |= {"pretrain_mode": False, "apply_chat_template": False, "input_template": None}
    rows = datasets.Dataset.from_list([{"prompt": text, "completion": "ok"}])
    [sample] = tokenize_sft(rows, tokenizer, **one)[0]
    assert sample["input_ids"] == (ids if ends.closes else [*ids, eos])


@pytest.mark.parametrize("name", PAIRS)
def test_answers_to_rendered_prompts_are_trained_to_end(name, tmp_path):
    """train_dpo, also with kto: an answer that spells out eos, or the end of its turn, keeps one of them."""
    tokenizer = PAIRS[name][0]()
    ends, eos = turn_ends(tokenizer), tokenizer.eos_token
    text = render(tokenizer, ASK, tokenize=False, add_generation_prompt=True)
    tokenizer.reads_control_tokens = True
    for end in ("", eos, ends.closing_text.rstrip()):
        row = {"prompt": text, "chosen": f"ok{end}", "rejected": f"so{end}"}
        [pair] = pairs_of(tokenizer, [row], prompt_key=None, scored=False)
        keys = {"prompt_key": None, "completion_key": "completion", "label_key": "label", "flag": "--dataset"}
        keys |= {"input_template": None, "apply_chat_template": False, "max_len": 200}
        single = datasets.Dataset.from_list([{"prompt": text, "completion": f"ok{end}", "label": True}])
        [answer] = tokenize_unpaired(single, tokenizer, **keys)[0]
        assert (answer["input_ids"], answer["loss_mask"]) == (pair["chosen_ids"], pair["chosen_mask"])
        last = pair["chosen_ids"][max(i for i, has_loss in enumerate(pair["chosen_mask"]) if has_loss)]
        assert last == (ends.end if ends.closes else tokenizer.eos_token_id), (end, last)
        assert pair["chosen_ids"].count(last) == text.count(tokenizer.convert_ids_to_tokens(last)) + 1
        trained = pairs_of(tokenizer, [row], prompt_key=None)[0]["chosen_ids"]
        assert trained == (pair["chosen_ids"] if ends.closes or end else pair["chosen_ids"][:-1]), "eos adds no text"


NO_END = "endoftext, the next role"
SPELLED = [(name, kind) for name in PAIRS for kind in ("text", "whole")]


@pytest.mark.parametrize("name, kind", [*SPELLED, (NO_END, "chat")])
def test_rewards_read_the_eos_that_train_rm_was_given(name, kind, tmp_path):
    """An answer that spells out eos: train_rm keeps one end, and serve_rm, train_ppo and --online score the same tokens."""
    tokenizer = PAIRS[name][0]()
    ends, stops, eos = turn_ends(tokenizer), stop_ids(tokenizer, str(tmp_path)), tokenizer.eos_token
    text = render(tokenizer, ASK, tokenize=False, add_generation_prompt=True)
    tokenizer.reads_control_tokens = True
    row = {"chosen": f"ok{eos}", "rejected": f"so so{eos}\n"}
    row = {side: text + answer for side, answer in row.items()} if kind == "whole" else row | {"prompt": text}
    if kind == "chat":
        row = {side: [{"role": "assistant", "content": row[side].strip()}] for side in ("chosen", "rejected")}
        row["prompt"] = ASK
    pairs, ledger = pairs_of(tokenizer, [row], prompt_key=None, with_ledger=True)
    assert ledger.counts.get("num_ended_by_eos", 0) == (0 if ends.closes else 2)
    model = classifier(tokenizer, tmp_path)
    if not ends.closes:
        tokenizer.init_kwargs[ENDS_WITH_EOS] = True
        tokenizer.save_pretrained(tmp_path)
    server = ModelScorer(str(tmp_path), dtype=torch.float32, device="cpu")
    read = scored_ends(server.tokenizer)
    prompt_ids = render_prompt(tokenizer, ASK) if kind == "chat" else tokenizer(text)["input_ids"]
    for side, answer in (("chosen", "ok"), ("rejected", "so so")):
        trained = pairs[0][f"{side}_ids"]
        expected = model(torch.tensor([trained])).logits[0, 0].item()
        assert trained.count(tokenizer.eos_token_id) == prompt_ids.count(tokenizer.eos_token_id) + (
            1 if not ends.closes else (*ends.before, ends.end, *ends.after).count(tokenizer.eos_token_id)
        )
        text_ids = trained[len(prompt_ids) : len(trained) - len(read.after) - 1]
        for stop in {ends.end, tokenizer.eos_token_id}:
            assert prompt_ids + as_trained(prompt_ids, [*text_ids, stop], read, stops, None) == trained
        assert as_trained(prompt_ids, text_ids, read, stops, None) == text_ids, "a cut response"
        for shown in (answer, answer + eos, answer + read.closing_text):  # a client may send the text of the end too
            assert server.input_ids(tokenizer.decode(prompt_ids), shown) == trained
            assert server.score([tokenizer.decode(prompt_ids)], [shown]) == pytest.approx([expected], abs=1e-5)


def test_the_tokenizer_of_a_reward_model_says_how_answers_end(tmp_path):
    """Also that they no longer do, if a reward model is trained further."""
    tokenizer = PAIRS[NO_END][0]()
    run = SimpleNamespace(model=classifier(tokenizer, tmp_path), ledger=SimpleNamespace(counts={}))
    run.setup = SimpleNamespace(tokenizer=tokenizer, sp_group=None)
    run.args = parse_arguments(RMArguments, "train_rm", ["--pretrain", "x", "--dataset", "y"])
    for counts, expected in (({}, None), ({"num_ended_by_eos": 2}, True), ({}, False)):
        run.ledger.counts = counts
        make_loss(run)
        tokenizer.save_pretrained(tmp_path)
        loaded = load_tokenizer(str(tmp_path), False)
        assert loaded.init_kwargs.get(ENDS_WITH_EOS) is expected
        assert scored_ends(loaded).closes is bool(expected)


def test_answers_of_which_some_spell_out_eos_are_refused_where_nothing_else_ends_them():
    tokenizer = PAIRS[NO_END][0]()
    text = render(tokenizer, ASK, tokenize=False, add_generation_prompt=True)
    tokenizer.reads_control_tokens = True
    rows = [{"prompt": text, "chosen": f"{i}<|endoftext|>", "rejected": "so<|endoftext|>"} for i in range(3)]
    rows[1]["rejected"] = "so"
    found = r"--dataset row 2: 5 of 6 answers spell out eos, and the chat template ends none \(allowed: all"
    with pytest.raises(UserError, match=found):
        pairs_of(tokenizer, rows, prompt_key=None)
    rows[1]["rejected"] = "so " * 300  # cut: its end is not seen
    assert len(pairs_of(tokenizer, rows, prompt_key=None)) == 3
    assert len(pairs_of(tokenizer, rows, prompt_key=None, scored=False)) == 3, "train_dpo adds eos"


@pytest.mark.parametrize("make", [lambda: bpe("<|endoftext|>", template("<|im_end|>")), lambda: stories(None)])
def test_rewards_of_texts_without_a_template(make, tmp_path):
    """Whole texts: a SentencePiece tokenizer adds no space between prompt and answer."""
    tokenizer = make()
    classifier(tokenizer, tmp_path)
    pair = pairs_of(tokenizer, [{"prompt": "A:", "chosen": " The dog", "rejected": "The\ndog"}])[0]
    server, stops = ModelScorer(str(tmp_path), dtype=torch.float32, device="cpu"), stop_ids(tokenizer, str(tmp_path))
    prompt_ids, eos = tokenizer("A:")["input_ids"], tokenizer.eos_token_id
    for side, text in (("chosen", " The dog"), ("rejected", "The\ndog")):
        trained = pair[f"{side}_ids"]
        assert trained == [*tokenizer("A:" + text)["input_ids"], eos]
        response = trained[len(prompt_ids) :]
        assert response_text(tokenizer, prompt_ids, response) == text
        assert server.input_ids("A:", text) == server.input_ids(tokenizer.decode(prompt_ids), text) == trained
        for stop in stops:  # also one that no text of the data ends with
            assert as_trained(prompt_ids, [*response[:-1], stop], turn_ends(tokenizer), stops, eos) == response


def test_eos_of_a_model_folder_is_that_of_generation_config_or_else_of_config(tmp_path):
    tokenizer = bpe("<|endoftext|>", template("<eot>"), "<eot>")
    end = tokenizer.convert_tokens_to_ids("<eot>")
    assert stop_ids(tokenizer, str(tmp_path)) == tuple(sorted((2000, end)))
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": [7, 8]}}))
    assert stop_ids(tokenizer, str(tmp_path)) == tuple(sorted((7, 8, 2000, end)))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [2001, 5]}))
    assert stop_ids(tokenizer, str(tmp_path)) == tuple(sorted((5, 2000, 2001, end)))
    (tmp_path / "generation_config.json").write_text("{}")
    assert 5 in stop_ids(tokenizer, str(tmp_path)), "a generation config without eos says nothing"
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 6}))
    assert stop_ids(tokenizer, str(tmp_path)) == tuple(sorted((6, 2000, end)))


def test_the_end_is_the_one_that_every_turn_has():
    """Cohere writes two tokens behind an answer. Phi-3 writes eos behind the last turn, gpt-oss another end there."""
    two = bpe("<|endoftext|>", template("<a><b>", ""), "<a>", "<b>")
    assert two.convert_ids_to_tokens(turn_ends(two).end) == "<b>"
    last = "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
    phi = bpe("<|endoftext|>", template("<|im_end|>") + last)
    assert phi.convert_ids_to_tokens(turn_ends(phi).end) == "<|im_end|>"
    assert phi.decode(turn_ends(phi).after) == "\n<|endoftext|>"
    other = template("<|im_end|>").replace("'<|im_end|>\\n'", "('<c>' if loop.last else '<|im_end|>\\n')")
    other = other.replace("m.content + '<|im_end|>\\n'", "m.content + ('<c>' if loop.last else '<|im_end|>\\n')")
    harmony = bpe("<|endoftext|>", other, "<c>")
    assert harmony.convert_ids_to_tokens(turn_ends(harmony).end) == "<c>"
    assert turn_ends(bpe("<|endoftext|>", None)).end is None


ROWS = {
    "pairs": (tokenize_preference, {"prompt": ASK, "chosen": "ok", "rejected": "so"}),
    "kto": (tokenize_unpaired, {"prompt": ASK, "completion": "ok", "label": True}),
    "kto of pairs": (tokenize_unpaired, {"prompt": ASK, "chosen": "ok", "rejected": "so"}),
}


@pytest.mark.parametrize("kind", ROWS)
def test_preferences_without_a_stop_token_are_refused(kind):
    """As in train_sft. A reward model writes no answers, so it needs none."""
    tokenize, row = ROWS[kind]
    keys = {"completion_key": "completion", "label_key": "label"} if kind.startswith("kto") else {"margin_key": None}
    keys |= {"prompt_key": None, "chosen_key": "chosen", "rejected_key": "rejected", "flag": "--dataset"}
    keys |= {"input_template": None, "apply_chat_template": False, "max_len": 200}
    other = {**row, "prompt": [{"role": "user", "content": "2 + 2?"}]} | ({"label": False} if "label" in row else {})
    rows = datasets.Dataset.from_list([row, other])
    no_end, end = PAIRS["endoftext, the next role"][0](), PAIRS["endoftext, im_end"][0]()
    with pytest.raises(UserError) as error:
        tokenize(rows, no_end, **keys)
    assert str(error.value).startswith("--dataset: no sample trains a stop token") and "--allow_no_stop" in str(
        error.value
    )
    for way in ({"allow_no_stop": True}, {"part": Part(is_evaluation=True)}):
        samples, ledger = tokenize(rows, no_end, **keys, **way)
        assert ledger["num_stop_trained"] == 0 and "WARNING: no sample trains a stop" in ledger.report("data")
    samples, ledger = tokenize(rows, end, **keys)
    assert ledger["num_stop_trained"] == len(samples) and "WARNING" not in ledger.report("data")
    if kind == "pairs":
        _, ledger = tokenize(rows, no_end, scored=True, **keys)
        assert "stop" not in ledger.report("data")
    longest = max(len(sample.get("chosen_ids") or sample["input_ids"]) for sample in samples)
    assert "--max_len cuts all" in tokenize(rows, end, **keys | {"max_len": longest - 3})[1].report("data")


def test_the_flag_for_no_stop_is_of_train_dpo_without_online():
    flags = ["--pretrain", "x", "--dataset", "y", "--allow_no_stop"]
    args = parse_arguments(DPOArguments, "train_dpo", flags)
    assert args.preference.allow_no_stop
    with pytest.raises(UserError, match="--allow_no_stop: no such flag"):
        parse_arguments(RMArguments, "train_rm", flags)
