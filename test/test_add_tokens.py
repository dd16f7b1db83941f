"""--add_tokens: the rows of new tokens are the mean of the old ones, on every layout; what is saved loads by transformers."""

import json
import math

import datasets
import pytest
import torch
from launch import read_steps, train_many
from tiny_tokenizers import BPE
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from trainer.datasets.demos.demo import make_demo
from trainer.errors import UserError
from trainer.flags.common_flags import LoraArguments, ModelArguments, SFTArguments
from trainer.flags.preference_flags import DPOArguments
from trainer.flags.rl_flags import PPOArguments
from trainer.flags.rules import refuse
from trainer.models.added_tokens import folder_with_tokens
from trainer.runs.exported_models import export

pytestmark = pytest.mark.skipif(not BPE.is_file(), reason="real tokenizers absent: ../shared/data")
NAMES = "<a>, <|call|>"


def tiny(kind: str, rows: int):
    if kind == "gpt2":
        return GPT2LMHeadModel(GPT2Config(vocab_size=rows, n_positions=32, n_embd=16, n_layer=1, n_head=2))
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=rows, tie_word_embeddings=kind == "tied", **sizes))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))


def saved(kind: str, spare: int, folder, shard: str = "2GB"):
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(BPE), eos_token="<|endoftext|>")
    torch.manual_seed(0)
    model = tiny(kind, len(tokenizer) + spare)
    model.save_pretrained(folder, max_shard_size=shard)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


