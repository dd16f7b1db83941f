"""`merge_lora BASE ADAPTER OUT`: write a model folder with an adapter's update added to the base model's weights.

The command is one process. It adds in fp32 and writes in the dtype of BASE. Host memory holds the model in fp32.
"""

import os

from trainer.entry import quiet_libraries, run_command
from trainer.errors import UserError

USAGE = "python -m trainer.cli.merge_lora BASE ADAPTER OUT"


def check_arguments(argv: list[str]) -> tuple[str, str, str]:
    """Return (base folder or hub name, adapter folder, folder that does not exist yet). Raises UserError."""
    if len(argv) != 3:
        raise UserError("arguments", " ".join(argv) or "none", USAGE)
    base, source, target = argv[0], os.path.abspath(argv[1]), os.path.abspath(argv[2])
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not os.path.exists(os.path.join(source, name)):
            raise UserError("ADAPTER", f"{source} holds no {name}", "the save_path of a run with --lora_rank")
    if os.path.exists(target):
        raise UserError("OUT", f"{target} exists already", "a new folder")
    return base, source, target


def merged_model(base: str, source: str):
    """Load the model of `base`, add the adapter of `source`, and return it in the dtype of `base`."""
    import torch
    from peft import PeftConfig, PeftModel
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    is_classifier = PeftConfig.from_pretrained(source).task_type == "SEQ_CLS"
    auto_class = AutoModelForSequenceClassification if is_classifier else AutoModelForCausalLM
    # the config.json next to the adapter describes the head that a reward model adds to its base
    has_config = os.path.exists(os.path.join(source, "config.json"))
    config = AutoConfig.from_pretrained(source if has_config else base)
    if hasattr(config, "quantization_config"):  # from --load_in_4bit; the adapter is merged into the unquantized base
        del config.quantization_config
    try:
        model, info = auto_class.from_pretrained(base, config=config, dtype=torch.float32, output_loading_info=True)
        odd = {name for kind in ("missing_keys", "unexpected_keys") for name in info[kind]}
        odd -= {name for name in odd if is_classifier and name.startswith(("score.", "lm_head."))}
        if odd:
            raise ValueError(f"{len(odd)} weights are in only one of the two, such as {min(odd)}")
        model = PeftModel.from_pretrained(model, source).merge_and_unload(safe_merge=True)
    except (RuntimeError, ValueError) as error:
        raise UserError("ADAPTER", f"{source} does not fit {base}: {str(error).splitlines()[0]}") from None
    return model.to(AutoConfig.from_pretrained(base).dtype or torch.float32)


def run(argv: list[str]) -> None:
    base, source, target = check_arguments(argv)
    quiet_libraries()

    from trainer.model_folders.model_folder import all_tensors
    from trainer.model_folders.model_writer import save_pretrained
    from trainer.models.model_loading import load_tokenizer, resolve_model_folder

    base = resolve_model_folder(base, "BASE")
    has_tokenizer = os.path.exists(os.path.join(source, "tokenizer_config.json"))
    tokenizer = load_tokenizer(source if has_tokenizer else base)
    model = merged_model(base, source)
    save_pretrained(all_tensors(model).items(), model, tokenizer, target, model.dtype, writes=True)
    print(f"model written to {target}")


def main() -> None:
    run_command(run)


if __name__ == "__main__":
    main()
