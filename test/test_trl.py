"""The losses of train_dpo and train_rm against TRL's trainers: same weights, token ids and order, fp32, one process.

Five steps of every variant that TRL 1.16 has: the losses within 1e-5, the weights afterwards within 1e-4 of their norm. Where
a convention differs, the case says so and accounts for it. TRL runs in its own process, so that only this file pays for it.
"""

import importlib.util
import json

import pytest
import vision_models
from launch import read_steps, train_many, train_many_with_trl
from safetensors.torch import load_file

STEPS, LENGTH = 5, 20
EPS = 1e-5  # of Adam. With 1e-8 its first update is the sign of each gradient, also of one that is only rounding
# name: (the trainer's flags, TRL's trainer, its options, the trainer's loss over TRL's, data)
ONE_BY_ONE = {
    "per_device_train_batch_size": 1
}  # a mean per batch is then one pair's, and accumulation means over pairs
CASES = {
    "dpo": (["--loss", "dpo", "--beta", "0.1"], "DPO", {"loss_type": "sigmoid", "beta": 0.1}, 1, "texts"),
    "hinge": (["--loss", "hinge", "--beta", "0.1"], "DPO", {"loss_type": "hinge", "beta": 0.1}, 1, "texts"),
    # TRL divides log-ratios by the number of answer tokens, here always n: its loss with beta, and so what Adam compares with its
    # eps, is 1 / n^2 of ours with beta / n
    "ipo": (
        ["--loss", "ipo", "--beta", str(0.1 / LENGTH)], "DPO", {"loss_type": "ipo", "beta": 0.1, "adam_epsilon": EPS / LENGTH**2}, LENGTH**2, "even"
    ),
    # TRL's `sigmoid` has no label smoothing and its `robust` is another loss; `aot`, which sorts a batch, is cdpo on one pair
    "cdpo": (
        ["--loss", "cdpo", "--beta", "0.1", "--label_smoothing", "0.2"],
        "DPO", {"loss_type": "aot", "beta": 0.1, "label_smoothing": 0.2, **ONE_BY_ONE}, 1, "texts",
    ),
    # TRL's `sft` is a mean over the tokens of a batch, ours a mean over pairs of means over tokens
    "nll": (
        ["--loss", "dpo", "--beta", "0.1", "--nll_loss_coef", "0.5"],
        "DPO", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5], "beta": 0.1, **ONE_BY_ONE}, 1, "texts",
    ),
    # TRL's CPOTrainer subtracts gamma / beta before the factor beta
    "simpo": (
        ["--loss", "simpo", "--beta", "2.0", "--simpo_gamma", "0.5"],
        "CPO", {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "simpo_gamma": 0.5}, 1, "texts",
    ),
    # TRL's likelihood term covers prompt and answer and is a mean over the tokens of a batch: an empty prompt, one pair at a time
    "orpo": (["--loss", "orpo", "--beta", "0.2"], "ORPO", {"beta": 0.2, **ONE_BY_ONE}, 1, "whole"),
    # TRL pairs prompts and answers for the KL within a micro-batch, we within the global batch: here they are the same
    "kto": (
        ["--loss", "kto", "--beta", "0.1", "--desirable_weight", "1.2", "--undesirable_weight", "0.7"],
        "KTO", {"beta": 0.1, "desirable_weight": 1.2, "undesirable_weight": 0.7}, 1, "unpaired",
    ),
    # TRL scores the last token that is not padding, which is ours as long as the pad token is not the eos token
    "reward": (["--loss", "sigmoid"], "Reward", {}, 1, "texts"),
    "reward-centered": (["--loss", "sigmoid", "--center_rewards_coef", "0.01"], "Reward", {"center_rewards_coefficient": 0.01}, 1, "texts"),
    # no convention differs: loss tokens of the whole batch are averaged, and images and their marks have no loss
    "images": ([], "SFT", {}, 1, "images"),
    "reward-margin": (["--loss", "sigmoid", "--margin_key", "margin"], "Reward", {}, 1, "margins"),
}  # fmt: skip


