"""`python -m trainer.cli.check`: what works is told with its flags, what is refused with the reason, and what is wrong."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from launch import ROOT, in_fork, run_process
from transformers import FalconH1Config, GptOssConfig, T5Config

from trainer.compare.zoo.check_model import LAYOUTS, LEFT_OUT, main
from trainer.compare.zoo.zoo_own import MAX_ROLLOUT_KL, RL, judge_rl
from trainer.datasets.demos.demo import make_demo

# The same command on a trainer with a planted fault: every loss counts one percent too much.
PLANTED = """
import sys
from trainer.methods import sft
from trainer.compare.zoo import check_model
right = sft.sft_loss
sft.sft_loss = lambda *args: [part * 1.01 if number == 0 else part for number, part in enumerate(right(*args))]
sys.exit(check_model.main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Model folders: the demo; gpt-oss with weights that GPTQ quantized; a hybrid whose file of weights is cut off."""
    folder = tmp_path_factory.mktemp("check")
    make_demo(str(folder / "demo"))
    GptOssConfig(quantization_config={"quant_method": "gptq", "bits": 4}).save_pretrained(folder / "gptq")
    FalconH1Config(num_hidden_layers=4).save_pretrained(folder / "hybrid")
    shutil.copy(folder / "demo/model/tokenizer.json", folder / "hybrid")
    weights = (folder / "demo/model/model.safetensors").read_bytes()
    (folder / "hybrid/model.safetensors").write_bytes(weights[: len(weights) // 2])
    return folder


def check(folder: Path, model: str, *only: str, start: tuple = ("-m", "trainer.cli.check")) -> tuple[int, str, dict]:
    """(exit code, output, {name: row})"""
    table = folder / f"{model.replace('/', '-')}.json"
    line = [*start, str(folder / model), "--json", str(table), "--only", *only]
    is_module = start[0] == "-m"
    code, output = in_fork(*line, timeout=400) if is_module else run_process([sys.executable, *line], timeout=400)
    rows = json.loads(table.read_text()) if table.exists() else []
    return code, output, {row["name"]: row for row in rows}


def test_a_model_that_works(folder):
    code, output, rows = check(folder, "demo/model", "weights", "templates", "fsdp2-2r", "tp2-deepspeed", "save", "rl")
    assert code == 0, output[-4000:]
    verdicts = {name: row["verdict"] for name, row in rows.items()}
    works = ("weights", "chat", "multiturn", "thoughts", "fsdp2-2r", "tp2-deepspeed", "save", "rl")
    assert verdicts == {**dict.fromkeys(works, "pass"), "tools": "refused"}
    assert "model       Qwen3ForCausalLM, model_type qwen3" in output and "parameters  216,000; all" in output
    assert "tp2-deepspeed  works    --backend deepspeed --zero_stage 1 --tensor_parallel_size 2 (2 ranks)" in output
    assert rows["weights"]["note"] == "not quantized: read as they are; complete"
    assert rows["thoughts"]["note"].endswith("the template drops the thoughts")
    assert output.endswith("8 works, 1 refused\n")


def test_a_folder_that_cannot_be_read_and_has_no_tokenizer(folder):
    code, output, rows = check(folder, "gptq", "weights", "templates", "fsdp2-2r")
    assert code == 0, output[-4000:]
    assert rows["weights"]["verdict"] == "refused" and "weights quantized by gptq" in rows["weights"]["note"]
    assert rows["templates"]["verdict"] == "refused" and "contains no tokenizer" in rows["templates"]["note"]
    assert rows["fsdp2-2r"]["verdict"] == "pass"
    assert "attention   eager" in output and "18 sliding_attention of 128 tokens" in output  # it has no sdpa


def test_a_hybrid_with_half_a_file_and_a_trainer_with_a_fault(folder):
    code, output, rows = check(folder, "hybrid", "weights", "fsdp2", start=("-c", PLANTED))
    assert code == 1, output[-4000:]
    assert rows["weights"]["verdict"] == "refused" and "is cut off" in rows["weights"]["note"]
    assert rows["fsdp2"]["verdict"] == "wrong" and "loss" in rows["fsdp2"]["note"]
    assert "fsdp2          WRONG" in output and "Please report it with this table and /" in output
    kept = Path(output.split("this table and ")[1].split("/model/*.log")[0])
    assert (kept / "model/fsdp2.log").exists()
    shutil.rmtree(kept)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["nowhere/at-all"], "error: MODEL: nowhere/at-all is not a folder, and the hub does not give it"),
        (["./nowhere"], "error: MODEL: ./nowhere is not a folder (allowed: a Hugging Face model folder or hub name)"),
        ([str(ROOT / "docs")], f"error: MODEL: {ROOT}/docs contains no config.json"),
        (["x", "--only", "ring3"], "error: --only: ring3 (allowed: fsdp2, "),
    ],
)
def test_usage_errors(arguments, line, capsys):
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert told.startswith(line) and told.count("\n") == 1, told


def test_a_kind_that_no_command_trains_ends_with_2(tmp_path):
    T5Config(d_model=8, num_layers=1).save_pretrained(tmp_path / "t5")
    code, output, _ = check(tmp_path, "t5", "weights")
    assert code == 2 and "transformers has no CausalLM for t5" in output


@pytest.mark.parametrize(("kl", "verdict"), [(0.0, "pass"), (10 * MAX_ROLLOUT_KL, "wrong"), (float("nan"), "wrong")])
def test_an_engine_with_other_log_probs_is_wrong(tmp_path, kl, verdict):
    (tmp_path / "rl").mkdir()
    rows = [{"event": "start"}, {"step": 1, "rollout_kl": kl}]
    (tmp_path / "rl/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert judge_rl(RL, tmp_path)[0] == verdict


def test_the_page_lists_every_run():
    page = (ROOT / "docs/check.md").read_text()
    assert all(f"\n{name} " in page for name in [*LAYOUTS, "weights"] if name not in LEFT_OUT)
