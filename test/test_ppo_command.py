"""train_ppo from the command line: every estimator and loss, exact resume, failing rewards, and one line for what is wrong."""

import importlib.util
import json
import re
import shutil
import sys

import pytest
import torch
from launch import FULL, SHORT_ROLLOUTS, in_fork, read_rows, read_steps, run_process, torchrun, train_many
from safetensors.torch import load_file, save_file
from serve_load import serving

from trainer.datasets.demos.demo import make_demo
from trainer.errors import UserError

# a reward with a signal for a model that knows nothing: how many of the response's words are digits of the label
DENSE = """
def reward_func(prompts, responses, labels):
    scores = [sum(word in label for word in response) / 32 for response, label in zip(responses, labels)]
    return scores, {"words": [len(response.split()) for response in responses]}
"""


EOS = 2  # of the demo's tokenizer, whose pad token is 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ppo")
    make_demo(str(folder / "demo"))
    (folder / "dense.py").write_text(DENSE)
    return folder


def flags(folder, name: str, *more: str) -> list[str]:
    line = ["--pretrain", f"{folder}/demo/model", "--dataset", f"{folder}/demo/prompts.jsonl", "--label_key", "label"]
    line += ["--reward_func", f"{folder}/dense.py", "--param_dtype", "fp32", "--max_samples", "24", "--no_save"]
    line += [*SHORT_ROLLOUTS, "--learning_rate", "1e-3"]
    line += ["--n_samples_per_prompt", "2", "--train_batch_size", "4"]
    line += [] if "--max_tokens_per_micro_batch" in more else ["--micro_train_batch_size", "2"]
    return [*line, "--output_dir", str(folder / name), *more]


def train_alone(line: list[str], timeout: float = 240) -> tuple[int, str]:
    return in_fork("-m", "trainer.cli.train_ppo", *line, timeout=timeout)


# --- what there is to choose

KL = ["--init_kl_coef", "0.05"]
CHOICES = {
    "gae": ["--advantage_estimator", "gae", "--freezing_actor_steps", "2", "--normalize_reward", *KL, "--kl_target", "1"],
    "reinforce": ["--advantage_estimator", "reinforce", "--policy_loss", "reinforce", "--reward_clip_range", "0", "0.1"],
    "reinforce_baseline": ["--advantage_estimator", "reinforce_baseline", "--loss_agg", "sequence", *KL],
    "rloo": ["--advantage_estimator", "rloo", "--max_epochs", "2", "--max_tokens_per_micro_batch", "64"],
    "gspo": ["--advantage_estimator", "group_norm", "--policy_loss", "gspo", "--loss_agg", "sequence"],
    "cispo": ["--advantage_estimator", "group_norm", "--policy_loss", "cispo", "--eps_clip_high", "0.3", "--packing_samples"],
    "sapo": ["--advantage_estimator", "group_norm", "--policy_loss", "sapo", "--advantage_batch_std", "--rollout_kl_max", "9"],
    "dr_grpo": ["--advantage_estimator", "dr_grpo", "--loss_agg", "fixed_length", "--overlong_buffer_len", "4"],
    "dapo": ["--advantage_estimator", "group_norm", "--dynamic_filtering", "--dynamic_filtering_range", "0.0", "0.2"],
    "cut": ["--advantage_estimator", "rloo", "--top_p", "0.95", "--top_k", "40", "--min_p", "0.02", "--init_kl_coef", "0.1"],
    "preset": ["--preset", "dapo", "--dynamic_filtering", "false", "--generate_max_len", "4"],
    "stop": ["--advantage_estimator", "dr_grpo", "--stop", "1", "2", "--dual_clip", "3", "--entropy_loss_coef", "0.01"],
}  # fmt: skip


@pytest.fixture(scope="module")
def chosen(folder):
    """One rank, four steps of each."""
    lines = [["train_ppo", *flags(folder, name, *more, "--max_steps", "4")] for name, more in CHOICES.items()]
    train_many(1, lines, folder, timeout=900)
    return {name: read_steps(folder / name) for name in CHOICES}


@pytest.mark.parametrize("name", CHOICES)
def test_every_choice_trains(chosen, name):
    rows = chosen[name]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["rollout"] for row in rows] == ([0] * 4 if name == "rloo" else [0, 0, 1, 1])
    assert rows[0]["ratio_deviation"] == 0 and rows[0]["rollout_logprob_diff_max"] < 1e-4
    wanted = "reward reward_std reward_words policy_loss entropy clip_fraction clip_fraction_low response_length truncated_fraction "
    wanted += (
        "rollout_logprob_diff rollout_kl time_sync time_generate time_reward time_logprobs weights_checksum reward_p50"
    )
    for row in rows:
        assert not set(wanted.split()) - row.keys()
        assert all(value == value for value in row.values())  # no NaN


