"""Save the trained model with its card, the README.md."""

import dataclasses
import os

import yaml

from trainer.runs.outputs import saved_models, versions

CARD_FLAGS = (
    "pretrain dataset dataset_split max_len train_batch_size max_epochs learning_rate lr_scheduler lr_warmup_ratio "
    "weight_decay seed param_dtype backend"
)


def save_model(args, setup, model, run, progress, average: bool = False) -> None:
    """Write the trained model and its card (all ranks). With `average`, write the average that --ema_beta keeps."""
    save_path = saved_models(args, run.output_dir)[average]
    setup.strategy.save_model(model, setup.tokenizer, save_path)
    if setup.strategy.is_rank_0():
        write_model_card(save_path, run.command, args, progress, run.ledger)
    setup.strategy.print(f"model saved to {save_path}")


def write_model_card(folder: str, command: str, args, progress, ledger) -> None:
    """Write the README.md of a saved model: its base, its data and its flags."""
    flags = dataclasses.asdict(args)  # a command may lack some of CARD_FLAGS
    facts = {"command": command, **{name: flags[name] for name in CARD_FLAGS.split() if name in flags}}
    facts |= {"steps": progress.step, "skipped steps": progress.skipped_steps, "tokens seen": progress.tokens_seen}
    rows = "".join(f"| {name} | {value} |\n" for name, value in facts.items())
    packages = ", ".join(f"{name} {version}" for name, version in versions().items())
    library = "peft" if args.lora_rank else "transformers"
    front = yaml.safe_dump({"base_model": args.pretrain, "library_name": library, "tags": [command]})
    with open(os.path.join(folder, "README.md"), "w") as file:
        file.write(
            f"---\n{front}---\n\n# Trained from {args.pretrain}\n\n| | |\n|---|---|\n{rows}\n"
            f"Data: {ledger.summary()}.\n\nMade with {packages}.\n"
        )
