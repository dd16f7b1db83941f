"""Measure what --routing_replay changes: the difference between log-probs of the rollout engine and of training.

    python scripts/bench/routing_replay.py --data ../shared/data [--update docs/benchmarks.md]

A random Qwen3-MoE answers questions of gsm8k. Four rollouts, each with one update, in bf16 and in fp32. Engine and training
run the same model, but on other shapes: token by token, and whole texts. So bf16 rounds differently, and routers choose
other experts.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from sft_speed import update

CASES = {
    "bf16": ["--param_dtype", "bf16"],
    "bf16, `--routing_replay`": ["--param_dtype", "bf16", "--routing_replay"],
    "fp32": [],
    "fp32, `--routing_replay`": ["--routing_replay"],
}

REWARD = "def reward_func(prompts, responses, labels):\n    return [len(set(text)) / 30 for text in responses]\n"


def make_model(folder: Path, tokenizer_folder: Path) -> None:
    """Save a random Qwen3-MoE of 6 layers with 32 experts, 4 for each token."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=64, moe_intermediate_size=32, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=32, num_experts_per_tok=4, norm_topk_prob=True,
        initializer_range=0.1, max_position_embeddings=512,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "reward.py").write_text(REWARD)


def command_line(model: Path, data: Path, run: Path) -> list[str]:
    """The flags of a run of train_ppo in fp32. Later flags win."""
    flags = ["--backend", "fsdp2", "--pretrain", str(model), "--dataset", str(data / "gsm8k/train.jsonl")]
    flags += ["--max_samples", "32", "--input_key", "question", "--reward_func", str(model / "reward.py")]
    flags += ["--prompt_max_len", "256", "--generate_max_len", "32", "--rollout_batch_size", "8"]
    flags += ["--n_samples_per_prompt", "2", "--advantage_estimator", "reinforce_baseline", "--train_batch_size", "16"]
    flags += ["--micro_train_batch_size", "4", "--learning_rate", "1e-4", "--param_dtype", "fp32", "--no_save"]
    return [*flags, "--init_kl_coef", "0.01", "--output_dir", str(run)]


def steps_of(run: Path) -> list[dict]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "rollout_logprob_diff" in row]


def mean_difference(run: Path) -> float:
    return statistics.fmean(row["rollout_logprob_diff"] for row in steps_of(run))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--update", type=Path, metavar="MD")
    options = parser.parse_args()
    lines = ["| | `rollout_logprob_diff` | `rollout_logprob_diff_max` | `rollout_kl` |", "|---|---:|---:|---:|"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model", options.data / "models/stories260K-hf")
        for number, (case, flags) in enumerate(CASES.items()):
            run = folder / str(number)
            line = [*command_line(folder / "model", options.data, run), *flags]
            subprocess.run([sys.executable, "-m", "trainer.cli.train_ppo", *line], check=True)
            largest = max(row["rollout_logprob_diff_max"] for row in steps_of(run))
            kl = statistics.fmean(row["rollout_kl"] for row in steps_of(run))
            lines.append(f"| {case} | {mean_difference(run):.1e} | {largest:.1e} | {kl:.1e} |")
    print("\n".join(lines))
    if options.update:
        update(options.update, "routing_replay", "\n".join(lines))


if __name__ == "__main__":
    main()
