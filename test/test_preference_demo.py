"""train_rm and train_dpo learn the embedded demo on both backends; what they write is what transformers loads."""

import json

import pytest
import torch
from launch import ROOT, read_rows, read_steps, run_process, train_many

RUNS = {"train_rm": "eval_accuracy", "train_dpo": "eval_reward_accuracy"}
SAME_CURVE = {"train_rm": 70, "train_dpo": 20}  # steps until roundings show in the losses
WANTED = {"train_rm": 0.9, "train_dpo": 0.8}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The command lines of the four scripts, each on the demo in fp32 on two ranks, in one launch, in half of their steps.

    Roundings of 1e-7 grow some tenfold in every thirty steps of train_rm, faster in train_dpo, within one backend as well:
    micro-batches of another size bring train_rm 1e-3 apart after 40 steps and 0.5 after all 150. Between the backends it is
    2e-4 after 70 steps, and 1e-3 to 1.3e-2 after 150, by the library of the products and the processor. With --exact, all
    150 losses are the same bits; test_exact.py has that in fewer steps.
    """
    folder, lines = tmp_path_factory.mktemp("preference_demo"), []
    told = {"BASH_FUNC_torchrun%%": "() { printf '%s\\n' \"$@\"; }"}  # the scripts then print what they would launch
    for command in RUNS:
        for backend in ("fsdp2", "deepspeed"):
            out = folder / f"{command}-{backend}"
            flags = ["--param_dtype", "fp32", "--output_dir", str(out), "--logging_steps", "50"]
            flags += ["--cpu_matmul", "mkl", "--save_steps", "75", "--max_steps", "75"]
            code, output = run_process(["bash", str(ROOT / f"scripts/{command}_{backend}.sh"), *flags], **told)
            assert code == 0, output[-4000:]
            module, *line = output.partition("\n-m\n")[2].splitlines()
            lines.append([module.removeprefix("trainer.cli."), *line])
    train_many(2, lines, folder, timeout=900)
    return folder


@pytest.mark.parametrize("command", RUNS)
@pytest.mark.parametrize("backend", ["fsdp2", "deepspeed"])
def test_held_out_pairs_are_ranked_right(runs, command, backend):
    rows = [row for row in read_rows(runs / f"{command}-{backend}") if "eval_loss" in row]
    assert rows[-1][RUNS[command]] > WANTED[command], rows[-1]
    assert all(row["eval_loss"] < 0.6931 / 2 for row in rows), rows  # chance is log 2
    assert rows[-1]["eval_loss"] < rows[0]["eval_loss"], rows


@pytest.mark.parametrize("command", RUNS)
def test_both_backends_have_one_loss_curve(runs, command):
    first, second = (read_steps(runs / f"{command}-{backend}") for backend in ("fsdp2", "deepspeed"))
    assert len(first) == len(second) == 75
    for a, b in list(zip(first, second, strict=True))[: SAME_CURVE[command]]:
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-3), a["step"]


def test_a_saved_reward_model_scores_alike_in_transformers_alone(runs):
    """Mean, spread and accuracy of the evaluation set, by transformers' own forward over padded rows."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = runs / "train_rm-fsdp2" / "model"
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForSequenceClassification"] and len(config["id2label"]) == 1
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    rows = [json.loads(line) for line in (ROOT / "demo/pairs_eval.jsonl").read_text().splitlines()]
    scores = {}
    for side in ("chosen", "rejected"):
        texts = [
            tokenizer.apply_chat_template(row["prompt"] + row[side], return_dict=True)["input_ids"] for row in rows
        ]
        # a template ends a conversation with a newline behind the stop token, as in training
        batch = tokenizer.pad({"input_ids": texts}, padding_side="right", return_tensors="pt")
        with torch.no_grad():
            scores[side] = model(**batch).logits[:, 0]
    last = [row for row in read_rows(runs / "train_rm-fsdp2") if "eval_loss" in row][-1]
    assert scores["chosen"].mean().item() == pytest.approx(last["eval_chosen_reward"], rel=1e-5)
    assert scores["rejected"].std(correction=0).item() == pytest.approx(last["eval_rejected_reward_std"], rel=1e-4)
    assert (scores["chosen"] > scores["rejected"]).float().mean().item() == pytest.approx(last["eval_accuracy"])
    both = torch.cat(list(scores.values()))
    assert config["reward_mean"] == pytest.approx(both.mean().item(), rel=1e-5)
    assert config["reward_std"] == pytest.approx(both.std(correction=0).item(), rel=1e-4)


def test_a_finished_run_started_again_writes_the_same_model(runs):
    out = runs / "train_rm-fsdp2"
    before = (out / "model/config.json").read_text()
    command = ["bash", str(ROOT / "scripts/train_rm_fsdp2.sh"), "--param_dtype", "fp32", "--output_dir", str(out)]
    command += ["--cpu_matmul", "mkl"]
    code, output = run_process(
        [*command, "--logging_steps", "50", "--max_steps", "75", "--load_checkpoint"], timeout=600
    )
    assert code == 0 and "at step 75" in output, output[-4000:]
    assert (out / "model/config.json").read_text() == before


@pytest.mark.parametrize("backend", ["fsdp2", "deepspeed"])
def test_the_scores_are_drawn(runs, backend):
    picture = (runs / f"train_rm-{backend}" / "reward_histogram.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 5000


def test_a_saved_policy_loads(runs):
    from transformers import AutoModelForCausalLM

    config = AutoModelForCausalLM.from_pretrained(runs / "train_dpo-deepspeed" / "model").config
    assert config.architectures == ["Qwen3ForCausalLM"]