def test_what_the_choices_do(chosen):
    gae = chosen["gae"]
    assert [row["grad_norm"] > 0 for row in gae] == [False, False, True, True]  # the critic goes first
    assert gae[0]["weights_checksum"] == gae[2]["weights_checksum"]
    assert all(row["critic_grad_norm"] > 0 and row["value_loss"] > 0 for row in gae)
    assert gae[0]["kl_coef"] == 0.05 > gae[2]["kl_coef"]  # far below its target
    assert gae[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert chosen["rloo"][0]["ratio_deviation"] == 0 < chosen["rloo"][1]["ratio_deviation"]  # the first step moved it
    assert chosen["stop"][0]["response_length"] < chosen["rloo"][0]["response_length"]
    assert all(row["truncated_fraction"] == 1 and row["tokens"] == row["loss"] == 0 for row in chosen["preset"])
    assert chosen["dapo"][0]["prompts_drawn"] >= 4 and chosen["dapo"][0]["reward"] < 0.2
    assert chosen["rloo"][0]["weights_checksum"] == chosen["gspo"][0]["weights_checksum"]
    assert chosen["rloo"][0]["reward"] == chosen["gspo"][0]["reward"]  # the same samples, whatever is learnt from them


def test_rollouts_are_trained_on_with_the_truncation_that_they_were_drawn_with(chosen, folder):
    """The first rollout of two updates: the first one is on-policy over the kept tokens, whoever drew them."""
    frozen = ["--max_steps", "2", "--rollouts_from", str(folder / "cut/rollouts.jsonl")]
    code, output = train_alone(flags(folder, "cut-again", *CHOICES["cut"], *frozen))
    assert code == 0, output[-3000:]
    again = read_steps(folder / "cut-again")
    assert [row["loss"] for row in again] == [row["loss"] for row in chosen["cut"][:2]]
    assert again[0]["ratio_deviation"] == 0 and 0 < again[0]["entropy"] < chosen["rloo"][0]["entropy"]
    code, output = train_alone(flags(folder, "cut-free", *CHOICES["rloo"], *frozen))
    assert code == 2 and "error: --top_p, --top_k, --min_p: " in output, output[-3000:]


def test_samples_can_be_read_and_trained_on_again(chosen, folder):
    lines = [json.loads(line) for line in (folder / "gspo/rollouts.jsonl").read_text().splitlines()]
    assert [(row["rollout"], row["number"]) for row in lines] == [(r, n) for r in (0, 1) for n in range(8)]
    assert lines[0]["prompt"].startswith("<|im_start|>user\nSort these digits:") and lines[0]["label"]
    again = [*CHOICES["gspo"], "--max_steps", "4", "--rollouts_from", str(folder / "gspo/rollouts.jsonl")]
    code, output = train_alone(flags(folder, "again", *again))
    assert code == 0, output[-3000:]
    for row, expected in zip(read_steps(folder / "again"), chosen["gspo"], strict=True):
        assert [row[key] for key in ("loss", "grad_norm", "reward")] == [
            expected[key] for key in ("loss", "grad_norm", "reward")
        ]


def test_samples_appear_in_the_mirrors(folder):
    """TensorBoard and wandb, offline: a table to each rollout, with what the policy wrote."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    line = flags(
        folder, "mirrors", "--advantage_estimator", "dr_grpo", "--max_steps", "4", "--use_tensorboard", "--use_wandb"
    )
    command = [sys.executable, "-m", "trainer.cli.train_ppo", *line]
    code, output = run_process(command, timeout=240, WANDB_MODE="offline")
    assert code == 0, output[-3000:]
    rows = [json.loads(line) for line in (folder / "mirrors/rollouts.jsonl").read_text().splitlines()]
    texts = EventAccumulator(str(folder / "mirrors/tensorboard")).Reload().Tensors("samples/text_summary")
    tables = [json.loads(path.read_text()) for path in (folder / "mirrors/wandb").rglob("samples*.table.json")]
    assert [event.step for event in texts] == [0, 2] and len(tables) == 2
    for rollout, event in enumerate(texts):
        own = [row for row in rows if row["rollout"] == rollout]
        text = event.tensor_proto.string_val[0].decode()
        assert all(str(row["score"]) in text for row in own) and len(text.splitlines()) == 2 + len(own)
        data = [[row[key] for key in ("prompt", "response", "label", "score", "finished")] for row in own]
        assert data in [table["data"] for table in tables]


# --- several rewards

STYLE = """
def reward_func(prompts, responses, labels, finished, level, **columns):
    for prompt, label, own, extra in zip(prompts, labels, level, columns["extra"]):
        assert prompt == f"sort {own}" and label == str(own) and extra == [own, {"twice": 2 * own}], (prompt, own, extra)
    assert set(columns) == {"q", "label", "extra"}
    return [own / 10 for own in level], {"cut": [not value for value in finished]}
"""


def test_several_rewards_get_the_columns_of_their_rows(folder):
    """Some prompts are left out, and the evaluation has other rows: a reward that got another row's columns would fail."""
    (folder / "style.py").write_text(STYLE)
    for name, numbers in (("several", range(12)), ("several-eval", range(40, 48))):
        rows = [{"q": f"sort {n}", "label": str(n), "level": n, "extra": [n, {"twice": 2 * n}]} for n in numbers]
        rows[3]["q"] = "much too long " * 60
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = ["--dataset", f"{folder}/several.jsonl", "--input_key", "q", "--advantage_estimator", "rloo"]
    line += ["--eval_dataset", f"{folder}/several-eval.jsonl", "--eval_steps", "2", "--max_steps", "4"]
    line += ["--reward_func", f"{folder}/dense.py, {folder}/style.py", "--reward_weights", "2", "0.5"]
    code, output = train_alone(flags(folder, "several", *line))
    assert code == 0 and "step 1: evaluating, then generating " in output, output[-3000:]
    for row in read_steps(folder / "several"):
        assert row["reward"] == pytest.approx(2 * row["reward_dense"] + 0.5 * row["reward_style"])
        assert row["reward_style_cut"] == row["truncated_fraction"] and "reward_dense_words" in row
    evaluations = [row for row in read_rows(folder / "several") if "eval_reward" in row]
    assert [row["step"] for row in evaluations] == [0, 2, 4]
    assert all(row["eval_reward_style"] == pytest.approx((sum(range(40, 48)) - 43) / 70) for row in evaluations)
    samples = [json.loads(line) for line in (folder / "several/rollouts.jsonl").read_text().splitlines()]
    assert all(s["score"] == pytest.approx(2 * s["metrics"]["dense"] + s["metrics"]["style"] / 2) for s in samples)
    assert "columns" not in samples[0]


# --- reward models


@pytest.fixture(scope="module")
def reward_model(folder):
    from trainer.models.reward import make_initial_reward_model

    make_initial_reward_model(str(folder / "demo/model"), str(folder / "rm"), seed=3)
    return folder / "rm"


def plain_score(model, input_ids: list[int]) -> float:
    import torch

    with torch.no_grad():
        return model(input_ids=torch.tensor([input_ids])).logits[0, 0].item()


def load_scorer(path):
    import torch
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()


def test_reward_models_read_the_tokens_of_the_policy(folder, reward_model):
    """The weighted sum of two (here the same one), at the last token of each sample."""
    line = flags(folder, "models", "--advantage_estimator", "dr_grpo", "--max_steps", "1", "--packing_samples")
    at = line.index("--reward_func")
    line[at : at + 2] = ["--reward_pretrain", f"{reward_model},{reward_model}", "--reward_weights", "1", "0.5"]
    code, output = train_alone(line)
    assert code == 0, output[-3000:]
    model = load_scorer(reward_model)
    for text in (folder / "models/rollouts.jsonl").read_text().splitlines():
        row = json.loads(text)
        expected = 1.5 * plain_score(model, row["prompt_ids"] + row["response_ids"])
        assert row["score"] == pytest.approx(expected, rel=1e-4, abs=1e-5)


def text_prompts(folder) -> list[str]:
    """Prompts without a chat template, to which some responses of up to 48 random tokens end with eos, most do not."""
    (folder / "texts.jsonl").write_text("".join(json.dumps({"q": f"{i} 3", "label": "1"}) + "\n" for i in range(16)))
    line = ["--dataset", f"{folder}/texts.jsonl", "--input_key", "q", "--generate_max_len", "48", "--max_steps", "1"]
    return [*line, "--rollout_batch_size", "16", "--train_batch_size", "32", "--advantage_estimator", "dr_grpo"]


def rollout_of(folder) -> list[dict]:
    rows = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    assert {row["response_ids"][-1] == EOS for row in rows} == {True, False}, "both kinds of responses are there"
    return rows


def test_each_reward_model_scores_where_its_own_pad_token_says(folder, reward_model):
    """Behind the last eos for one, before it for the other, whose pad token is eos."""
    padding_with_eos = folder / "rm_eos"
    shutil.copytree(reward_model, padding_with_eos, symlinks=True)
    config = json.loads((padding_with_eos / "config.json").read_text())
    (padding_with_eos / "config.json").write_text(json.dumps({**config, "pad_token_id": EOS}))
    line = flags(folder, "pads", *text_prompts(folder))
    at = line.index("--reward_func")
    line[at : at + 2] = ["--reward_pretrain", f"{reward_model},{padding_with_eos}", "--reward_weights", "1", "0.5"]
    train_many(2, [["train_ppo", *line]], folder, timeout=300)
    models = load_scorer(reward_model), load_scorer(padding_with_eos)
    for row in rollout_of(folder / "pads"):
        first, second = (plain_score(model, row["prompt_ids"] + row["response_ids"]) for model in models)
        assert row["score"] == pytest.approx(first + 0.5 * second, rel=1e-4, abs=1e-5)


def test_a_reward_model_that_gives_nan_ends_the_run_in_one_line(folder, reward_model):
    import torch

    broken = folder / "rm_nan"
    shutil.copytree(reward_model, broken, symlinks=True)
    save_file({"score.weight": torch.full((1, 64), float("nan"))}, broken / "score.safetensors", {"format": "pt"})
    line = flags(folder, "nan", "--advantage_estimator", "dr_grpo", "--max_steps", "2", "--normalize_reward")
    at = line.index("--reward_func")
    line[at : at + 2] = ["--reward_pretrain", f"{reward_model}, {broken}"]
    code, output = torchrun(2, "-m", "trainer.cli.train_ppo", *line)
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert code == 2 and "Traceback" not in output, output[-3000:]
    assert errors == [
        f"error: --reward_pretrain {broken}: score nan for response 1 of 8 (allowed: finite numbers from -1e+15 to 1e+15)"
    ]
    checkpoints = [path.name for path in (folder / "nan/checkpoints").glob("step_*")]
    assert checkpoints == ["step_0"], "which takes both ranks: both were told"


def test_a_reward_server_is_told_which_responses_ended(folder, reward_model):
    """With eos, that is: nothing stands behind those that were cut, or ended by a stop text, as in the policy's tokens."""
    from trainer.rollout.rewards.model_scorer import ModelScorer

    server = ModelScorer(str(reward_model), dtype=torch.float32, device="cpu")
    score, asked = server.score, []
    server.score = lambda *request: asked.append(request) or score(*request)
    line = flags(folder, "served", *text_prompts(folder), "--stop", "7")
    at = line.index("--reward_func")
    (folder / "key").write_text("secret\n")
    with serving(lambda *request: server.score(*request), api_key="secret") as port:
        url = f"http://127.0.0.1:{port}"
        line[at : at + 2] = ["--remote_rm_url", f"{url},{url}/again", "--remote_rm_api_key", str(folder / "key")]
        code, output = train_alone(line)
    assert code == 0, output[-3000:]
    rows = rollout_of(folder / "served")
    ended = [row["response_ids"][-1] == EOS for row in rows]
    assert any(row["finished"] and not end for row, end in zip(rows, ended)), "a stop text ended some"
    assert sorted(finished for request in asked for finished in request[2]) == sorted(ended)
    prompt, text = "1 2", " 3 4"
    whole, cut = (server.input_ids(prompt, text, finished) for finished in (True, False))
    assert whole == [*cut, EOS] == server.input_ids(prompt, text)
    assert score([prompt] * 2, [text] * 2, [True, False])[0] == pytest.approx(score([prompt], [text])[0], rel=1e-5)
    assert score([prompt], [text], [False])[0] == pytest.approx(plain_score(load_scorer(reward_model), cut), rel=1e-4)
    with pytest.raises(ValueError):
        score([prompt], [text], [])


def test_a_reward_server_scores_conversations_as_train_rm_saw_them(folder, reward_model):
    from transformers import AutoTokenizer

    from trainer.rollout.rewards.model_scorer import ModelScorer

    server = ModelScorer(str(reward_model), dtype=torch.float32, batch_size=2)
    tokenizer, model = AutoTokenizer.from_pretrained(reward_model), load_scorer(reward_model)
    prompts, responses, expected = [], [], []
    for row in [json.loads(line) for line in (folder / "demo/pairs_eval.jsonl").read_text().splitlines()[:5]]:
        prompts.append(tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True))
        responses.append(row["chosen"][0]["content"])
        whole = tokenizer.apply_chat_template(row["prompt"] + row["chosen"], return_dict=True)["input_ids"]
        assert server.input_ids(prompts[-1], responses[-1]) == whole
        behind = len(whole) - whole[::-1].index(EOS) - 1  # the eos and what the template puts there
        assert server.input_ids(prompts[-1], responses[-1], finished=False) == whole[:behind]
        expected.append(plain_score(model, whole))
    assert server.score(prompts, responses) == pytest.approx(expected, rel=1e-4, abs=1e-5)


