"""One condition with LLaMA-Factory: `python run_llamafactory.py INPUTS OUTPUT CONDITION_JSON`. The files are those of run_hf.py."""

import json
import os
import sys
from pathlib import Path

from weights import keep_weights


def main(inputs: Path, output: Path, condition: dict) -> None:
    # fp32 on the CPU; several ranks are started by this script's own launcher
    from datasets import Dataset, DatasetDict
    from llamafactory.train.tuner import run_exp

    def read(name: str) -> list[dict]:
        return [json.loads(line) for line in (inputs / name).read_text().splitlines()]

    settings = {
        "stage": "sft", "do_train": True, "model_name_or_path": str(inputs / "model"), "output_dir": str(output),
        "finetuning_type": "lora" if condition.get("lora") else "full", "template": "chatml", "dataset": "rows", "dataset_dir": str(output),
        "cutoff_len": condition["max_length"], "per_device_train_batch_size": condition["batch"], "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": condition["accumulation"], "num_train_epochs": condition["epochs"],
        "learning_rate": condition["learning_rate"], "lr_scheduler_type": "constant", "weight_decay": 0.0, "max_grad_norm": 1.0,
        "logging_steps": 1, "save_steps": 2, "bf16": False, "fp16": False, "use_cpu": True, "report_to": "none",
        "disable_gradient_checkpointing": True, "flash_attn": "sdpa", "infer_dtype": "float32", "seed": 1, "plot_loss": False,
        "ddp_timeout": 600, "overwrite_output_dir": True,
    }  # fmt: skip
    if condition.get("in_order"):
        settings["disable_shuffling"] = True
    if condition.get("lora"):
        settings["adapter_name_or_path"] = str(inputs / "adapter")
    if condition.get("resume_from"):
        settings["resume_from_checkpoint"] = condition["resume_from"]
        settings["overwrite_output_dir"] = False
    if condition.get("packing"):
        settings |= {"packing": True, "neat_packing": True}
    if condition.get("messages") or condition.get("packing"):
        tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
        rows = [json.dumps(row) for row in read("rows.jsonl")[: condition["rows"]]]
        (output / "rows.jsonl").write_text("\n".join(rows) + "\n")
        info = {"file_name": "rows.jsonl", "formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": tags}
        (output / "dataset_info.json").write_text(json.dumps({"rows": info}))
    else:
        parts = {"train": Dataset.from_list(read("rows_tokens.jsonl")[: condition["rows"]])}
        if condition.get("evaluation"):
            parts["validation"] = Dataset.from_list(read("eval_tokens.jsonl"))
            settings |= {"eval_strategy": "epoch", "eval_dataset": "rows"}  # the tokenized part is taken
        if os.environ.get("LOCAL_RANK", "0") == "0":
            DatasetDict(parts).save_to_disk(str(output.parent / f"{output.name}-tokens"))
        while not (output.parent / f"{output.name}-tokens/dataset_dict.json").exists():
            pass
        settings["tokenized_path"] = str(output.parent / f"{output.name}-tokens")
    run_exp(settings)
    if os.environ.get("RANK", "0") == "0":
        keep_weights(output, output, inputs / "model" if condition.get("lora") else None)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
