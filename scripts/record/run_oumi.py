"""One condition with Oumi: `python run_oumi.py INPUTS OUTPUT CONDITION_JSON`. The files are those of run_hf.py.

Its recipes train with TRL's SFTTrainer, on rows that Oumi renders, masks, packs and collates; pairs with TRL's DPOTrainer.
"""

import json
import os
import sys
from pathlib import Path

from oumi import train
from oumi.core.configs import TrainingConfig
from weights import keep_weights


def main(inputs: Path, output: Path, condition: dict) -> None:
    rows = output.parent / f"{output.name}-rows.jsonl"
    is_dpo = condition.get("method") == "dpo"
    name = "pairs_text" if is_dpo else "rows"
    rows.write_text("".join((inputs / f"{name}.jsonl").read_text().splitlines(keepends=True)[: condition["rows"]]))

    def split(path: Path) -> dict:
        if is_dpo:
            return {"datasets": [{"dataset_name": "text_dpo_jsonl", "dataset_path": str(path)}]}
        kind = {"dataset_name": "text_sft", "dataset_path": str(path), "dataset_kwargs": {"assistant_only": True}}
        return {"datasets": [kind], "collator_name": "text_with_padding"}

    model = {
        "model_name": str(inputs / "model"), "model_max_length": condition["max_length"], "torch_dtype_str": "float32",
        "attn_implementation": "sdpa", "device_map": None,
    }  # fmt: skip
    training = {
        "trainer_type": "TRL_SFT", "output_dir": str(output), "per_device_train_batch_size": condition["batch"], "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": condition["accumulation"], "num_train_epochs": condition["epochs"],
        "learning_rate": condition["learning_rate"], "lr_scheduler_type": "constant", "weight_decay": 0.0, "max_grad_norm": 1.0,
        "logging_steps": 1, "save_steps": 2, "enable_tensorboard": False, "trainer_kwargs": {"use_cpu": True},
    }  # fmt: skip
    if is_dpo:
        training |= {"trainer_type": "TRL_DPO"}
        training["trainer_kwargs"] |= {"beta": 0.1, "max_length": condition["max_length"]}
    data = {"train": split(rows)}
    if condition.get("packing"):
        data["train"]["pack"] = True
    if condition.get("evaluation"):
        data["validation"] = split(inputs / "eval.jsonl")
        training["eval_strategy"] = "epoch"
    if condition.get("in_order"):
        training["trainer_kwargs"]["train_sampling_strategy"] = "sequential"
    if condition.get("lora"):
        model |= {"adapter_model": str(inputs / "adapter"), "adapter_trainable": True}
    if condition.get("resume_from"):
        training["resume_from_checkpoint"] = condition["resume_from"]
    config = output.parent / f"{output.name}.yaml"
    config.write_text(json.dumps({"model": model, "data": data, "training": training}))  # JSON is YAML
    train(TrainingConfig.from_yaml(config))
    if os.environ.get("RANK", "0") == "0":
        keep_weights(output, output, inputs / "model" if condition.get("lora") else None)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