@pytest.mark.parametrize(("kind", "spare"), [("tied", 0), ("untied", 0), ("untied", 5), ("gpt2", 1)])
def test_new_rows_are_the_mean_as_in_transformers(kind, spare, tmp_path):
    model, tokenizer = saved(kind, spare, tmp_path / "model", "40KB")
    size = len(tokenizer)
    folder, line = folder_with_tokens(str(tmp_path / "model"), NAMES)
    assert f"<a> is {size}, <|call|> is {size + 1}" in line
    grown, again = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert again("x<a>y<|call|>", add_special_tokens=False)["input_ids"][1::2] == [size, size + 1]
    assert [again.added_tokens_decoder[size + number].special for number in (0, 1)] == [False, True]
    rows = size + spare if spare > 1 else -(-(size + 2) // 8) * 8
    assert grown.config.vocab_size == rows == grown.get_input_embeddings().weight.shape[0]
    model.resize_token_embeddings(size)  # without the spare rows, which no text has trained
    model.resize_token_embeddings(size + 2, mean_resizing=True)  # it adds noise of 1e-9 of the covariance
    for mine, theirs in zip(
        (grown.get_input_embeddings(), grown.get_output_embeddings()),
        (model.get_input_embeddings(), model.get_output_embeddings()),
        strict=True,
    ):
        assert torch.equal(mine.weight[:size], theirs.weight[:size])
        torch.testing.assert_close(mine.weight[size : size + 2], theirs.weight[size:], atol=1e-5, rtol=0)
    assert (grown.lm_head.weight is grown.get_input_embeddings().weight) == (kind != "untied")
    assert folder_with_tokens(str(tmp_path / "model"), NAMES)[0] == folder
    more, line = folder_with_tokens(folder, f"<a>,a,{'<b>'}")
    assert "<a> is in the vocabulary already" in line and "a is in the vocabulary already" in line
    assert len(AutoTokenizer.from_pretrained(more)) == size + 3
    assert folder_with_tokens(more, "<b>")[0] == more


def test_what_cannot_get_tokens_is_refused(tmp_path):
    saved("tied", 0, tmp_path / "model")
    with pytest.raises(UserError, match="--add_tokens: '<a>,,'"):
        folder_with_tokens(str(tmp_path / "model"), "<a>,,")
    torch.save({}, tmp_path / "model/pytorch_model.bin")
    (tmp_path / "model/model.safetensors").unlink()
    with pytest.raises(UserError, match=r"holds \.bin files"):
        folder_with_tokens(str(tmp_path / "model"), "<a>")
    given = {"model": ModelArguments(pretrain="m", add_tokens="<a>")}
    refuse("train_dpo", DPOArguments(**given))
    with pytest.raises(UserError, match="with an adapter: the embedding is frozen"):
        refuse("train_sft", SFTArguments(**given, lora=LoraArguments(lora_rank=4)))
    with pytest.raises(UserError, match="with train_ppo"):
        refuse("train_ppo", PPOArguments(**given))


LAYOUTS = {
    "fsdp2": ["--backend", "fsdp2"],
    "tp": ["--backend", "fsdp2", "--tensor_parallel_size", "2"],
    "zero3": ["--backend", "deepspeed", "--zero_stage", "3"],
}


def check_preferences(runs, source: str, size: int) -> None:
    """The pairs have <a> in the chosen answer, and <|call|> nowhere. The loss begins at log 2 only if the reference has both."""
    begun = AutoModelForCausalLM.from_pretrained(folder_with_tokens(source, NAMES)[0]).get_input_embeddings().weight
    assert read_steps(runs / "train_dpo")[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    kinds = {"train_dpo": AutoModelForCausalLM, "train_rm": AutoModelForSequenceClassification}
    for command, kind in kinds.items():
        model = kind.from_pretrained(runs / command / "model")
        rows = model.get_input_embeddings().weight
        assert rows.shape == begun.shape and model.config.vocab_size == len(rows) >= size + 2
        text = AutoTokenizer.from_pretrained(runs / command / "model")("<a><|call|>", add_special_tokens=False)
        assert text["input_ids"] == [size, size + 1]
        assert (rows[size] - begun[size]).abs().max() > 1e-3
    assert torch.equal(rows[size + 1], begun[size + 1])  # of train_rm: no text and no output layer trains it


def test_layouts_agree_and_what_is_saved_loads(tmp_path):
    make_demo(str(tmp_path / "demo"))
    source, rows = str(tmp_path / "demo/model"), tmp_path / "rows.jsonl"
    answers = ["<a>", "b <a> c", "<|call|>f", "d"] * 4
    talks = [
        [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": a}] for n, a in enumerate(answers)
    ]
    rows.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    given = [
        "--pretrain",
        source,
        "--dataset",
        str(rows),
        "--add_tokens",
        NAMES,
        "--max_len",
        "64",
        "--param_dtype",
        "fp32",
    ]
    given += [
        "--train_batch_size",
        "8",
        "--micro_train_batch_size",
        "2",
        "--learning_rate",
        "1e-2",
        "--max_epochs",
        "2",
    ]
    lines = [
        [*given, *flags, "--save_steps", "2", "--output_dir", f"{tmp_path}/{name}"] for name, flags in LAYOUTS.items()
    ]
    again = ["--load_checkpoint", f"{tmp_path}/fsdp2/checkpoints/step_2", "--output_dir", f"{tmp_path}/resumed"]
    pairs = tmp_path / "pairs.jsonl"
    sides = {side: [{"role": "assistant", "content": text}] for side, text in (("chosen", "<a> b"), ("rejected", "d"))}
    pairs.write_text("".join(json.dumps({"prompt": talk[:1], **sides}) + "\n" for talk in talks))
    lines += [
        [command, *given, "--dataset", str(pairs), *LAYOUTS[name], "--output_dir", f"{tmp_path}/{command}"]
        for command, name in (("train_dpo", "fsdp2"), ("train_rm", "zero3"))
    ]
    output = train_many(2, [*lines, [*given, *LAYOUTS["zero3"], *again]], tmp_path, timeout=280)
    losses = {name: [row["loss"] for row in read_steps(tmp_path / name)] for name in LAYOUTS}
    assert len(losses["fsdp2"]) == 4
    for name in ("tp", "zero3"):
        assert losses[name] == pytest.approx(losses["fsdp2"], rel=1e-5), name
    assert [row["loss"] for row in read_steps(tmp_path / "resumed")] == pytest.approx(losses["fsdp2"][2:], rel=1e-5)
    export(f"{tmp_path}/fsdp2/checkpoints/step_4", f"{tmp_path}/exported")
    held = [AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("exported", "fsdp2/model")]
    assert all(torch.equal(tensor, held[1][name]) for name, tensor in held[0].items())
    tokenizer = AutoTokenizer.from_pretrained(source)
    assert f"--add_tokens: <a> is {len(tokenizer)}, <|call|> is {len(tokenizer) + 1}" in output
    check_preferences(tmp_path, source, len(tokenizer))
    models = {}
    for name in LAYOUTS:
        models[name] = AutoModelForCausalLM.from_pretrained(tmp_path / name / "model")
        ids = AutoTokenizer.from_pretrained(tmp_path / name / "model")("<a><|call|>", add_special_tokens=False)[
            "input_ids"
        ]
        assert ids == [len(tokenizer), len(tokenizer) + 1]
    first = models["fsdp2"].get_input_embeddings().weight
    torch.testing.assert_close(models["zero3"].get_input_embeddings().weight, first, atol=1e-4, rtol=1e-3)
    assert not torch.equal(first[ids[0]], first[ids[1]])  # they began equal, and were trained apart
