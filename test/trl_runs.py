"""TRL's trainers on the token ids that the trainer's own commands read; run by test_trl.py in a process of its own.

    python test/trl_runs.py runs.json

runs.json lists {"argv": a command line of train_dpo, train_rm or train_ppo, "trl": the trainer's name, "options": of its config}.
Each run writes losses.json (one per step) and weights.safetensors into its --output_dir, GRPO the gradients of step 1 too. What
TRL does to a text is left out on purpose: it tokenizes prompt and answer together, the trainer each by itself.
"""

import importlib
import json
import os
import sys

import torch
from datasets import Dataset
from PIL import Image
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference
from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference
from trl.trainer.reward_trainer import DataCollatorForPreference as RewardCollator
from trl.trainer.utils import pad

sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))
from types import SimpleNamespace

from trainer.compare.certificates.plain_replay import LOADERS
from trainer.datasets.images.image_processor import load_processor
from trainer.flags.parse_flags import flat
from trainer.models.reward import make_initial_reward_model
from trainer.rollout.rollouts_file import read_rollouts


def split_pair(pair: dict) -> dict:
    """TRL keeps the prompt apart; prompts are texts here, so both sides have the same prompt ids."""
    start = pair["chosen_mask"].index(1)
    assert start == pair["rejected_mask"].index(1) and pair["chosen_ids"][:start] == pair["rejected_ids"][:start]
    return {
        "prompt_ids": pair["chosen_ids"][:start],
        "chosen_ids": pair["chosen_ids"][start:],
        "rejected_ids": pair["rejected_ids"][start:],
    }


def split_answer(sample: dict) -> dict:
    return {
        "prompt_ids": sample["input_ids"][: sample["start"]],
        "completion_ids": sample["input_ids"][sample["start"] :],
        "label": bool(sample["label"]),
    }


def rotate_answers(samples: list[dict]) -> list[dict]:
    """What KTOTrainer does to its data set batch by batch: each prompt with the answer before it."""
    return [{**s, "KL_completion_ids": samples[i - 1]["completion_ids"]} for i, s in enumerate(samples)]


def collate_cpo(pairs: list[dict], pad_id: int) -> dict:
    """The batch of the experimental trainers: labels are -100 wherever the loss does not look."""
    batch = {}
    for side in ("chosen", "rejected"):
        ids = [torch.tensor(pair[f"{side}_ids"]) for pair in pairs]
        labels = [i.masked_fill(torch.tensor(p[f"{side}_mask"]) == 0, -100) for i, p in zip(ids, pairs)]
        batch[f"{side}_input_ids"] = pad(ids, padding_value=pad_id)
        batch[f"{side}_attention_mask"] = pad([torch.ones_like(i) for i in ids], padding_value=0)
        batch[f"{side}_labels"] = pad(labels, padding_value=-100)
    return batch


def collator(name: str, rows: list[dict], pad_id: int):
    """Our rows in the place of what TRL tokenized: an example only says which row it is."""
    if name in ("CPO", "ORPO"):
        return lambda examples: collate_cpo([rows[e["row"]] for e in examples], pad_id)
    inner = {"DPO": DataCollatorForPreference, "KTO": DataCollatorForUnpairedPreference, "Reward": RewardCollator}[name]
    if name == "KTO":
        return lambda examples: inner(pad_id)(rotate_answers([split_answer(rows[e["row"]]) for e in examples]))
    if name == "DPO":
        return lambda examples: inner(pad_id)([split_pair(rows[e["row"]]) for e in examples])
    return lambda examples: inner(pad_id)([rows[e["row"]] for e in examples])


TRAINERS = {
    "DPO": (DPOTrainer, DPOConfig),
    "KTO": (KTOTrainer, KTOConfig),
    "Reward": (RewardTrainer, RewardConfig),
    "CPO": (CPOTrainer, CPOConfig),
    "ORPO": (ORPOTrainer, ORPOConfig),
}


def make_config(config_class, args, batch_size: int, options: dict):
    return config_class(
        output_dir=args.output_dir,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=args.train_batch_size // batch_size,
        max_steps=args.max_steps,
        learning_rate=args.learning_rate,
        lr_scheduler_type="constant",
        adam_beta1=args.adam_betas[0],
        adam_beta2=args.adam_betas[1],
        max_grad_norm=args.max_norm,
        remove_unused_columns=False,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        **{"adam_epsilon": args.adam_eps, **options},
    )