def write_data(folder, shared_data) -> None:
    """{texts, margins, even, whole, unpaired}.jsonl of real rows."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(shared_data / "models/stories260K-hf")
    lines = (shared_data / "gsm8k/pairs.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines[:80]]
    rows = [  # of unequal lengths, and short, since every case trains on them
        {**row, "prompt": row["prompt"][:40], "chosen": " " + row["chosen"][: 60 + number % 9], "rejected": " " + row["rejected"][:50]}
        for number, row in enumerate(rows)
    ]  # fmt: skip

    def cut(prompt: str, text: str) -> str | None:
        """The beginning of an answer that adds LENGTH - 1 tokens to its prompt, without its eos."""
        start = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        ids = tokenizer(prompt + text, add_special_tokens=False)["input_ids"][: len(start) + LENGTH - 1]
        short = tokenizer.decode(ids).removeprefix(prompt)
        return short if tokenizer(prompt + short, add_special_tokens=False)["input_ids"] == ids else None

    margins = [{**row, "margin": number % 3 / 2} for number, row in enumerate(rows)]
    even = [{**row, **{side: cut(row["prompt"], row[side]) for side in ("chosen", "rejected")}} for row in rows]
    even = [row for row in even if row["chosen"] and row["rejected"] and row["chosen"] != row["rejected"]]
    whole = [{"prompt": "", **{side: row["prompt"] + row[side] for side in ("chosen", "rejected")}} for row in rows]
    unpaired = [
        {"prompt": row["prompt"], "completion": row["chosen" if number % 3 else "rejected"], "label": bool(number % 3)}
        for number, row in enumerate(rows)
    ]
    for name, table in {"texts": rows, "margins": margins, "even": even, "whole": whole, "unpaired": unpaired}.items():
        assert len(table) >= 4 * STEPS, name
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))


def write_images(folder) -> list[str]:
    """Rows with one or two images of different sizes, and a tiny Qwen3-VL. Returns the flags of train_sft for them.

    TRL's loss of an answer has all that the template puts behind it, ours ends with the stop token: this template puts
    nothing behind it.
    """
    model, rows = folder / "qwen3_vl", []
    vision_models.make_folder("qwen3_vl", model)
    template = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").write_text(template.replace("'<|im_end|>\n'", "'<|im_end|>'"))
    for number in range(4 * STEPS):
        paths = [str(folder / f"{number}-{place}.png") for place in range(1 + number % 2)]
        for place, path in enumerate(paths):
            vision_models.drawn(2 * number + place, (16 + 4 * (number % 5), 16 + 8 * place)).save(path)
        question = [*({"type": "image"} for _ in paths), {"type": "text", "text": f"Which one is number {number}?"}]
        answer = "The first." if number % 2 else f"There is only one, {number}."
        talk = [{"role": "user", "content": question}]
        talk.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
        rows.append({"messages": talk, "images": paths})
    (folder / "images.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["train_sft", "--pretrain", str(model), "--freeze_vision", "false"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, shared_data):
    """The folder with <case>/ours and <case>/trl."""
    if importlib.util.find_spec("trl") is None:
        pytest.skip("trl is not installed: pip install -e '.[dev]'")
    folder = tmp_path_factory.mktemp("trl")
    write_data(folder, shared_data)
    ours, theirs = [], []
    for name, (flags, trainer, options, _, data) in CASES.items():
        command = "train_rm" if trainer == "Reward" else "train_dpo"
        argv = [command, "--pretrain", str(shared_data / "models/stories260K-hf"), *flags]
        argv = write_images(folder) if trainer == "SFT" else argv
        argv += ["--dataset", str(folder / f"{data}.jsonl"), "--max_len", "128", "--no_shuffle", "--no_save"]
        argv += ["--train_batch_size", "4", "--max_steps", str(STEPS), "--param_dtype", "fp32", "--max_norm", "0"]
        argv += ["--learning_rate", "1e-4", "--lr_scheduler", "constant", "--lr_warmup_ratio", "0"]
        argv += ["--adam_eps", str(EPS)]
        ours.append([*argv, "--micro_train_batch_size", "4", "--output_dir", f"{folder}/{name}/ours"])
        ours[-1] += ["--parity_dump", f"{folder}/{name}/ours"]
        theirs.append({"argv": [*argv, "--output_dir", f"{folder}/{name}/trl"], "trl": trainer, "options": options})
    train_many(1, ours, folder, timeout=900)
    train_many_with_trl(theirs, folder)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_losses_and_weights_are_those_of_trl(runs, name):
    factor = CASES[name][3]
    found = [row["loss"] for row in read_steps(runs / name / "ours")]
    expected = [factor * loss for loss in json.loads((runs / name / "trl/losses.json").read_text())]
    assert len(found) == len(expected) == STEPS
    assert found == pytest.approx(expected, rel=1e-5)
    assert expected[-1] != pytest.approx(expected[0], rel=1e-3), "a run that learns nothing compares nothing"
    ours = load_file(runs / name / "ours/weights_final.safetensors")
    for key, weight in load_file(runs / name / "trl/weights.safetensors").items():
        assert (ours[key] - weight).norm() <= 1e-4 * weight.norm(), key
