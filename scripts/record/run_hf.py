"""One condition with the HF Trainer or TRL's SFTTrainer: `python run_hf.py hf|trl INPUTS OUTPUT CONDITION_JSON`.

The script is what a user of these trainers would write. It uses no code of this project. OUTPUT gets `log.json` (the
trainer's own log), `model/` (the weights) and, from TRL, `tokens.jsonl` (the rows as it tokenized them).
"""

import json
import sys
from pathlib import Path

import torch
from datasets import load_dataset
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    Trainer,
    TrainingArguments,
)


def main(kind: str, inputs: Path, output: Path, condition: dict) -> None:
    def rows(name: str, number: int | None = None):
        form = "" if condition.get("messages") else "_tokens"
        data = load_dataset("json", data_files=str(inputs / f"{name}{form}.jsonl"), split="train")
        return data.select(range(number)) if number else data

    settings = {
        "per_device_train_batch_size": condition["batch"], "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": condition["accumulation"], "num_train_epochs": condition["epochs"],
        "learning_rate": condition["learning_rate"], "lr_scheduler_type": "constant", "weight_decay": 0.0, "max_grad_norm": 1.0,
        "logging_steps": 1, "save_steps": 2, "bf16": False, "use_cpu": True, "report_to": "none", "disable_tqdm": True,
        "eval_strategy": "epoch" if condition.get("evaluation") else "no",
    }  # fmt: skip
    if condition.get("in_order"):
        settings["train_sampling_strategy"] = "sequential"
    model = AutoModelForCausalLM.from_pretrained(inputs / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(inputs / "model")
    if condition.get("lora"):
        model = PeftModel.from_pretrained(model, inputs / "adapter", is_trainable=True)
    data = {"train_dataset": rows("rows", condition["rows"])}
    if condition.get("evaluation"):
        data["eval_dataset"] = rows("eval")
    if kind == "hf":
        collator = DataCollatorForSeq2Seq(tokenizer)
        if condition.get("packing"):  # one flat row for a micro-batch: all rows in one
            settings["per_device_train_batch_size"], collator = condition["rows"], DataCollatorWithFlattening()
        trainer = Trainer(model, TrainingArguments(str(output), **settings), data_collator=collator, **data)
    else:
        from trl import SFTConfig, SFTTrainer

        if condition.get("messages"):
            settings["assistant_only_loss"] = True
        config = SFTConfig(
            str(output), max_length=condition["max_length"], packing=condition.get("packing", False),
            gradient_checkpointing=False, **settings,
        )  # fmt: skip
        trainer = SFTTrainer(model, config, processing_class=tokenizer, **data)
        trainer.train_dataset.to_json(output / "tokens.jsonl")
    trainer.train(resume_from_checkpoint=condition.get("resume_from"))
    if trainer.is_world_process_zero():
        (output / "log.json").write_text(json.dumps(trainer.state.log_history))
        weights = model.merge_and_unload() if condition.get("lora") else model
        weights.save_pretrained(output / "model")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4]))