# --- going on

RESUMED = [
    *CHOICES["gae"][:2],
    "--normalize_reward",
    *KL,
    "--kl_target",
    "1",
    "--lr_scheduler",
    "linear",
    "--max_steps",
    "8",
]
BITWISE = [
    "loss",
    "grad_norm",
    "lr",
    "value_loss",
    "critic_grad_norm",
    "critic_lr",
    "reward",
    "kl",
    "kl_coef",
    "weights_checksum",
    "batch_hash",
]


@pytest.fixture(scope="module")
def resumed(folder):
    """Two ranks: 8 steps with a checkpoint at the 4th, and the second half again from there, on both backends."""
    lines = []
    for backend in (["fsdp2"], ["deepspeed", "--zero_stage", "1"], ["deepspeed", "--zero_stage", "3"]):
        name = "-".join(["whole", backend[0], *backend[2:]])
        more = ["--backend", *backend, *RESUMED]
        lines.append(["train_ppo", *flags(folder, name, *more, "--save_steps", "4")])
        lines.append(
            [
                "train_ppo",
                *flags(folder, f"half-{name}", *more, "--load_checkpoint", f"{folder}/{name}/checkpoints/step_4"),
            ]
        )
    train_many(2, lines, folder, timeout=900)
    return folder


@pytest.mark.parametrize("name", ["whole-fsdp2", "whole-deepspeed-1", "whole-deepspeed-3"])
def test_a_resumed_run_is_bitwise_the_undisturbed_one(resumed, name):
    whole, half = read_steps(resumed / name), read_steps(resumed / f"half-{name}")
    assert [row["step"] for row in half] == [5, 6, 7, 8] and len({row["weights_checksum"] for row in whole}) == 4
    for row, expected in zip(half, whole[4:], strict=True):
        for key in BITWISE:
            assert row[key] == expected[key], (row["step"], key)


