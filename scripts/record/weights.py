"""The final weights of a run as OUTPUT/model, and DeepSpeed's tensor parallelism. It is used in each trainer's environment."""

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


def tensor_parallel(ranks: int) -> dict:
    """The settings of DeepSpeed's AutoTP, as the docs of transformers have them."""
    return {
        "tensor_parallel": {"autotp_size": ranks},
        "zero_optimization": {"stage": 1, "gather_16bit_weights_on_model_save": True},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
    }
