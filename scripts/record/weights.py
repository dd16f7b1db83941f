"""The final weights of a run as OUTPUT/model, whatever the trainer saved. It is used in each trainer's environment."""

import shutil
from pathlib import Path


def keep_weights(source: Path, output: Path, base: Path | None = None) -> None:
    """Copies the model of `source`, or merges its adapter into the model `base`."""
    (output / "model").mkdir(exist_ok=True)
    if base is None:
        for file in [*source.glob("*.safetensors"), source / "config.json"]:
            shutil.copy(file, output / "model")
        return
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    PeftModel.from_pretrained(model, source).merge_and_unload().save_pretrained(output / "model")