def test_backends_agree(resumed):
    first, *others = (read_steps(resumed / f"whole-{name}") for name in ("fsdp2", "deepspeed-1", "deepspeed-3"))
    for other in others:
        for row, expected in zip(other, first, strict=True):
            assert row["batch_hash"] == expected["batch_hash"], "the same samples on both"
            assert row["value_loss"] == pytest.approx(expected["value_loss"], rel=1e-5)
            assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5, abs=1e-6)


EMA = ["--advantage_estimator", "dr_grpo", "--train_batch_size", "8", "--max_steps", "4", "--ema_beta", "0.75"]
EMA_BACKENDS = {
    "ema-fsdp2": ["fsdp2"],
    "ema-zero2": ["deepspeed", "--zero_stage", "2"],
    "ema-zero3": ["deepspeed", "--zero_stage", "3"],
} | ({"ema-zero0": ["deepspeed", "--zero_stage", "0"]} if FULL else {})


@pytest.fixture(scope="module")
def averaged(folder):
    """Two ranks: 4 steps with a checkpoint and its model after each; and the last 2 again, on every backend."""
    lines = []
    for name, backend in EMA_BACKENDS.items():
        line = [flag for flag in flags(folder, name, *EMA, "--backend", *backend) if flag != "--no_save"]
        lines.append(["train_ppo", *line, "--save_steps", "1", "--save_hf_ckpt"])
        again = ["--output_dir", f"{folder}/half-{name}", "--load_checkpoint", f"{folder}/{name}/checkpoints/step_2"]
        lines.append(["train_ppo", *line, *again])
    train_many(2, lines, folder, timeout=900)
    return folder


