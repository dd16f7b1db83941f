"""One condition with this trainer: `python run_ours.py fsdp2|deepspeed INPUTS OUTPUT CONDITION_JSON`.

OUTPUT gets `log.json`, with the names of the HF Trainer's log, and `model/`.
"""

import json
import os
import sys
from pathlib import Path

from weights import keep_weights

from trainer.cli import train_dpo, train_ppo, train_rm, train_sft


def strings(value) -> list[str]:
    return [str(one) for one in value] if isinstance(value, tuple) else [str(value)]


def method_flags(method: str, inputs: Path, condition: dict) -> dict:
    """What DPO, reward models and GRPO need beyond the flags of a run."""
    if method == "dpo":
        return {"beta": 0.1}
    if method == "rm":
        return {"pretrain": inputs / "reward_model", "tensor_parallel_size": condition.get("tp", 1)}
    rollouts = "rollouts_top_k" if condition.get("top_k") else "rollouts"
    return {
        "dataset": inputs / "prompts.jsonl", "input_key": "prompt", "rollouts_from": inputs / f"{rollouts}.jsonl", "rollout_batch_size": 2,
        "n_samples_per_prompt": 4, "advantage_estimator": "dr_grpo", "loss_agg": "token", "max_steps": condition["epochs"], "max_epochs": 1,
        "temperature": 1.0, "generate_max_len": 64, "prompt_max_len": 256, "top_k": condition.get("top_k", 0),
    }  # fmt: skip


def main(backend: str, inputs: Path, output: Path, condition: dict) -> None:
    ranks = condition.get("ranks", 1)
    first = condition["batch"] * condition["accumulation"] * ranks
    batch, micro = (condition["rows"], condition["rows"]) if condition.get("packing") else (first, condition["batch"])
    flags = {
        "backend": backend, "pretrain": inputs / "model", "dataset": f"{inputs}/rows.jsonl#{condition['rows']}",
        "apply_chat_template": "true", "multiturn": "true", "param_dtype": condition.get("dtype", "fp32"), "train_batch_size": batch,
        "micro_train_batch_size": micro, "max_epochs": condition["epochs"], "learning_rate": condition["learning_rate"],
        "lr_scheduler": "constant", "lr_warmup_ratio": 0, "adam_betas": (0.9, 0.999), "weight_decay": 0, "max_norm": 1.0, "adam_eps": condition.get("eps", 1e-8), "max_len": condition["max_length"],
        "output_dir": output / "run", "no_shuffle": "true", "save_steps": 2,
    }  # fmt: skip
    if backend == "deepspeed":
        flags["zero_stage"] = 2
    if condition.get("packing"):
        flags["packing_samples"] = "true"
    if condition.get("lora"):
        flags["pretrain"], flags["merge_adapter"] = inputs / "adapter", "false"
    if condition.get("evaluation"):
        flags |= {"eval_dataset": inputs / "eval.jsonl", "eval_steps": 1}
    if condition.get("resume_from"):
        flags["load_checkpoint"] = str(output).removesuffix("-resumed") + "/run/checkpoints/step_2"
    command = train_sft
    if method := condition.get("method"):
        command = {"dpo": train_dpo, "rm": train_rm, "grpo": train_ppo}[method]
        for name in ("multiturn", *(["max_len", "apply_chat_template"] if method == "grpo" else [])):
            del flags[name]
        flags |= {"dataset": f"{inputs}/pairs.jsonl#{condition['rows']}", **method_flags(method, inputs, condition)}
    command.run([part for name, value in flags.items() for part in (f"--{name}", *strings(value))])
    if os.environ.get("RANK", "0") == "0":
        rows = [json.loads(line) for line in (output / "run/metrics.jsonl").read_text().splitlines()]
        if condition.get("resume_from"):
            before = Path(str(output).removesuffix("-resumed")) / "log.json"
            rows = [row for row in json.loads(before.read_text()) if row.get("step", 99) <= 2] + rows
        (output / "log.json").write_text(json.dumps(rows))
        keep_weights(output / "run/model", output, inputs / "model" if condition.get("lora") else None)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4]))
