"""Models that ended in a traceback or a wrong number: layers with their own head sizes, no sdpa, buffers of the parent.

Tiny random ones, through train_sft on two ranks, against the plain loop.
"""

import json
import shutil

import pytest
import torch
import transformers
from launch import ROOT, forked, in_fork, read_steps, train_many
from transformers import AutoModelForCausalLM

from trainer.datasets.demos.demo import make_demo
from trainer.metrics import flops_per_token

SIZES = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "pad_token_id": 0, "max_position_embeddings": 256,
}  # fmt: skip
MODELS = {
    "gemma4": lambda: transformers.Gemma4TextConfig(
        **SIZES, num_hidden_layers=6, global_head_dim=16, num_global_key_value_heads=1, hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=300, sliding_window=16,
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZES, num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2, sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "falcon_h1": lambda: transformers.FalconH1Config(
        **SIZES, num_hidden_layers=2, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=8,
        mamba_chunk_size=16, ssm_multipliers=[0.5, 0.7, 1.1, 1.3, 1.7],
    ),
}  # fmt: skip
RUNS = {
    f"{model}-{layout}": (model, flags)
    for model in MODELS
    for layout, flags in {
        "fsdp2": ["--backend", "fsdp2"],
        "z3": ["--backend", "deepspeed", "--zero_stage", "3"],
    }.items()
}
STEPS = 3


def command_line(model: str, name: str, folder) -> list[str]:
    line = ["--pretrain", str(folder / model), "--dataset", str(folder / "demo/sft.jsonl"), "--apply_chat_template"]
    line += [
        "--max_samples",
        "48",
        "--train_batch_size",
        "16",
        "--micro_train_batch_size",
        "4",
        "--max_steps",
        str(STEPS),
    ]
    line += ["--learning_rate", "1e-3", "--param_dtype", "fp32", "--no_save"]
    return [*line, "--output_dir", str(folder / name)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kinds")
    make_demo(str(folder / "demo"))
    for model, config in MODELS.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config()).save_pretrained(folder / model)
        for path in (folder / "demo/model").iterdir():
            if path.name.startswith(("tokenizer", "chat_template")):
                shutil.copy(path, folder / model)
        line = command_line(model, f"{model}-reference", folder)
        code, output = forked(1, str(ROOT / "test/reference.py"), *line)
        assert code == 0, output[-4000:]
    lines = [[*command_line(model, name, folder), *flags] for name, (model, flags) in RUNS.items()]
    output = train_many(2, lines, folder, timeout=400)
    assert "eager, since transformers has no sdpa for this model" in output
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_losses_are_those_of_the_plain_loop(runs, name):
    found, expected = read_steps(runs / name), read_steps(runs / f"{RUNS[name][0]}-reference")
    assert len(found) == len(expected) == STEPS
    for row, other in zip(found, expected):
        assert abs(row["loss"] - other["loss"]) <= 1e-5 * other["loss"], (row["step"], row["loss"], other["loss"])
        assert abs(row["grad_norm"] - other["grad_norm"]) <= 1e-4 * other["grad_norm"], row["step"]


def test_flops_count_the_heads_of_each_layer(tmp_path):
    config = MODELS["gemma4"]()
    # 5 layers of 4 heads of 8, and a last one of 4 heads of 16
    assert flops_per_token(config, 0, 10.0) == 6 * (5 * 32 + 64) * 10.0


def test_sdpa_that_is_asked_for_and_not_there_is_one_line(runs):
    line = [*command_line("gpt_oss", "refused", runs), "--attn_implementation", "sdpa"]
    code, output = in_fork("-m", "trainer.cli.train_sft", *line)
    assert (
        code == 2 and "error: --attn_implementation: sdpa, which the model of" in output and "Traceback" not in output
    )


def test_a_quantized_folder_is_one_line(runs, tmp_path):
    shutil.copytree(runs / "falcon_h1", tmp_path / "gptq")
    config = json.loads((tmp_path / "gptq/config.json").read_text())
    (tmp_path / "gptq/config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    line = [*command_line("falcon_h1", "gptq", runs), "--pretrain", str(tmp_path / "gptq")]
    code, output = in_fork("-m", "trainer.cli.train_sft", *line)
    assert code == 2 and "holds weights quantized by gptq" in output and "Traceback" not in output