@pytest.mark.parametrize("name", EMA_BACKENDS)
def test_the_average_is_that_of_the_weights_after_each_step(averaged, folder, name):
    expected = load_file(folder / "demo/model/model.safetensors")
    for step in range(1, 5):
        weights = load_file(folder / name / f"checkpoints/step_{step}/hf/model.safetensors")
        expected = {key: 0.75 * tensor + 0.25 * weights[key] for key, tensor in expected.items()}
    found, resumed = (load_file(folder / run / "model_ema/model.safetensors") for run in (name, f"half-{name}"))
    trained = load_file(folder / name / "model/model.safetensors")
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert (found[key] - tensor).norm() <= 1e-6 * tensor.norm(), key
        assert found[key].equal(resumed[key]) and not found[key].equal(trained[key]), key
        assert trained[key].equal(weights[key]), "the weights are back after the average was saved"


OFFLOAD = ["--offload_ref", "--offload_critic", "--offload_actor_optimizer"]


def test_memory_that_is_lent_to_generation_changes_nothing(folder, reward_model):
    """One rank: all that can be moved to host memory, twice; the second run resumes from the middle of the first."""
    line = flags(folder, "x", *RESUMED, "--micro_train_batch_size", "4")
    at = line.index("--reward_func")
    line[at : at + 2] = ["--reward_pretrain", str(reward_model)]
    runs = {"plain": [], "lent": [*OFFLOAD, "--offload_reward", "--save_steps", "4"]}
    runs["lent-half"] = [*runs["lent"], "--load_checkpoint", f"{folder}/lent/checkpoints/step_4"]
    lines = []
    bf16 = ["deepspeed", "--zero_stage", "1", "--param_dtype", "bf16"]  # an optimizer of its own in DeepSpeed
    stage_2 = [["deepspeed", "--zero_stage", "2"]] * FULL
    for backend in (["fsdp2"], ["deepspeed", "--zero_stage", "3"], bf16, *stage_2):
        for name, more in runs.items():
            where = "".join(backend)
            more = [flag.replace(f"{folder}/lent/", f"{folder}/lent{where}/") for flag in more]
            lines.append(["train_ppo", *line, *more, "--backend", *backend, "--output_dir", f"{folder}/{name}{where}"])
    train_many(1, lines, folder, timeout=900)
    for line in lines[::3]:
        where = line[-1].rpartition("plain")[2]
        plain, lent, half = (read_steps(folder / f"{name}{where}") for name in runs)
        assert len(plain) == len(lent) == 8 and len(half) == 4
        for key in BITWISE:
            expected = [row[key] for row in plain]
            assert [row[key] for row in lent] == expected and [row[key] for row in half] == expected[4:], key


