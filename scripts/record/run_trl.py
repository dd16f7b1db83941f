"""One condition of methods.py with TRL: `python run_trl.py INPUTS OUTPUT CONDITION_JSON`. The files are those of run_hf.py.

GRPO trains on given rollouts, through TRL's own `rollout_func`. With "engine_log_probs" it also corrects by the sampler's
log-probs, as it does for those of vLLM.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from datasets import Dataset, load_dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer
from weights import tensor_parallel


def read(path: Path, number: int) -> Dataset:
    return load_dataset("json", data_files=str(path), split="train").select(range(number))


def main(inputs: Path, output: Path, condition: dict) -> None:
    settings = {
        "output_dir": str(output), "per_device_train_batch_size": condition["batch"], "gradient_accumulation_steps": condition["accumulation"],
        "num_train_epochs": condition["epochs"], "learning_rate": condition["learning_rate"], "lr_scheduler_type": "constant", "weight_decay": 0.0,
        "max_grad_norm": 1.0, "logging_steps": 1, "save_strategy": "no", "bf16": False, "use_cpu": True, "report_to": "none", "disable_tqdm": True,
        "gradient_checkpointing": False,
    }  # fmt: skip
    if condition.get("in_order"):
        settings["train_sampling_strategy"] = "sequential"
    tokenizer = AutoTokenizer.from_pretrained(inputs / "model")
    if condition["method"] == "rm":
        if condition.get("tp"):
            settings["deepspeed"] = tensor_parallel(condition["tp"])
        if condition.get("dtype") == "bf16":
            settings |= {"bf16": True, "deepspeed": settings["deepspeed"] | {"bf16": {"enabled": True}}}
        rows = read(inputs / "pairs_tokens.jsonl", condition["rows"])
        whole = rows.map(
            lambda row: {side: row["prompt_ids"] + row[side] for side in ("chosen_ids", "rejected_ids")},
            remove_columns="prompt_ids",
        )
        config = RewardConfig(max_length=condition["max_length"], **settings)
        model = AutoModelForSequenceClassification.from_pretrained(inputs / "reward_model", dtype=torch.float32)
        trainer = RewardTrainer(model, config, train_dataset=whole, processing_class=tokenizer)
    else:
        model = AutoModelForCausalLM.from_pretrained(inputs / "model", dtype=torch.float32)
    if condition["method"] == "dpo":
        config = DPOConfig(max_length=condition["max_length"], beta=0.1, **settings)
        rows = read(inputs / "pairs_text.jsonl", condition["rows"])
        trainer = DPOTrainer(model, args=config, train_dataset=rows, processing_class=tokenizer)
    if condition["method"] == "grpo":
        name = "rollouts_top_k" if condition.get("top_k") else "rollouts"
        rows = [json.loads(line) for line in (inputs / f"{name}.jsonl").read_text().splitlines()]
        rollouts = iter([rows[start : start + condition["rows"]] for start in range(0, len(rows), condition["rows"])])

        def given(prompts, _trainer) -> dict:
            samples = next(rollouts)
            assert len(samples) == len(prompts)
            found = {
                "prompt_ids": "prompt_ids",
                "completion_ids": "response_ids",
                "logprobs": "log_probs",
                "score": "score",
            }
            return {key: [sample[name] for sample in samples] for key, name in found.items()}

        settings |= {"num_train_epochs": 1, "shuffle_dataset": False, "top_k": condition.get("top_k", 0)}
        config = GRPOConfig(
            num_generations=4, max_completion_length=64, beta=0.0, loss_type="dapo", scale_rewards="none", temperature=1.0,
            vllm_importance_sampling_mode="token_truncate", **settings,
        )  # fmt: skip
        prompts = Dataset.from_list([{"prompt": "not read"}] * (2 * condition["epochs"]))
        trainer = GRPOTrainer(
            model, reward_funcs=lambda completions, score, **_: score, args=config, train_dataset=prompts,
            processing_class=tokenizer, rollout_func=given,
        )  # fmt: skip
        if condition.get("engine_log_probs"):  # an engine whose weights need no update: its samples are given
            trainer.use_vllm, trainer._last_loaded_step = True, -1
            trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
    trainer.train()
    trainer.save_model(str(output / "model"))
    if trainer.is_world_process_zero():
        (output / "log.json").write_text(json.dumps(trainer.state.log_history))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
