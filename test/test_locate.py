"""`compare_backends.py --locate`: planted faults are found where they are, clean pairs agree, and wrong use is one line.

test/planted_faults.py holds all faults. Here, a part of them runs: both backends, tp and sp, fp32 and bf16, every phase.
"""

import json
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch
from launch import ROOT, run_process
from planted_faults import CLEAN, FAULTS, MARKERS
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import compare_backends
from trainer.compare.locate.locate import locate as run_locate
from trainer.compare.locate.traced_pair import TracedRun, constant_ratio
from trainer.errors import UserError
from trainer.flags.common_flags import SFTArguments
from trainer.flags.parse_flags import from_flat
from trainer.flags.rules import refuse
from trainer.runs.features.module_trace import PARTS, _CompiledHook, _signs

CHOSEN = ("loss mask off by one", "packed documents see each other, bf16", "no all-reduce after down_proj", "offset of the",
          "ring counts the gradients", "norms of heads not summed over tp$", "norm of one rank", "another eps",
          "moments of one tp rank")  # fmt: skip
PAIRS = ("clean fsdp2-tp2-seq$", "clean z2-ring2-packed$", "clean fsdp2-ring2-packed-bf16")


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    command = [sys.executable, "test/planted_faults.py", "--keep", str(folder), "--only", *CHOSEN, *PAIRS]
    return folder, *run_process(command, timeout=500)


def test_planted_faults_are_found_and_clean_pairs_agree(bench):
    _, code, output = bench
    assert code == 0, output[-6000:]
    lines = output.splitlines()
    found = [line for line in lines if line.startswith("found")]
    agree = [line for line in lines if line.startswith("agree")]
    assert len(found) == len(CHOSEN) and len(agree) == len(PAIRS), output[-6000:]


def locate(*arguments: str) -> tuple[int, str]:
    return run_process([sys.executable, "compare_backends.py", "--locate", *arguments], timeout=300)


def test_two_runs_are_compared(bench, tmp_path, capsys):
    """A run agrees with itself. A trace that is not finite in one module is found there."""
    folder = bench[0]
    pair = [str(folder / "fsdp2-1r"), str(folder / "fsdp2-tp2-seq")]
    assert compare_backends.main(["--locate", *pair, "--json", str(tmp_path / "found.json")]) == 0
    assert "The runs agree up to rounding." in capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["agree"] and [row["phase"] for row in found["phases"]][:2] == ["data", "forward"]

    shutil.copytree(folder / "fsdp2-1r", tmp_path / "broken")
    trace = tmp_path / "broken/parity/trace.safetensors"
    with safe_open(trace, framework="pt") as file:
        facts = file.metadata()
    tensors = load_file(trace)
    tensors["model.layers.1.mlp.act_fn"][3] = math.nan
    save_file(tensors, trace, facts)
    assert compare_backends.main(["--locate", str(folder / "fsdp2-1r"), str(tmp_path / "broken")]) == 1
    output = capsys.readouterr().out
    assert "The runs first differ in forward, at model.layers.1.mlp.act_fn." in output, output


def test_the_part_of_a_tensor_and_its_rank_are_named(bench):
    runs = (TracedRun(name, bench[0] / name) for name in ("fsdp2-1r", "moments-of-one-tp-rank-are-lost"))
    results = run_locate(*runs)
    found = next(result.finding for result in results if result.finding)
    assert found.phase == "optimizer state" and found.where == "exp_avg/model.layers.1.mlp.up_proj.weight"
    assert found.features == "dim 0: 128 to 255 of 256, the part of tp rank 1 of moments-of-one-tp-rank-are-lost"
    clean = {result.phase: result.worst for result in results}
    assert clean["gradients"] < 1 and clean["weights"] < 1


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def drop_weight(path: Path) -> None:
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path)


def other_torch(path: Path) -> None:
    path.write_text(path.read_text().replace('"torch": "', '"torch": "1.'))


@pytest.mark.parametrize(
    ("file", "change", "code", "message"),
    [
        ("parity/trace.safetensors", cut, 2, "is not a trace"),
        ("parity/grads_step1.safetensors", cut, 2, "is cut off or edited"),
        ("parity/weights_final.safetensors", cut, 2, "is cut off or edited"),
        ("checkpoints/step_1/pieces.index", cut, 2, "is cut off or edited"),
        ("metrics.jsonl", cut, 2, "metrics.jsonl: cannot be read"),
        ("parity/weights_final.safetensors", drop_weight, 1, "The runs first differ in weights, at model.norm.weight."),
        (
            "parity/grads_step1.safetensors",
            Path.unlink,
            0,
            "since files are missing: gradients, gradient norm, optimizer state",
        ),
        ("metrics.jsonl", other_torch, 0, "other torch: "),
    ],
)
def test_broken_files_and_missing_parts_are_told(file, change, code, message, bench, tmp_path, capsys):
    shutil.copytree(bench[0] / "fsdp2-tp2-seq", tmp_path / "run")
    change(tmp_path / "run" / file)
    assert compare_backends.main(["--locate", str(bench[0] / "fsdp2-1r"), str(tmp_path / "run")]) == code
    told = capsys.readouterr()
    assert message in told.out + told.err and (code < 2 or told.err.count("\n") == 1)