# 2 steps a rollout; with evaluations, which come first and after each rollout, the fifth call is that after step 4
@pytest.mark.parametrize("calls, evaluates, step", [(3, False, 6), (4, True, 4)])
def test_a_reward_that_fails_costs_nothing_of_the_finished_steps(folder, calls, evaluates, step):
    reward, count, name = folder / "failing.py", folder / "count", f"failing-{step}"
    body = f"import os\nif os.path.getsize({str(count)!r}) >= {calls}: raise RuntimeError('gone')\n"
    body += f"open({str(count)!r}, 'a').write('x')\n"
    indented = "".join(f"    {line}\n" for line in body.splitlines())
    reward.write_text(DENSE.replace("responses, labels):\n", f"responses, labels):\n{indented}", 1))
    count.write_text("")
    more = [*CHOICES["dr_grpo"], "--max_steps", "8"]
    evaluations = ["--eval_dataset", f"{folder}/demo/prompts_eval.jsonl", "--eval_steps", "2"] if evaluates else []
    line = flags(folder, name, *more, *evaluations, "--load_checkpoint")
    line[line.index("--reward_func") + 1] = str(reward)
    code, output = train_alone(line)
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert code == 2 and len(errors) == 1 and "Traceback" not in output, output[-3000:]
    assert "--reward_func" in errors[0] and "raised RuntimeError: gone" in errors[0]
    assert [path.name for path in (folder / name / "checkpoints").glob("step_*")] == [f"step_{step}"]
    shutil.copy(folder / "dense.py", reward)
    code, output = train_alone([*line, "--allow_change", "reward_func"])  # the mended code is another one
    assert code == 0, output[-3000:]
    assert train_alone(flags(folder, f"never-{name}", *more))[0] == 0
    found, expected = read_steps(folder / name), read_steps(folder / f"never-{name}")
    for key in ("loss", "grad_norm", "reward", "batch_hash"):
        assert [row[key] for row in found] == [row[key] for row in expected]
    assert [row["step"] for row in read_rows(folder / name) if row.get("event") == "resume"] == [step]


# --- one line

