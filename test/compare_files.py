"""What the tests of compare_backends.py compare: metrics files and parity dumps, small and real."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[1]

START = {"event": "start", "config": {"param_dtype": "bf16"}, "mesh": {}, "versions": {}}
END = {"event": "end"}
LOSSES = [2.5, 2.25, 2.0, 1.75]


def step_row(step, loss, grad_norm=1.0, batch_hash=None):
    return {"step": step, "epoch": 0, "loss": loss, "grad_norm": grad_norm, "batch_hash": batch_hash or f"hash{step}"}


def write_metrics(path, losses=LOSSES, grad_norms=None, extra=()):
    norms = grad_norms or [1.0] * len(losses)
    rows = [step_row(i, loss, norm) for i, (loss, norm) in enumerate(zip(losses, norms, strict=True), start=1)]
    return write_rows(path, [START, *rows, *extra, END])


def write_rows(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_dump(folder, weights=None, gradients=None):
    tensors = {"model.norm.weight": torch.ones(4), "lm_head.weight": torch.arange(6.0).reshape(2, 3)}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors if gradients is None else gradients, folder / "grads_step1.safetensors")
    save_file(tensors if weights is None else weights, folder / "weights_final.safetensors")
    return str(folder)


def error_line(capsys):
    """The one line on stderr of a comparison that could not be made."""
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), captured.err
    assert "PASS" not in captured.out
    return lines[0]


def changed(name, factor):
    tensors = {"model.norm.weight": torch.ones(4), "lm_head.weight": torch.arange(6.0).reshape(2, 3)}
    tensors[name] = tensors[name] * factor
    return tensors
