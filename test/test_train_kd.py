"""train_kd: answers of a teacher against transformers' own generation, and its KL against a plain loop, on both backends."""

import json
import re

import datasets
import pytest
import torch
from launch import read_steps, train_many
from test_ppo_teacher import make_teacher
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.cli import train_kd, train_sft
from trainer.datasets.demos.demo import make_demo
from trainer.errors import UserError
from trainer.flags.rules import refuse
from trainer.runs.run_data import load_sft

STEPS, BATCH, RATE, COEF, TEMPERATURE = 3, 4, 1e-3, 0.7, 2.0
FLAGS = f"--param_dtype fp32 --max_samples 12 --no_save --max_len 64 --no_shuffle --train_batch_size {BATCH} --max_steps {STEPS} "
FLAGS += f"--learning_rate {RATE} --lr_scheduler constant --lr_warmup_ratio 0 --micro_train_batch_size 2"
KL = f"--kd_coef {COEF} --kd_temperature {TEMPERATURE} --dataset sft.jsonl"
BETA, TOP_K, WEIGHTS = 0.3, 5, (0.25, 0.75)
JSD = f"{KL} --kd_loss jsd --kd_beta {BETA}"
TOP = f"{JSD} --kd_top_k {TOP_K} --teacher_weights {WEIGHTS[0]} {WEIGHTS[1]}"  # of two teachers
OWN = "--teacher_answers 1 --temperature 0 --generate_max_len 8 --dataset prompts.jsonl"
ALONE = {"kl": KL, "answers": OWN, "drawn": f"{OWN} --temperature 1 --teacher_answers 2 --kd_coef 1"}
LAYOUTS = {
    "kl-tp2": f"{KL} --tensor_parallel_size 2",
    "jsd-ring2": f"{JSD} --ring_attn_size 2 --packing_samples",
    "top-tp2": f"{TOP} --tensor_parallel_size 2",
    "top-zero3": f"{TOP} --backend deepspeed --zero_stage 3",
    "jsd-zero1-tp2": f"{JSD} --backend deepspeed --zero_stage 1 --tensor_parallel_size 2",
    "answers-zero3": f"{OWN} --backend deepspeed --zero_stage 3",
    "drawn-tp2": f"{ALONE['drawn']} --tensor_parallel_size 2 --backend fsdp2",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kd")
    make_demo(str(folder / "demo"))
    make_teacher(str(folder / "demo/model"), str(folder / "teacher"))

    def line(name: str, more: str) -> list[str]:
        more = more.replace("--dataset ", f"--dataset {folder}/demo/") + f" --teacher {folder}/teacher"
        more += f",{folder}/demo/model" * name.startswith("top")
        own = f"--pretrain {folder}/demo/model --output_dir {folder}/{name}"
        backend = "" if "--backend" in more else " --backend fsdp2"
        return ["train_kd", *f"{FLAGS} {more} {own}{backend}".split()]

    train_many(1, [line(name, more) for name, more in ALONE.items()], folder, timeout=300)
    train_many(2, [line(name, more) for name, more in LAYOUTS.items()], folder, timeout=500)
    return folder


def answers_of(folder, name: str) -> list[dict]:
    return list(datasets.load_from_disk(str(folder / name / "answers"))["train"])


def load(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def kl(p, q):
    return (p * torch.log(p / q)).sum()


def jsd(p, q):
    m = BETA * p + (1 - BETA) * q
    return BETA * kl(p, m) + (1 - BETA) * kl(q, m)


def jsd_of_top(p, q):
    top = p.topk(TOP_K).indices
    return jsd(*(torch.cat([x[top], 1 - x[top].sum(0, keepdim=True)]) for x in (p, q)))


def plain_loop(folder, samples: list[dict], coef: float, temperature: float, distance=kl, weights=(1,)) -> list:
    """(loss, gradient norm) of each step, by the formula of Hinton et al. 2015, with any distance from the teachers."""
    model, found = load(folder / "demo/model"), []
    teachers = [load(folder / name) for name in ("teacher", "demo/model")[: len(weights)]]
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0)
    for start in range(0, STEPS * BATCH, BATCH):
        terms = []
        for sample in samples[start : start + BATCH]:
            ids = torch.tensor([list(sample["input_ids"])])
            own = model(input_ids=ids).logits[0]
            theirs = [teacher(input_ids=ids).logits[0].detach() for teacher in teachers]
            for place in range(1, ids.shape[1]):
                if sample["loss_mask"][place]:
                    p = [torch.softmax(each[place - 1] / temperature, -1) for each in theirs]
                    q = torch.softmax(own[place - 1] / temperature, -1)
                    hard = -torch.log(torch.softmax(own[place - 1], -1)[ids[0, place]])
                    soft = sum(weight * distance(each, q) for weight, each in zip(weights, p))
                    terms.append(coef * temperature**2 * soft + (1 - coef) * hard)
        loss = torch.stack(terms).mean()
        loss.backward()
        found.append((loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()))
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.fixture(scope="module")
def expected(folder):
    line = ["--pretrain", f"{folder}/demo/model", "--dataset", f"{folder}/demo/sft.jsonl", "--max_samples", "12"]
    args, _ = train_sft.parse([*line, "--max_len", "64"])
    tokenizer = AutoTokenizer.from_pretrained(args.model.pretrain)
    samples, _ = load_sft(args, tokenizer, args.data.dataset, "train", "--dataset")
    drawn = plain_loop(folder, answers_of(folder, "drawn"), 1.0, 1.0)
    return {
        "kl": plain_loop(folder, list(samples), COEF, TEMPERATURE),
        "jsd": plain_loop(folder, list(samples), COEF, TEMPERATURE, jsd),
        "top": plain_loop(folder, list(samples), COEF, TEMPERATURE, jsd_of_top, WEIGHTS),
        "answers": plain_loop(folder, answers_of(folder, "answers"), 0.0, 1.0),
        "drawn": drawn,
    }


@pytest.mark.parametrize("name", [*ALONE, *LAYOUTS])
def test_losses_and_gradients_are_those_of_the_plain_loop(folder, expected, name):
    rows, wanted = read_steps(folder / name), expected[name.split("-")[0]]
    for row, (loss, norm) in zip(rows, wanted, strict=True):
        assert row["loss"] == pytest.approx(loss, rel=2e-6, abs=1e-6)
        assert row["grad_norm"] == pytest.approx(norm, rel=1e-4)
    if not name.startswith("answers"):
        coef = 1.0 if name.startswith("drawn") else COEF
        assert rows[0]["loss"] == pytest.approx(coef * rows[0]["teacher_loss"] + (1 - coef) * rows[0]["nll"])


def test_greedy_answers_are_those_of_transformers(folder):
    teacher, tokenizer = load(folder / "teacher"), AutoTokenizer.from_pretrained(folder / "teacher")
    for sample in answers_of(folder, "answers"):
        start = sample["loss_mask"].index(1)
        prompt = torch.tensor([sample["input_ids"][:start]])
        found = teacher.generate(prompt, do_sample=False, max_new_tokens=8, eos_token_id=tokenizer.eos_token_id)
        assert found[0].tolist() == sample["input_ids"]
        assert sample["truncated"] == (sample["input_ids"][-1] != tokenizer.eos_token_id)


def test_answers_do_not_depend_on_the_layout(folder):
    for name, other in (("answers", "answers-zero3"), ("drawn", "drawn-tp2")):
        assert answers_of(folder, name) == answers_of(folder, other)
    drawn = [row["digest"] for row in answers_of(folder, "drawn")]
    assert len(drawn) == 24 and len(set(drawn)) > 12
    config = (folder / "drawn/config.yaml").read_text()
    assert "prompts.jsonl" in config and json.dumps(str(folder / "teacher"))[1:-1] in config


@pytest.mark.parametrize(
    "flags",
    [
        ["--kd_coef", "0"],
        ["--teacher", "math=t,code=u"],
        ["--generate_max_len", "9"],
        ["--teacher_answers", "1", "--max_len", "512"],
        ["--streaming", "--max_steps", "3"],
        ["--eval_dataset", "e", "--teacher_answers", "1"],
        ["--output_key", "o", "--teacher_answers", "1"],
        ["--kd_temperature", "2", "--teacher_answers", "1"],
        ["--teacher", "http://t"],
        ["--teacher_answers", "1", "--teacher", "http://t", "--kd_top_k", "3"],
        ["--kd_temperature", "2", "--teacher", "http://t", "--kd_top_k", "3"],
        ["--kd_loss", "reverse_kl", "--teacher", "t,http://t", "--kd_top_k", "3"],
        ["--kd_beta", "1", "--kd_loss", "jsd", "--teacher", "http://t", "--kd_top_k", "3"],
        ["--tensor_parallel_size", "2", "--teacher", "http://t", "--kd_top_k", "3"],
        ["--teacher_offload", "--teacher", "http://t", "--kd_top_k", "3"],
        ["--teacher_api_key", "k"],
        ["--teacher_retries", "1"],
        ["--exact", "--teacher", "http://t", "--kd_top_k", "3"],
        ["--kd_beta", "0.3"],
        ["--teacher_weights", "1", "2"],
        ["--teacher_weights", "-1"],
        ["--teacher_weights", "0"],
        ["--teacher_weights", "nan"],
        ["--kd_top_k", "3", "--teacher_answers", "1"],
        ["--teacher_offload", "--teacher_answers", "1", "--kd_coef", "1"],
        ["--aux_loss_coef", "1"],
    ],
)
def test_flags_that_do_not_fit_are_refused(flags):
    with pytest.raises(UserError, match=re.escape(flags[0])):
        refuse("train_kd", train_kd.parse(["--pretrain", "m", "--dataset", "d", "--teacher", "t", *flags]))