WRONG = {
    "--share_prompts with --packing_samples: ": ["--share_prompts", "--packing_samples"],
    "--top_p: 1.1": ["--top_p", "1.1"],
    "--advantage_estimator rloo with --n_samples_per_prompt 1: it compares the responses":
        ["--advantage_estimator", "rloo", "--n_samples_per_prompt", "1"],
    "--reward_func: missing": ["--reward_func", ""],
    "--remote_rm_url http://x with --reward_func: a run has one source of scores": ["--remote_rm_url", "http://x"],
    "--reward_func math without --label_key: it compares responses with the labels":
        ["--reward_func", "math", "--label_key", ""],
    "--reward_weights 1.0 2.0 with --reward_func ": ["--reward_weights", "1", "2"],
    "--reward_clip_range: ": ["--reward_clip_range", "1", "0"],
    "--overlong_buffer_len 8 with --generate_max_len 8: ": ["--overlong_buffer_len", "8"],
    "--dual_clip: 0.5": ["--dual_clip", "0.5"],
    "--sapo_temperatures: ": ["--policy_loss", "sapo", "--sapo_temperatures", "1", "0"],
    "--advantage_batch_std with --advantage_estimator rloo: ":
        ["--advantage_estimator", "rloo", "--n_samples_per_prompt", "2", "--advantage_batch_std"],
    "--rollout_kl_estimator k1 without --rollout_kl_max: ": ["--rollout_kl_estimator", "k1"],
    "--eps_clip_high 0.3 with --policy_loss reinforce: this loss does not clip":
        ["--policy_loss", "reinforce", "--eps_clip_high", "0.3"],
    "--use_kl_loss with --init_kl_coef 0: there is no reference": ["--use_kl_loss"],
    "--kl_target 6.0 with --init_kl_coef 0: ": ["--kl_target", "6"],
    "--ref_model x with --init_kl_coef 0: ": ["--ref_model", "x"],
    "--kl_in_score with --use_kl_loss: ":
        ["--init_kl_coef", "0.1", "--kl_in_score", "--use_kl_loss", "--kl_estimator", "k2"],
    "--use_kl_loss with --kl_estimator k1: the gradient of k1 is zero on average":
        ["--use_kl_loss", "--init_kl_coef", "0.1"],
    "--sequence_parallel with --advantage_estimator gae: ": ["--sequence_parallel"],
    "--value_clip 0.2 with --advantage_estimator rloo: only gae trains a critic":
        ["--advantage_estimator", "rloo", "--value_clip", "0.2"],
    "--freezing_actor_steps 2 with --advantage_estimator rloo: ":
        ["--advantage_estimator", "rloo", "--freezing_actor_steps", "2"],
    "--dynamic_filtering_range: 1 0": ["--dynamic_filtering", "--dynamic_filtering_range", "1", "0"],
    "--dynamic_filtering with --rollouts_from: ": ["--dynamic_filtering", "--rollouts_from", "x"],
    "--stop: an empty text": ["--stop", ""],
    "--lambd 0.9 with --advantage_estimator rloo: ": ["--advantage_estimator", "rloo", "--lambd", "0.9"],
    "--no_advantage_std_norm with --advantage_estimator rloo: ":
        ["--advantage_estimator", "rloo", "--no_advantage_std_norm"],
    "--eps_clip 0.3 with --policy_loss reinforce: ": ["--policy_loss", "reinforce", "--eps_clip", "0.3"],
    "--kl_horizon 5 without --kl_target: ": ["--init_kl_coef", "0.1", "--kl_horizon", "5"],
    "--overlong_penalty_factor 2.0 without --overlong_buffer_len: ": ["--overlong_penalty_factor", "2"],
    "--remote_rm_api_key key.txt without --remote_rm_url: ": ["--remote_rm_api_key", "key.txt"],
    "--remote_rm_retries 1 without --remote_rm_url: ": ["--remote_rm_retries", "1"],
    "--wandb_project mine without a tracker that has projects: ": ["--wandb_project", "mine"],
    "--offload_ref with --init_kl_coef 0: ": ["--offload_ref"],
    "--offload_reward without --reward_pretrain: ": ["--offload_reward"],
    "--offload_critic with --advantage_estimator rloo: ": ["--advantage_estimator", "rloo", "--offload_critic"],
    "--offload_actor_optimizer with --adam_offload: optimizer states are always in host":
        ["--offload_actor_optimizer", "--adam_offload"],
    "--lora_dropout 0.1 with rollouts: ": ["--lora_rank", "4", "--lora_dropout", "0.1"],
    "--load_in_4bit with rollouts: ": ["--lora_rank", "4", "--load_in_4bit"],
    "--param_dtype fp16 with rollouts: ": ["--param_dtype", "fp16"],
    "--best_metric_key eval_loss without --eval_dataset: ": ["--best_metric_key", "eval_loss"],
    "--vllm_gpu_memory_utilization 0.4 with --rollout_engine hf: ": ["--vllm_gpu_memory_utilization", "0.4"],
    "--dual_clip 2.0 with --policy_loss sapo: ": ["--policy_loss", "sapo", "--dual_clip", "2"],
    "--advantage_batch_std with --no_advantage_std_norm: ":
        ["--advantage_estimator", "group_norm", "--advantage_batch_std", "--no_advantage_std_norm"],
    "--tis_cap 1.0 with --tis_mask: ": ["--tis_cap", "1", "--tis_mask"],
    "--critic_learning_rate 0.1 with --advantage_estimator rloo: ":
        ["--advantage_estimator", "rloo", "--critic_learning_rate", "0.1"],
    "--reward_weights 1.0 with --remote_rm_url http://x: a server gives one score":
        ["--reward_func", "", "--remote_rm_url", "http://x", "--reward_weights", "1"],
    "--engine_tensor_parallel_size 2 with --rollout_engine hf: ": ["--engine_tensor_parallel_size", "2"],
    "--offload_actor_optimizer with --rollouts_from: nothing is generated":
        ["--offload_actor_optimizer", "--rollouts_from", "x"],
    "--env_memory_mb 9 without --env_sandbox: ": ["--reward_func", "", "--env", "e.py", "--env_memory_mb", "9"],
    "--share_prompts with --attn_implementation eager: ":
        ["--advantage_estimator", "group_norm", "--share_prompts", "--attn_implementation", "eager"],
}  # fmt: skip


