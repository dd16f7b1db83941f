"""The commands work with a strategy that the trainer does not know: parity, resume and save, on a real model.

It keeps the same promise as the two backends, see test_parity.py.
"""

import json
from pathlib import Path

import pytest
from launch import ROOT, forked, in_fork, read_steps
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

STEPS, SAVED_AT = 8, 4
FORMS = {
    "padded": [],
    "packed": ["--packing_samples"],
    "ring": ["--ring_attn_size", "2"],
    "lora": ["--lora_rank", "4"],
}


def command_line(name: str, folder: Path, data: Path) -> list[str]:
    line = ["--pretrain", f"{data}/models/stories260K-hf", "--dataset", f"{data}/gsm8k/train.jsonl"]
    line += ["--input_key", "question", "--output_key", "answer", "--max_len", "256", "--max_samples", "64"]
    line += ["--train_batch_size", "8", "--micro_train_batch_size", "2", "--learning_rate", "1e-3"]
    line += ["--weight_decay", "0.1", "--param_dtype", "fp32", "--max_steps", str(STEPS)]
    return [*line, "--output_dir", f"{folder}/{name}", "--parity_dump", f"{folder}/{name}/parity"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, shared_data):
    """The runs by form, a resumed run, a run that FSDP2 resumed, and the plain loop."""
    folder = tmp_path_factory.mktemp("ddp")
    for name, flags in (("reference", []), ("reference-lora", FORMS["lora"])):
        line = [*command_line(name, folder, shared_data), *flags, "--no_save"]
        code, output = forked(1, str(ROOT / "test/reference.py"), *line)
        assert code == 0, output[-4000:]
    lines = [[*command_line(form, folder, shared_data), *flags] for form, flags in FORMS.items()]
    saving, checkpoint = ["--save_steps", str(SAVED_AT)], str(folder / f"padded/checkpoints/step_{SAVED_AT}")
    lines[0] += saving
    lines.append([*command_line("resumed", folder, shared_data), "--load_checkpoint", checkpoint])
    (folder / "runs.json").write_text(json.dumps(lines))
    code, output = forked(2, str(ROOT / "test/strategies/ddp_runs.py"), str(folder / "runs.json"), timeout=400)
    assert code == 0, output[-6000:]
    line = [*command_line("by-fsdp2", folder, shared_data), "--load_checkpoint", checkpoint]
    code, output = in_fork("-m", "trainer.cli.train_sft", "--backend", "fsdp2", *line)
    assert code == 0, output[-4000:]
    return folder


def differences(found: list[dict], expected: list[dict], key: str) -> list[float]:
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    return [abs(a[key] - b[key]) / abs(b[key]) for a, b in zip(found, expected)]


@pytest.mark.parametrize("form", FORMS)
def test_parity_with_the_plain_loop(runs, form):
    reference = runs / ("reference-lora" if form == "lora" else "reference")
    found, expected = read_steps(runs / form), read_steps(reference)
    assert len(found) == STEPS
    assert all(difference <= 1e-5 for difference in differences(found, expected, "loss"))
    assert all(difference <= 1e-4 for difference in differences(found, expected, "grad_norm"))
    for file in ("grads_step1", "weights_final"):
        tensors, others = (load_file(run / "parity" / f"{file}.safetensors") for run in (runs / form, reference))
        assert tensors.keys() == others.keys()
        for name, tensor in tensors.items():
            assert (tensor - others[name]).norm() <= 1e-4 * others[name].norm(), (file, name)


def test_a_resumed_run_is_bitwise_the_undisturbed_one(runs):
    rows, resumed = (
        [(r["step"], r["loss"], r["grad_norm"]) for r in read_steps(runs / n)] for n in ("padded", "resumed")
    )
    assert resumed == rows[SAVED_AT:]


def test_its_checkpoint_goes_on_with_another_backend(runs):
    found, expected = read_steps(runs / "by-fsdp2"), read_steps(runs / "padded")[SAVED_AT:]
    assert all(difference <= 1e-5 for difference in differences(found, expected, "loss"))


def test_the_saved_model_is_the_trained_one(runs):
    loaded = dict(AutoModelForCausalLM.from_pretrained(runs / "padded/model").named_parameters())
    weights = load_file(runs / "padded/parity/weights_final.safetensors")
    assert loaded.keys() == weights.keys() and all(loaded[name].equal(weights[name]) for name in weights)
