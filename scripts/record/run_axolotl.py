"""One condition with axolotl: `python run_axolotl.py INPUTS OUTPUT CONDITION_JSON`. The files are those of run_hf.py."""

import json
import os
import sys
from pathlib import Path

import yaml
from axolotl.cli.train import do_cli
from weights import keep_weights


def pair_of_texts(line: str) -> str:
    row = json.loads(line)
    texts = {
        name: row[key][0]["content"] for name, key in (("input", "prompt"), *((s, s) for s in ("chosen", "rejected")))
    }
    return json.dumps({"system": "", **texts})


def main(inputs: Path, output: Path, condition: dict) -> None:
    method = condition.get("method")
    rows = output.parent / f"{output.name}-rows.jsonl"
    name = "pairs" if method else "rows" if condition.get("messages") else "rows_tokens"
    lines = (inputs / f"{name}.jsonl").read_text().splitlines()[: condition["rows"]]
    rows.write_text("\n".join(map(pair_of_texts, lines) if method == "rm" else lines) + "\n")
    kind = {"type": None}
    if condition.get("messages"):
        kind = {
            "type": "chat_template", "chat_template": "tokenizer_default", "roles_to_train": ["assistant"], "train_on_eos": "turn",
        }  # fmt: skip
    if method == "dpo":
        kind = {"type": "chat_template.default", "field_messages": "prompt", "split": "train"}
    if method == "rm":
        kind = {"type": "bradley_terry.chat_template", "drop_system_message": True}  # else an empty turn of the system
    settings = {
        "base_model": str(inputs / "model"), "datasets": [{"path": str(rows), "ds_type": "json", **kind}],
        "dataset_prepared_path": f"{output}-prepared", "output_dir": str(output), "sequence_len": condition["max_length"],
        "micro_batch_size": condition["batch"], "eval_batch_size": 4, "gradient_accumulation_steps": condition["accumulation"],
        "num_epochs": condition["epochs"], "optimizer": "adamw_torch", "lr_scheduler": "constant", "learning_rate": condition["learning_rate"],
        "warmup_steps": 0, "weight_decay": 0.0, "max_grad_norm": 1.0, "bf16": False, "fp16": False, "tf32": False, "logging_steps": 1,
        "save_steps": 2, "val_set_size": 0, "shuffle_merged_datasets": False, "curriculum_sampling": True, "sample_packing": bool(condition.get("packing")),
        "pad_to_sequence_len": False, "attn_implementation": "sdpa", "gradient_checkpointing": False, "use_cpu": True, "seed": 1,
        "save_total_limit": 9,
    }  # fmt: skip
    if method:
        settings["chat_template"] = "tokenizer_default"
    if method == "dpo":
        settings |= {"rl": "dpo", "rl_beta": 0.1}
    if method == "rm":
        settings |= {
            "base_model": str(inputs / "reward_model"), "model_type": "AutoModelForSequenceClassification", "num_labels": 1,
            "reward_model": True, "remove_unused_columns": False,
        }  # fmt: skip
    if condition.get("lora"):
        settings |= {
            "adapter": "lora",
            "lora_model_dir": str(inputs / "adapter"),
            "lora_r": 4,
            "lora_alpha": 8,
            "lora_target_linear": True,
        }
        settings |= dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"), False)  # Triton, for GPUs
    if condition.get("evaluation"):
        tokens = {"path": str(inputs / "eval_tokens.jsonl"), "ds_type": "json", "type": None, "split": "train"}
        settings |= {"test_datasets": [tokens], "evals_per_epoch": 1}
        del settings["val_set_size"]
    if condition.get("resume_from"):
        settings["resume_from_checkpoint"] = condition["resume_from"]
    config = output.parent / f"{output.name}.yaml"
    config.write_text(yaml.safe_dump(settings))
    do_cli(config=str(config))
    if os.environ.get("RANK", "0") == "0":
        keep_weights(output, output, inputs / "model" if condition.get("lora") else None)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