@pytest.mark.parametrize("error", WRONG)
def test_flags_that_do_not_go_together(error, tmp_path):
    from trainer.cli.train_ppo import parse
    from trainer.runs.rl.rl_checks import validate

    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "prompts.jsonl").write_text('{"prompt": "1 2", "label": "1 2"}\n')
    args, _ = parse(flags(tmp_path, "wrong", *WRONG[error]))
    with pytest.raises(UserError) as found:
        validate(args)
    assert str(found.value).startswith(error), str(found.value)


def test_the_demo_has_a_rate_for_a_critic_that_it_does_not_train():
    from trainer.cli.train_ppo import parse
    from trainer.runs.rl.rl_checks import validate

    args, is_demo = parse([])
    assert is_demo and args.advantage.advantage_estimator == "group_norm" and args.critic.critic_learning_rate == 1e-3
    validate(args, is_demo)


def test_a_prompt_without_a_label_is_named_before_the_first_step(folder):
    rows = [{"q": "1 2", "label": "1 2"}, {"q": "3", "label": None}]
    (folder / "unlabelled.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = flags(folder, "unlabelled", "--dataset", f"{folder}/unlabelled.jsonl", "--input_key", "q")
    code, output = train_alone([*line, "--advantage_estimator", "rloo", "--reward_func", "math"])
    expected = "error: --dataset row 2: --label_key label: no value (allowed: an answer to compare with)"
    assert code == 2 and expected in output.splitlines() and "Traceback" not in output, output[-3000:]


@pytest.mark.parametrize("label, found", [(None, "no value"), ("", "an empty text"), (" ", "an empty text")])
def test_labels_are_needed_by_rewards_that_compare_with_them(folder, label, found):
    """Of prompts that are left, not of those that are not; and by no other reward."""
    from trainer.cli.train_ppo import parse
    from trainer.models.model_loading import load_tokenizer
    from trainer.runs.rl.rl_run import load_data

    path, tokenizer = folder / "labels.jsonl", load_tokenizer(str(folder / "demo/model"))
    rows = [{"q": "", "label": label}, {"q": "1", "label": "0"}, {"q": "2", "label": label}]

    def load(reward: str, *rows: dict):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        args, _ = parse(flags(folder, "labels", "--input_key", "q", "--reward_func", reward))
        return load_data(args, tokenizer, str(path), "train", "--eval_dataset", functions={})[0]

    with pytest.raises(UserError) as error:
        load("exact_match", *rows)
    assert str(error.value).startswith(f"--eval_dataset row 3: --label_key label: {found}")
    assert len(load("exact_match", *rows[:2])) == 1 and len(load("reward.py", *rows)) == 2


def test_the_reference_of_an_adapter_cannot_be_offloaded(tmp_path):
    from trainer.cli.train_ppo import parse
    from trainer.runs.rl.rl_checks import validate

    line = ["--lora_rank", "4", "--init_kl_coef", "0.1", "--offload_ref"]
    args, _ = parse(flags(tmp_path, "wrong", *line))
    with pytest.raises(UserError, match="--lora_rank"):
        validate(args)
    validate(parse(flags(tmp_path, "right", *line, "--ref_model", "x", "--reward_func", "exact_match"))[0])


def test_verify_resume_replays_rollouts_of_policy_and_critic_with_adapters(folder):
    """Three steps of two to a rollout, so that the checkpoint stands in the middle of one."""
    line = ["--advantage_estimator", "gae", "--init_kl_coef", "0.05", "--normalize_reward", "--lora_rank", "4"]
    code, output = train_alone(flags(folder, "verify", *line, "--verify_resume", "3"))
    assert code == 0, output[-3000:]
    assert re.search(r"^verify_resume: 3 steps from .*step_3 replayed, bitwise the same$", output, re.MULTILINE)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_an_engine_that_is_not_installed_is_named_with_its_extra(folder):
    code, output = train_alone(flags(folder, "absent", "--rollout_engine", "vllm", "--n_samples_per_prompt", "2"))
    assert code == 2 and "Traceback" not in output, output[-3000:]
    [error] = [line for line in output.splitlines() if line.startswith("error: ")]
    assert error == "error: --rollout_engine: vllm is not installed (allowed: hf; or pip install -e '.[vllm]')"


def test_rollouts_that_are_none(tmp_path):
    from trainer.rollout.rollouts_file import read_rollouts

    path = tmp_path / "rollouts.jsonl"
    for text, expected in (("{}\n", "line 1: KeyError"), ("nothing\n", "line 1"), (None, "No such file")):
        path.unlink(missing_ok=True)
        if text is not None:
            path.write_text(text)
        with pytest.raises(UserError, match=expected):
            read_rollouts(str(path))
