"""One condition with this trainer: `python run_ours.py fsdp2|deepspeed INPUTS OUTPUT CONDITION_JSON`.

OUTPUT gets `log.json`, with the names of the HF Trainer's log, and `model/`.
"""

import json
import os
import sys
from pathlib import Path

from weights import keep_weights

from trainer.cli import train_sft


def strings(value) -> list[str]:
    return [str(one) for one in value] if isinstance(value, tuple) else [str(value)]


def main(backend: str, inputs: Path, output: Path, condition: dict) -> None:
    ranks = condition.get("ranks", 1)
    first = condition["batch"] * condition["accumulation"] * ranks
    batch, micro = (condition["rows"], condition["rows"]) if condition.get("packing") else (first, condition["batch"])
    flags = {
        "backend": backend, "pretrain": inputs / "model", "dataset": f"{inputs}/rows.jsonl#{condition['rows']}",
        "apply_chat_template": "true", "multiturn": "true", "param_dtype": "fp32", "train_batch_size": batch,
        "micro_train_batch_size": micro, "max_epochs": condition["epochs"], "learning_rate": condition["learning_rate"],
        "lr_scheduler": "constant", "lr_warmup_ratio": 0, "adam_betas": (0.9, 0.999), "weight_decay": 0, "max_norm": 1.0, "max_len": condition["max_length"],
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
    train_sft.run([part for name, value in flags.items() for part in (f"--{name}", *strings(value))])
    if os.environ.get("RANK", "0") == "0":
        rows = [json.loads(line) for line in (output / "run/metrics.jsonl").read_text().splitlines()]
        if condition.get("resume_from"):
            before = Path(str(output).removesuffix("-resumed")) / "log.json"
            rows = [row for row in json.loads(before.read_text()) if row.get("step", 99) <= 2] + rows
        (output / "log.json").write_text(json.dumps(rows))
        keep_weights(output / "run/model", output, inputs / "model" if condition.get("lora") else None)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4]))
