"""The models and machines of docs/plan.md. Configs are written by hand: nothing is downloaded.

`python plan_models.py` writes the tables of the page anew.
"""

import functools
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig, Qwen3Config

from trainer.cli.plan import parse
from trainer.planning.layout_plan import report

PAGE = Path(__file__).resolve().parent.parent / "docs/plan.md"
CONFIGS = {
    "qwen3-8b": Qwen3Config(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128,
    ),
    "llama-70b": LlamaConfig(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8,
    ),
    "deepseek-v3": DeepseekV3Config(),  # the defaults of transformers are those of the model
}  # fmt: skip
COMMANDS = [
    "qwen3-8b --gpus 8",
    "llama-70b --gpus 16 --nodes 2 --host_memory 2000",
    "llama-70b --gpus 32 --nodes 4 --host_memory 2000",
    "llama-70b --gpus 64 --nodes 8 --host_memory 2000",
    "deepseek-v3 --gpus 256 --nodes 32 --host_memory 2000 --train_batch_size 256",
    "qwen3-8b --gpus 8 --rollout_engine vllm_server --servers 24 --max_staleness 2 --sync_deltas",
    "qwen3-8b --gpus 1 --gpu_memory 24 --reserve 2 --max_len 2048 --lora_rank 16",
]


@functools.cache
def meta_model(name: str) -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(CONFIGS[name])


def block(line: str) -> str:
    """A command and its report, as they stand on the page: without the lines of commands, and six rows of the table."""
    name, *rest = parse(line.split())
    text = report(meta_model(name), name, *rest)
    head, count, table, *rest = text.split("\n\n")
    reasons = "\n\n".join([part + "\n\nThe rest:" for part in rest if part.startswith("Rollouts by")] or ["The rest:"])
    reasons += f"\n\n{rest[-1]}"
    table = "\n".join(table.splitlines()[:8])
    mark = "<!-- run by: test/test_plan.py -->"
    return f"{mark}\n```bash\npython -m trainer.cli.plan {line}\n```\n\n{head}.\n\n{count}\n\n{table}\n\n{reasons}"


if __name__ == "__main__":
    text = PAGE.read_text()
    for number, line in enumerate(COMMANDS):
        start, end = f"<!-- plan {number} -->\n", f"<!-- end {number} -->"
        before, _, after = text.partition(start)
        text = before + start + block(line) + "\n" + end + after.partition(end)[2]
    PAGE.write_text(text)
    sys.exit(0)