def test_two_configurations_are_launched(bench, tmp_path):
    """The names are those of a matrix. The mean squared gradient differs only by rounding between micro-batches."""
    (tmp_path / "matrix.yaml").write_text(
        "configurations:\n- {name: one, nproc: 1, args: [--backend, fsdp2]}\n"
        "- {name: decayed, nproc: 1, args: [--backend, fsdp2, --adam_betas, 0.5, 0.9, --max_norm, 0.1]}\n"
    )
    demo = ["--pretrain", str(bench[0] / "demo/model"), "--dataset", str(bench[0] / "demo/sft.jsonl")]
    demo += ["--apply_chat_template", "--max_samples", "8", "--train_batch_size", "4", "--micro_train_batch_size", "2"]
    flags = ["--run", str(tmp_path / "matrix.yaml"), "--output_dir", str(tmp_path / "out")]
    code, output = locate("one", "decayed", *flags, "--", *demo, "--param_dtype", "fp32", "--learning_rate", "1e-3")
    assert code == 0, output  # clipping and betas are part of what the gradients explain
    assert (tmp_path / "out/decayed/parity/trace.safetensors").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fsdp2-1r-mb1", "nobody", "--", "--pretrain", "m"), "--locate: 'nobody'"),
        (("fsdp2-1r-mb1", "fsdp2-1r-mb1", "--", "--pretrain", "m"), "--locate: fsdp2-1r-mb1 twice"),
        (("fsdp2-1r-mb1", "fsdp2-1r-mb4"), "no arguments for training"),
        (("docs", "test"), "holds no trace.safetensors"),
        (("docs", "test", "--timeout", "5"), "--timeout: has no effect with two run folders"),
        (("docs", "test", "--plot", "a.png"), "--plot: has no effect with --locate"),
        (("fsdp2-1r-mb1", "fsdp2-1r-mb4", "--", "--parity_trace", "x"), "holds --parity_trace"),
    ],
)
def test_wrong_use_is_one_line(arguments, message, capsys):
    assert compare_backends.main(["--locate", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"param_dtype": "fp16"},
        {"load_checkpoint": "latest", "output_dir": "runs/x"},
        {"verify_resume": 1},
        {"compile": True, "tensor_parallel_size": 2},
        {"aux_loss_coef": 0.1},
    ],
)
def test_what_cannot_be_traced_is_refused(wrong):
    with pytest.raises(UserError, match="--parity_trace folder with"):
        refuse("train_sft", from_flat(SFTArguments, {"parity_trace": "folder", **wrong}))


def test_a_compiled_module_is_noted_behind_its_code():
    layer, x, noted = torch.nn.Linear(3, 2), torch.randn(4, 3), []
    expected = layer(x)
    layer.compile(backend="eager")
    compiled = layer._compiled_call_impl
    hook = _CompiledHook(layer, lambda module, inputs, output: noted.append((module, output)))
    assert torch.equal(layer(x), expected) and noted[0][0] is layer and torch.equal(noted[0][1], expected)
    hook.remove()
    assert torch.equal(layer(x), expected) and len(noted) == 1 and layer._compiled_call_impl is compiled


def test_signatures_estimate_differences_and_add_up():
    """Against explicit sums; the parts of two ranks add up; the relative difference is that of the tensors."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4000, 6, 20, generator=generator, dtype=torch.float64)
    y = x + 1e-3 * torch.randn(x.shape, generator=generator, dtype=torch.float64)
    y[..., :3, :] = x[..., :3, :]  # the first half of the features is the same
    signs = _signs((6, 20), (6, 20), (0, 0))
    a, b = x.flatten(1) @ signs, y.flatten(1) @ signs
    for part in range(PARTS):
        own = signs[part * 15 : (part + 1) * 15, part]
        assert own.abs().eq(1).all() and torch.allclose(a[:, part], x.flatten(1)[:, part * 15 : part * 15 + 15] @ own)
    halves = [x[:, :, at : at + 10].flatten(1) @ _signs((6, 20), (6, 10), (0, at)) for at in (0, 10)]
    assert torch.allclose(halves[0] + halves[1], a)
    assert ((b - a).norm() / a.norm()).item() == pytest.approx(((y - x).norm() / x.norm()).item(), rel=0.05)
    assert (b - a)[:, : PARTS // 2].abs().max() == 0 < (b - a)[:, PARTS // 2 :].abs().min()


def test_a_ratio_is_constant_or_there_is_none():
    x = torch.randn(100, 8, generator=torch.Generator().manual_seed(1))
    assert constant_ratio(x, 2 * x, 1e-6) == pytest.approx(2)
    assert constant_ratio(x, torch.zeros_like(x), 1e-6) == 0
    assert constant_ratio(x, x.flip(0), 1e-6) is None


def test_the_committed_table_is_complete():
    table = (ROOT / "docs/benchmarks.md").read_text().split(MARKERS[0])[1].split(MARKERS[1])[0]
    assert f"{len(FAULTS)} of {len(FAULTS)} planted faults are found" in table
    assert f"{len(CLEAN)} of {len(CLEAN)} clean pairs agree" in table and len(FAULTS) >= 15 and len(CLEAN) >= 20
    for fault in FAULTS:
        assert f"| {fault.name} | {fault.layout} |" in table
