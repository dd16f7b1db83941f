"""One condition with ms-swift: `python run_swift.py INPUTS OUTPUT CONDITION_JSON`. The files are those of run_hf.py."""

import json
import os
import sys
from pathlib import Path

from swift import rlhf_main, sft_main
from weights import keep_weights, tensor_parallel

NAMES = {"": "chosen", "rejected_": "rejected"}


def pair(line: str) -> str:
    row = json.loads(line)
    return json.dumps({f"{name}messages": row["prompt"] + row[side] for name, side in NAMES.items()})


def main(inputs: Path, output: Path, condition: dict) -> None:
    method, rows = condition.get("method"), output.parent / f"{output.name}-rows.jsonl"
    lines = (inputs / ("pairs.jsonl" if method else "rows.jsonl")).read_text().splitlines()[: condition["rows"]]
    rows.write_text("\n".join(map(pair, lines) if method else lines) + "\n")
    settings = {
        "model": inputs / "model", "model_type": "qwen3", "template": "chatml", "tuner_type": "lora" if condition.get("lora") else "full",
        "torch_dtype": "float32", "dataset": rows, "split_dataset_ratio": 0, "dataset_shuffle": "false", "train_dataloader_shuffle": "false",
        "output_dir": output, "add_version": "false", "max_length": condition["max_length"], "attn_impl": "sdpa",
        "per_device_train_batch_size": condition["batch"], "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": condition["accumulation"], "num_train_epochs": condition["epochs"],
        "learning_rate": condition["learning_rate"], "lr_scheduler_type": "constant", "warmup_ratio": 0, "weight_decay": 0,
        "adam_beta2": 0.999, "max_grad_norm": 1.0, "logging_steps": 1, "save_steps": 2, "use_cpu": "true", "bf16": "false", "fp16": "false",
        "report_to": "none", "gradient_checkpointing": "false", "use_hf": "true", "dataloader_num_workers": 0, "dataset_num_proc": 1,
    }  # fmt: skip
    if condition.get("lora"):
        settings["adapters"] = inputs / "adapter"
    if condition.get("packing"):
        settings["packing"] = "true"
    if condition.get("evaluation"):
        settings |= {"val_dataset": inputs / "eval.jsonl", "eval_strategy": "epoch"}
    if condition.get("resume_from"):
        settings["resume_from_checkpoint"] = condition["resume_from"]
    if method:
        settings |= {"rlhf_type": method, "beta": 0.1}
    if method == "rm":
        settings |= {
            "model": inputs / "reward_model",
            "train_sampling_strategy": "sequential",
        }  # without the mixin of the flag above
    if condition.get("tp"):
        settings["deepspeed"] = json.dumps(tensor_parallel(condition["tp"]))
    run = rlhf_main if method else sft_main
    run([part for name, value in settings.items() for part in (f"--{name}", str(value))])
    if os.environ.get("RANK", "0") == "0":
        last = sorted(output.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))[-1]
        keep_weights(last, output, inputs / "model" if condition.get("lora") else None)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
