"""train_dpo --online: pairs of the policy's own answers, against a plain loop that ranks and trains them by itself."""

import json
import re

import pytest
import torch
from launch import read_steps, train_many
from transformers import AutoModelForCausalLM

from trainer.datasets.demos.demo import make_demo
from trainer.errors import UserError
from trainer.runs.rl.online_dpo import train
from trainer.runs.rl.rl_checks import check_online

STEPS, PROMPTS, EACH, BATCH, BETA, RATE = 5, 4, 4, 2, 0.5, 2e-3
# many ties, so that they are seen to have no loss
REWARD = """
def reward_func(prompts, responses, labels):
    return [float(min(sum(word in label for word in response), 2)) for response, label in zip(responses, labels)]
"""
FLAGS = (
    "--online --label_key label --param_dtype fp32 --max_samples 12 --no_save --prompt_max_len 64 --generate_max_len 6 "
)
FLAGS += f"--rollout_batch_size {PROMPTS} --n_samples_per_prompt {EACH} --train_batch_size {BATCH} --beta {BETA} "
FLAGS += (
    f"--micro_train_batch_size 1 --max_steps {STEPS} --learning_rate {RATE} --lr_scheduler constant --lr_warmup_ratio 0"
)
LAYOUTS = {
    "dp2": "--backend fsdp2",
    "tp2": "--backend fsdp2 --tensor_parallel_size 2",
    "ring2": "--backend fsdp2 --ring_attn_size 2 --packing_samples --micro_train_batch_size 2",
    "zero3": "--backend deepspeed --zero_stage 3 --packing_samples",
    "zero1-tp2": "--backend deepspeed --zero_stage 1 --tensor_parallel_size 2",
}


def line_of(folder, name: str, more: str) -> list[str]:
    data = ["--pretrain", f"{folder}/demo/model", "--dataset", f"{folder}/demo/prompts.jsonl"]
    own = ["--reward_func", f"{folder}/reward.py", "--output_dir", f"{folder}/{name}", *more.split()]
    return ["train_dpo", *FLAGS.split(), *data, *own]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs on one rank, which write their rollouts, and the same rollouts on every layout."""
    folder = tmp_path_factory.mktemp("online")
    make_demo(str(folder / "demo"))
    (folder / "reward.py").write_text(REWARD)
    alone = [line_of(folder, "dpo", ""), line_of(folder, "simpo", "--loss simpo --max_steps 2")]
    train_many(1, alone, folder, timeout=300)
    frozen = f" --rollouts_from {folder}/dpo/rollouts.jsonl"
    train_many(2, [line_of(folder, name, more + frozen) for name, more in LAYOUTS.items()], folder, timeout=500)
    return folder


def answer_log_prob(model, sample: dict) -> torch.Tensor:
    ids, start = sample["prompt_ids"] + sample["response_ids"], len(sample["prompt_ids"])
    log_probs = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return sum(log_probs[place - 1, ids[place]] for place in range(start, len(ids)))


@pytest.fixture(scope="module")
def plain(folder):
    """(loss, gradient norm, pairs with a loss) of each step, by equation 7 of Rafailov et al. 2023, one answer at a time."""
    samples = [json.loads(line) for line in (folder / "dpo/rollouts.jsonl").read_text().splitlines()]
    model, reference = (AutoModelForCausalLM.from_pretrained(folder / "demo/model", dtype=torch.float32) for _ in "12")
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0), []
    groups = [samples[start : start + EACH] for start in range(0, len(samples), EACH)]
    for start in range(0, len(groups), BATCH):
        losses = []
        for group in groups[start : start + BATCH]:
            ranked = sorted(group, key=lambda sample: sample["score"])  # stable: the first of equal scores is first
            worst, best = ranked[0], next(s for s in group if s["score"] == ranked[-1]["score"])
            if best["score"] == worst["score"]:
                continue
            with torch.no_grad():
                fixed = answer_log_prob(reference, best) - answer_log_prob(reference, worst)
            margin = answer_log_prob(model, best) - answer_log_prob(model, worst) - fixed
            losses.append(-torch.log(torch.sigmoid(BETA * margin)))
        if losses:
            (sum(losses) / len(losses)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item() if losses else 0.0
        found.append((sum(loss.item() for loss in losses) / max(len(losses), 1), norm, len(losses)))
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        optimizer.step()
        optimizer.zero_grad()
    return found[:STEPS]


@pytest.mark.parametrize("name", ["dpo", *LAYOUTS])
def test_every_layout_trains_the_pairs_as_the_plain_loop_does(folder, plain, name):
    rows = read_steps(folder / name)
    assert [row["tokens"] for row in rows] == [count for *_, count in plain] and len({c for *_, c in plain}) > 1
    for row, (loss, norm, _) in zip(rows, plain, strict=True):
        assert row["loss"] == pytest.approx(loss, abs=2e-6) and row["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert rows[-1]["loss"] != pytest.approx(0.6931472, abs=1e-3)  # the policy has left its reference
    own = read_steps(folder / "dpo")
    for key in ("reward", "tied_pairs", "score_margin", "batch_hash"):
        assert [row[key] for row in rows] == [row[key] for row in own]


def test_what_is_logged(folder):
    first, last = read_steps(folder / "dpo")[:: STEPS - 1]
    assert first["chosen_rewards"] == pytest.approx(0, abs=1e-5) and first["score_margin"] >= 1
    assert 0 < sum(row["tied_pairs"] for row in (first, last)) < 2 and last["rollout"] == 2
    assert first["weights_checksum"] != last["weights_checksum"]
    assert "kl" not in read_steps(folder / "simpo")[0]


def test_log_probs_of_the_engine_are_those_of_training_on_every_layout(folder):
    """The first step of a rollout compares them. Two steps are one rollout of four pairs."""
    for name in ("dpo", "simpo", *LAYOUTS):
        rows = read_steps(folder / name)
        assert all(row["rollout_logprob_diff"] < 1e-5 for row in rows[:2]), name
    # the replay of layouts compares with the log-probs in the file, which are of weights that are equal but for rounding
    values = {name: [row["rollout_logprob_diff"] for row in read_steps(folder / name)] for name in ("dpo", *LAYOUTS)}
    assert all(0 < max(of_one) < 1e-4 for of_one in values.values()), values


@pytest.mark.parametrize(
    "flags",
    [
        ["--n_samples_per_prompt", "1"],
        ["--loss", "kto"],
        ["--precompute_ref_logps"],
        ["--max_staleness", "1"],
        ["--aux_loss_coef", "0.1"],
        ["--ref_model", "m", "--loss", "simpo"],
        ["--label_smoothing", "0.1"],
        ["--temperature", "0.5", "--rollout_engine", "sglang", "--engine_urls", "http://a"],
    ],
)
def test_flags_that_do_not_fit_are_refused(flags):
    line = ["--online", "--pretrain", "m", "--dataset", "d", "--reward_func", "math", "--label_key", "l"]
    with pytest.raises(UserError, match=re.escape(flags[0])):
        train(check_online([*line, "--n_samples_per_prompt", "2", *flags]))
