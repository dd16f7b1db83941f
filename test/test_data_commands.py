"""Commands at the border: rewards and stops with an eos that ends no turn, arguments of the template, rows too large for a model."""

import json
import re

import pytest
import torch
from datasets import Dataset
from launch import forked
from tiny_tokenizers import DATA, bpe, template
from transformers import (
    AutoModelForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from trainer.compare.runs.many_runs import RUN_BEGINS
from trainer.datasets.samples.preference import tokenize_preference

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="real tokenizers absent: ../shared/data")
SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
WORDS = [" the", " and", " was", " to"]  # any sequence of them is tokenized as it was sampled
LONGEST = 12
SHORT = "--param_dtype fp32 --backend fsdp2 --max_steps 1 --train_batch_size 4 --micro_train_batch_size 2 --no_save"
ROLLOUT = (
    "--pretrain policy --dataset asks.jsonl --reward_pretrain rm --n_samples_per_prompt 4 --rollout_batch_size 4 "
    f"--prompt_max_len 64 --generate_max_len {LONGEST}"
)
RUNS = {
    "ppo": f"train_ppo {ROLLOUT} --advantage_estimator rloo",
    "dpo": f"train_dpo --online {ROLLOUT}",
    "deep": "train_sft --pretrain policy --dataset talks.jsonl",
    "depth": "train_sft --pretrain policy --dataset talks.jsonl",
    "positions": "train_sft --pretrain gpt2 --dataset long.jsonl",
    "kd": "train_kd --pretrain policy --teacher teacher --dataset asks.jsonl --teacher_answers 1 --kd_coef 0 "
    "--temperature 0 --generate_max_len 6 --max_len 64",
}
REFUSED = {
    "depth": "--template_args: the chat template has no argument 'depth'",
    "positions": "--dataset row 3: 81 tokens, more than the model's 48 positions",
    "kd": "--teacher_answers row 1: token 2010 is beyond the 2003 rows of the model's embedding",
}


def policy(tokenizer, rows: int, likely: list[int]) -> LlamaForCausalLM:
    """A model that writes the tokens `likely` in any order, whatever it reads: all its embeddings are one vector."""
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=rows, pad_token_id=tokenizer.pad_token_id, **SIZES))
    with torch.no_grad():
        model.model.embed_tokens.weight[:] = torch.randn(SIZES["hidden_size"])
        last = model.model(torch.tensor([[0]])).last_hidden_state[0, 0]
        model.lm_head.weight.zero_()
        model.lm_head.weight[likely] = 25 * last / last.square().sum()
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """(folder, tokenizer, what each run printed) of a launch. The eos of the tokenizer ends no turn."""
    folder = tmp_path_factory.mktemp("border")
    chat = template("<|im_end|>").replace("m.content +", "m.content + (' deep' if deep else '') +")
    tokenizer = bpe("<|endoftext|>", "{% set deep = deep or false %}" + chat)
    size, words = len(tokenizer), [tokenizer(word)["input_ids"] for word in WORDS]
    assert all(len(ids) == 1 for ids in words)
    scorer = LlamaConfig(vocab_size=size, num_labels=1, pad_token_id=tokenizer.pad_token_id, **SIZES)
    models = {
        "policy": policy(tokenizer, size, [*(ids[0] for ids in words), tokenizer.convert_tokens_to_ids("<|im_end|>")]),
        "teacher": policy(tokenizer, size + 8, [size + 7]),  # a token of no vocabulary
        "rm": LlamaForSequenceClassification(scorer),
        "gpt2": GPT2LMHeadModel(GPT2Config(vocab_size=size, n_positions=48, n_embd=16, n_layer=1, n_head=2)),
    }
    torch.nn.init.normal_(models["rm"].score.weight)
    for name, model in models.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    asks = [[{"role": "user", "content": f"{number} + 1?"}] for number in range(4)]
    rows = {"asks": [{"prompt": turns} for turns in asks]}
    rows["talks"] = [{"messages": [*turns, {"role": "assistant", "content": "two"}]} for turns in asks]
    rows["long"] = [*rows["talks"][:2], {"messages": [*asks[0], {"role": "assistant", "content": "two " * 60}]}]
    for name, found in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    lines = [[*line.split(), *SHORT.split(), "--output_dir", name] for name, line in RUNS.items()]
    lines[list(RUNS).index("deep")] += ["--template_args", '{"deep": true}']
    lines[list(RUNS).index("depth")] += ["--template_args", '{"depth": 1}']
    (folder / "runs.json").write_text(json.dumps(lines))
    code, output = forked(1, "-m", "trainer.compare.runs.many_runs", "runs.json", timeout=240, cwd=folder)
    assert code == 1 and output.endswith("RuntimeError: exit code 2"), output[-6000:]  # some are refused
    return folder, tokenizer, dict(zip(RUNS, re.split(RUN_BEGINS.format(r"\d"), output)[1:], strict=True))


def read(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("name", ["ppo", "dpo"])
def test_a_run_scores_the_conversations_that_train_rm_trains_and_stops_at_the_end_of_a_turn(folder, name):
    folder, tokenizer, _ = folder
    end, model = tokenizer.convert_tokens_to_ids("<|im_end|>"), AutoModelForSequenceClassification
    model, rows = model.from_pretrained(folder / "rm").eval(), read(folder / name / "rollouts.jsonl")
    asks = [row["prompt"] for row in read(folder / "asks.jsonl")]
    keys = {"prompt_key": "prompt", "chosen_key": "chosen", "rejected_key": "rejected", "margin_key": None}
    keys |= {"input_template": None, "apply_chat_template": False, "max_len": 200, "flag": "--dataset"}
    compared = 0
    for row in rows:
        response = row["response_ids"]
        assert end not in response[:-1] and (response[-1] == end or len(response) == LONGEST)
        if response[-1] != end or len(response) == 1:
            continue  # train_rm trains whole answers that are not empty
        turns = [{"role": "assistant", "content": text} for text in (tokenizer.decode(response[:-1]), "other")]
        pair = {"prompt": asks[row["row"]], "chosen": turns[:1], "rejected": turns[1:]}
        [trained], _ = tokenize_preference(Dataset.from_list([pair]), tokenizer, **keys)
        assert trained["chosen_ids"] != row["prompt_ids"] + response  # the template goes on behind the end
        with torch.no_grad():
            expected = model(torch.tensor([trained["chosen_ids"]])).logits[0, 0].item()
        assert row["score"] == pytest.approx(expected, abs=1e-5)
        compared += 1
    assert len(rows) == 16 and compared > 4 and len({row["score"] for row in rows}) > 4


def test_arguments_of_the_template_are_in_the_text_that_is_shown(folder):
    assert "1? deep<|im_end|>\n<|im_start|>assistant\n[[two deep<|im_end|>" in folder[2]["deep"]


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_one_line(folder, name):
    output = folder[2][name]
    assert re.search(f"^error: {re.escape(REFUSED[name])}", output, re.MULTILINE) and "step 1/" not in output, output
