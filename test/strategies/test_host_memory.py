"""The memory of weights, gradients and optimizer states is the predicted one, on every backend and stage.

A part of the runs, each on 1 or 2 ranks. `PARITY=full pytest -s` measures all of them on 1, 2 and 4 ranks.
"""

import json
import math
import shutil
import tempfile
import weakref
from pathlib import Path

import pytest
import torch
from launch import FULL, ROOT, torchrun
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from scripts.measured_memory import GLIBC, RUNS, make_model
from trainer.model_folders import model_folder
from trainer.planning.predicted_memory import predict, table
from trainer.strategies.deepspeed import DeepspeedStrategy
from trainer.strategies.options import StrategyOptions

TOLERANCE = 0.1
SAMPLE = {
    1: ["fsdp2-3-fp32", "deepspeed-1-fp32", "deepspeed-3-bf16"],
    2: ["fsdp2-3-bf16", "deepspeed-3-bf16", "deepspeed-2-bf16"],
}
# bytes of a rank for each parameter of its share after loading: masters; with ZeRO 3 also bf16 weights and gradients
KEPT = {"fsdp2-3-bf16": 4, "deepspeed-3-bf16": 4 + 2 + 4}


@pytest.fixture(scope="module")
def folder():
    """A folder in memory: the checkpoints of all runs would take a disk minutes."""
    root = "/dev/shm" if Path("/dev/shm").is_dir() and shutil.disk_usage("/dev/shm").free > 4 << 30 else None
    with tempfile.TemporaryDirectory(dir=root) as name:
        yield Path(name) / "demo"


@pytest.mark.parametrize("num_ranks", [1, 2, 4] if FULL else SAMPLE)
def test_memory_is_the_predicted_one(num_ranks, folder):
    runs = RUNS if FULL else SAMPLE[num_ranks]
    shutil.rmtree(folder, ignore_errors=True)
    # activations, which are not predicted, are small beside a rank's share of a model of few, wide layers
    width, layers = (768, 7) if num_ranks > 2 else (384, 27)
    num_params, layer = make_model(folder, width, layers)
    sizes = {"num_params": num_params, "largest_layer": layer, "largest_tensor": width * (width * 8 // 3)}
    command = ["-m", "scripts.measured_memory", str(folder), "cpu", *runs]
    code, output = torchrun(num_ranks, *command, timeout=1800, **GLIBC)
    assert code == 0, output[-6000:]
    found, wrong = json.loads((folder / f"peaks-{num_ranks}.json").read_text()), []
    for name in runs:
        backend, stage, dtype = name.split("-")
        for phase, expected in vars(predict(backend, int(stage), dtype, num_ranks, **sizes)).items():
            line = f"{name} {phase}: {found[name][phase] / num_params:.2f} bytes per parameter"
            line += f", predicted {expected / num_params:.2f}"
            print(line)
            wrong += [] if math.isclose(found[name][phase], expected, rel_tol=TOLERANCE) else [line]
    assert len(found) == len(runs) and not wrong, "\n".join(wrong)
    for name in KEPT.keys() & found.keys() if num_ranks > 1 else ():
        share = KEPT[name] * num_params / num_ranks
        assert share < found[name]["load"] <= 1.5 * share, (name, found[name]["load"] / share)
        print(f"{name}: loading on {num_ranks} ranks takes {found[name]['load'] / share:.2f} of a rank's share")


def test_the_table_of_the_page_is_what_the_function_says():
    assert table(8) in (ROOT / "docs/layouts.md").read_text()


def test_zero_0_to_2_hold_one_tensor_in_host_memory_while_they_load(tmp_path, monkeypatch):
    """The device is the one without memory, so what is read is all that the host could hold."""
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4
    )
    LlamaForCausalLM(config).float().save_pretrained(tmp_path)
    strategy = DeepspeedStrategy(StrategyOptions(param_dtype="bf16", device="cpu"))
    strategy.device = torch.device("meta")
    model = strategy.load_model(str(tmp_path), AutoModelForCausalLM)
    open_weights, came, peak = model_folder.open_weights, [], [0]

    def opened(*args):
        weights = open_weights(*args)
        read = weights.read

        def noted(name, *region):
            tensor = read(name, *region)
            came.append((weakref.ref(tensor), tensor.nbytes))
            peak[0] = max(peak[0], sum(size for alive, size in came if alive() is not None))
            return tensor

        weights.read = noted
        return weights

    monkeypatch.setattr(model_folder, "open_weights", opened)
    strategy._read(model)
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.bfloat16)}
    assert len(came) == len(dict(model.named_parameters())) and peak[0] == max(size for _, size in came)