def train_grpo(argv: list[str], options: dict) -> None:
    """GRPOTrainer on the samples and scores of --rollouts_from, one optimizer step to a whole rollout and pass over it."""
    args = SimpleNamespace(**flat(importlib.import_module(f"trainer.cli.{argv[0]}").parse(argv[1:])[0]))
    os.makedirs(args.output_dir, exist_ok=True)
    rollouts, losses, grads = iter(read_rollouts(args.rollouts_from)), [], {}

    def frozen_rollout(prompts: list[str], trainer) -> dict:
        samples = next(rollouts)
        assert len(samples) == len(prompts) == args.train_batch_size
        ids = {"prompt_ids": [s.prompt_ids for s in samples], "completion_ids": [s.response_ids for s in samples]}
        return {**ids, "logprobs": [s.log_probs for s in samples], "score": [s.score for s in samples]}

    class Recording(GRPOTrainer):
        def training_step(self, model, *rest):
            loss = super().training_step(model, *rest)
            losses.append(loss.item())
            if len(losses) == 1:
                grads.update({name: p.grad.clone() for name, p in model.named_parameters()})
            return loss

    options = {"num_generations": args.n_samples_per_prompt, "num_iterations": args.max_epochs, **options}
    options |= {"max_completion_length": args.generate_max_len, "temperature": args.temperature}
    num_prompts = args.train_batch_size // args.n_samples_per_prompt * args.max_steps
    model = AutoModelForCausalLM.from_pretrained(args.pretrain, dtype=torch.float32)
    Recording(
        model=model,
        reward_funcs=lambda completions, score, **_: score,
        args=make_config(GRPOConfig, args, args.train_batch_size, {"shuffle_dataset": False, **options}),
        train_dataset=Dataset.from_list([{"prompt": "not read"}] * num_prompts),
        processing_class=AutoTokenizer.from_pretrained(args.pretrain),
        rollout_func=frozen_rollout,
    ).train()
    with open(f"{args.output_dir}/losses.json", "w") as file:
        json.dump(losses, file)
    save_file(grads, f"{args.output_dir}/grads.safetensors")
    save_file({k: p.detach().clone() for k, p in model.named_parameters()}, f"{args.output_dir}/weights.safetensors")


def train_sft_on_images(argv: list[str]) -> None:
    """SFTTrainer with its own collator, which renders, tokenizes and reads images by the processor's call.

    Only the processor is loaded by this project: transformers cannot load it without torchvision.
    """
    args = SimpleNamespace(**flat(importlib.import_module("trainer.cli.train_sft").parse(argv[1:])[0]))
    os.makedirs(args.output_dir, exist_ok=True)
    processor, losses = load_processor(args.pretrain, AutoTokenizer.from_pretrained(args.pretrain)), []
    processor.chat_template = processor.tokenizer.chat_template
    with open(args.dataset) as file:
        rows = [json.loads(line) for line in file]
    data = [
        {
            "prompt": row["messages"][:-1],
            "completion": row["messages"][-1:],
            "images": [Image.open(path).convert("RGB") for path in row["images"]],
        }
        for row in rows
    ]

    class Recording(SFTTrainer):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            losses.append(loss.item())
            return loss

    options = {"train_sampling_strategy": "sequential", "max_length": None}
    model = AutoModelForImageTextToText.from_pretrained(args.pretrain, dtype=torch.float32)
    Recording(
        model=model,
        args=make_config(SFTConfig, args, args.train_batch_size, options),
        train_dataset=Dataset.from_list(data),
        processing_class=processor,
    ).train()
    with open(f"{args.output_dir}/losses.json", "w") as file:
        json.dump(losses, file)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    save_file(weights, f"{args.output_dir}/weights.safetensors")


def train(argv: list[str], name: str, options: dict) -> None:
    if name == "GRPO":
        return train_grpo(argv, options)
    if name == "SFT":
        return train_sft_on_images(argv)
    command = importlib.import_module(f"trainer.cli.{argv[0]}")
    groups, _ = command.parse(argv[1:])
    args = SimpleNamespace(**flat(groups))
    tokenizer = AutoTokenizer.from_pretrained(args.pretrain)
    loaded, _ = LOADERS[argv[0]](groups, tokenizer, args.dataset, args.dataset_split, "--dataset")
    rows = [loaded[i] for i in range(args.max_steps * args.train_batch_size)]
    os.makedirs(args.output_dir, exist_ok=True)
    if name == "Reward":
        make_initial_reward_model(args.pretrain, f"{args.output_dir}/initial", args.seed)
        model = AutoModelForSequenceClassification.from_pretrained(f"{args.output_dir}/initial", dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_pretrained(args.pretrain, dtype=torch.float32)
    trainer_class, config_class = TRAINERS[name]
    batch_size = options.pop("per_device_train_batch_size", args.train_batch_size)
    options = {"train_sampling_strategy": "sequential", "max_length": args.max_len, **options}
    config = make_config(config_class, args, batch_size, options)
    losses = []

    class Recording(trainer_class):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            losses.append(loss.item())
            return loss

    answers = {"completion": "c", "label": True} if name == "KTO" else {"chosen": "c", "rejected": "d"}
    if name == "Reward":
        texts = [{"chosen_ids": r["chosen_ids"], "rejected_ids": r["rejected_ids"]} for r in rows]
    else:
        texts = [{"prompt": "b", **answers} for _ in rows]
    data = Dataset.from_list([{**text, "row": number} for number, text in enumerate(texts)])
    Recording(
        model=model,
        args=config,
        train_dataset=data,
        processing_class=tokenizer,
        data_collator=collator(name, rows, tokenizer.pad_token_id),
    ).train()
    per_step = args.train_batch_size // batch_size
    means = [sum(losses[i : i + per_step]) / per_step for i in range(0, len(losses), per_step)]
    with open(f"{args.output_dir}/losses.json", "w") as file:
        json.dump(means, file)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    save_file(weights, f"{args.output_dir}/weights.safetensors")


if __name__ == "__main__":
    torch.manual_seed(0)
    with open(sys.argv[1]) as file:
        for run in json.load(file):
            train(run["argv"], run["trl"], run["options"])
