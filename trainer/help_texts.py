"""What `--help` of a command says: first an example that runs, then the flags with their defaults in plain words."""

import argparse
import re
from typing import Any

DEMO = "--pretrain demo/model --dataset demo"
# The lines of an example are for one folder, one after the other. Without a model and data, a command takes the demo.
EXAMPLES: dict[str, tuple[str, ...]] = {
    "trainer": ("trainer make_demo", f"trainer sft --nproc 2 {DEMO}/sft.jsonl --apply_chat_template --max_steps 5"),
    "train_sft": ("trainer make_demo", f"trainer sft --nproc 2 {DEMO}/sft.jsonl --apply_chat_template --max_steps 5"),
    "train_rm": ("trainer make_demo", f"trainer rm {DEMO}/pairs.jsonl --apply_chat_template --max_steps 5"),
    "train_dpo": ("trainer make_demo", f"trainer dpo {DEMO}/pairs.jsonl --apply_chat_template --max_steps 5"),
    "train_dpo --online": (
        "trainer make_demo",
        f"trainer dpo --online {DEMO}/prompts.jsonl --label_key label --reward_func exact_match",
        "    --rollout_batch_size 4 --n_samples_per_prompt 4 --train_batch_size 4 --prompt_max_len 128 --generate_max_len 16",
    ),
    "train_ppo": (
        "trainer make_demo",
        f"trainer ppo --preset grpo {DEMO}/prompts.jsonl --label_key label --reward_func exact_match",
        "    --rollout_batch_size 4 --n_samples_per_prompt 4 --train_batch_size 16 --prompt_max_len 128 --generate_max_len 16",
    ),
    "train_kd": (
        "trainer make_demo",
        f"trainer kd --teacher demo/model {DEMO}/sft.jsonl --apply_chat_template --max_steps 5",
    ),
    "evaluate": (
        "trainer make_demo",
        "trainer eval --pretrain demo/model --eval_dataset demo/prompts.jsonl#20 --label_key label",
        "    --reward_func exact_match --prompt_max_len 128 --generate_max_len 16",
    ),
    "make_demo": (
        "trainer make_demo --output_dir demo",
        f"trainer sft {DEMO}/sft.jsonl --apply_chat_template --max_steps 5",
    ),
    "prepare_data": (
        "trainer make_demo",
        f"trainer prepare_data {DEMO}/sft.jsonl --apply_chat_template --output_dir tokens",
        "trainer sft --pretrain demo/model --dataset tokens --max_steps 5",
    ),
    "check": ("trainer make_demo", "trainer check demo/model --only ring2 lora"),
    "doctor": ("trainer doctor", "trainer doctor --path runs"),
    "export": (
        "trainer sft --max_steps 5 --save_steps 5 --output_dir runs/sft",
        "trainer export runs/sft/checkpoints/step_5 runs/model --dtype bf16",
    ),
    "plan": ("trainer make_demo", "trainer plan demo/model --gpus 8 --gpu_memory 80"),
    "report": ("trainer sft --max_steps 5 --output_dir runs/short", "trainer report runs/short"),
    "serve_engine": ("trainer make_demo", "trainer serve_engine --pretrain demo/model --port 8001 --max_len 256"),
    "serve_rm": (
        "trainer rm --max_steps 5 --output_dir runs/rm",
        "trainer serve_rm --reward_pretrain runs/rm/model --port 8000",
    ),
    "serve_train": ("trainer make_demo", "trainer serve_train --pretrain demo/model --lora_rank 32 --port 8002"),
    "verify_run": (
        "trainer sft --max_steps 5 --certificate --output_dir runs/certified",
        "trainer verify_run runs/certified --certify 2",
    ),
    "watch": ("trainer sft --max_steps 5 --output_dir runs/seen", "trainer watch runs/seen --once"),
}


def example_of(command: str) -> str:
    """The first lines of the help of a command, or nothing. A line that starts with blanks goes on with the line above it."""
    text = "\n".join(f"  {line}" for line in EXAMPLES.get(command, ()))
    return "example:\n" + text.replace("\n      ", " \\\n      ") + "\n\n" if text else ""


def typed(command: str) -> str:
    """How a person starts a command: trainer sft, trainer eval. Another program keeps its own name."""
    words = {"evaluate": "eval"}.get(command, command.removeprefix("train_"))
    return f"trainer {words}" if command in EXAMPLES else command


def with_default(text: str, default: Any) -> str:
    """A help text with its default: "seed (default 42)". A flag that is off or not set has none; the text may name it."""
    if default is None or default is False or default in ("", [], argparse.SUPPRESS) or "default" in text:
        return text
    return f"{text} (default {shown(default)})"


def shown(value: Any) -> str:
    """A default as one types it: 5e-6, on, 0.9 0.95."""
    if value is True:
        return "on"
    if isinstance(value, float):
        return re.sub(r"e([+-])0*", lambda power: "e" + power[1].strip("+"), f"{value:g}")
    return " ".join(map(shown, value)) if isinstance(value, (list, tuple)) else str(value)


class PlainHelp(argparse.RawDescriptionHelpFormatter):
    """The lines of the description as they are, and each default in plain words."""

    def _get_help_string(self, action: argparse.Action) -> str:
        return with_default(action.help or "", action.default).replace("%", "%%")
