"""One condition with LLaMA-Factory: `python run_llamafactory.py INPUTS OUTPUT CONDITION_JSON`. The files are those of run_hf.py."""

import json
import os
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from weights import keep_weights, tensor_parallel


def with_value_head(inputs: Path, folder: Path) -> Path:
    """The model as this trainer reads a reward model: a value head, here without dropout, in a file of its own.

    Its embeddings are not tied to the language model's head, which has no loss: the trainer cannot save tied ones.
    """
    shutil.copytree(inputs / "model", folder)
    config = json.loads((folder / "config.json").read_text())
    untied = {**config, "summary_dropout_prob": 0.0, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(untied))
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    score = load_file(inputs / "reward_model/model.safetensors")["score.weight"]
    save_file(
        {"v_head.summary.weight": score, "v_head.summary.bias": torch.zeros(1)}, folder / "value_head.safetensors"
    )
    return folder


def pair(row: dict) -> dict:
    return {"messages": row["prompt"], **{side: row[side][0] for side in ("chosen", "rejected")}}


def main(inputs: Path, output: Path, condition: dict) -> None:
    # fp32 on the CPU; several ranks are started by this script's own launcher
    from datasets import Dataset, DatasetDict
    from llamafactory.train.tuner import run_exp

    def read(name: str) -> list[dict]:
        return [json.loads(line) for line in (inputs / name).read_text().splitlines()]

    method, rank = condition.get("method"), os.environ.get("RANK", "0")
    settings = {
        "stage": method or "sft", "do_train": True, "model_name_or_path": str(inputs / "model"), "output_dir": str(output),
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
    if method == "rm":
        start = output / "start"
        settings["model_name_or_path"] = str(start)
        if rank == "0":
            with_value_head(inputs, start)
    if condition.get("tp"):
        settings["deepspeed"] = tensor_parallel(condition["tp"])
    if method or condition.get("messages") or condition.get("packing"):
        tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
        rows = map(pair, read("pairs.jsonl")) if method else read("rows.jsonl")
        rows = [json.dumps(row) for row in rows][: condition["rows"]]
        info = {"file_name": "rows.jsonl", "formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": tags}
        if method:
            info |= {"ranking": True, "columns": {name: name for name in ("messages", "chosen", "rejected")}}
        if rank == "0":
            (output / "rows.jsonl").write_text("\n".join(rows) + "\n")
            (output / "dataset_info.json").write_text(json.dumps({"rows": info}))
        while not (output / "dataset_info.json").exists():
            pass
    else:
        parts = {"train": Dataset.from_list(read("rows_tokens.jsonl")[: condition["rows"]])}
        if condition.get("evaluation"):
            parts["validation"] = Dataset.from_list(read("eval_tokens.jsonl"))
            settings |= {"eval_strategy": "epoch", "eval_dataset": "rows"}  # the tokenized part is taken
        if rank == "0":
            DatasetDict(parts).save_to_disk(str(output.parent / f"{output.name}-tokens"))
        while not (output.parent / f"{output.name}-tokens/dataset_dict.json").exists():
            pass
        settings["tokenized_path"] = str(output.parent / f"{output.name}-tokens")
    run_exp(settings)
    if rank != "0":
        return
    keep_weights(output, output, inputs / "model" if condition.get("lora") else None)
    if method == "rm":  # the names of transformers
        head = load_file(output / "model/value_head.safetensors")
        save_file({"score.weight": head["v_head.summary.weight"]}, output / "model/value_head.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
