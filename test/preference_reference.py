"""The plain loop that train_rm and train_dpo are measured against: one process, one answer per forward pass, fp32.

    python test/preference_reference.py train_rm|train_dpo <the flags of that command>
    python test/preference_reference.py --many runs.json      (a list of such command lines, one after the other)

A transformers model, torch AdamW and the formulas of the papers, written here a second time: no strategy, no wrapper, no
packing, no padding, no collectives, none of the trainer's losses. It shares with the trainer the parsing of flags, the
reading of data and the initial reward head (which have tests of their own).
"""

import importlib
import json
import math
import os
import sys

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))
sys.path.insert(0, os.path.dirname(__file__))
from types import SimpleNamespace

from reference import add_lora, balance_loss, dump, trained
from schedules import schedule

from trainer.compare.certificates.plain_replay import LOADERS
from trainer.datasets.batches.global_batches import epoch_order
from trainer.datasets.conversations.templates import load_chat_template
from trainer.flags.parse_flags import flat
from trainer.models.reward import make_initial_reward_model
from trainer.runs.flag_checks import rate_of


def answer_log_prob(model, ids: list[int], mask: list[int]) -> tuple[torch.Tensor, int]:
    """(sum of log p over the answer's tokens, their number)."""
    log_probs = model(input_ids=torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
    total = sum(log_probs[t - 1, ids[t]] for t in range(1, len(ids)) if mask[t])
    return total, sum(mask[1:])


def dpo_pair_loss(args, model, reference, pair: dict) -> torch.Tensor:
    """The formulas as the papers write them, with sigmoid and log spelled out."""
    (w, w_length), (r, r_length) = (
        answer_log_prob(model, pair[f"{side}_ids"], pair[f"{side}_mask"]) for side in ("chosen", "rejected")
    )
    if args.loss == "simpo":
        loss = -torch.log(torch.sigmoid(args.beta / w_length * w - args.beta / r_length * r - args.simpo_gamma))
    elif args.loss == "orpo":
        p_w, p_r = torch.exp(w / w_length), torch.exp(r / r_length)
        odds_ratio = (p_w / (1 - p_w)) / (p_r / (1 - p_r))
        loss = -w / w_length + args.beta * -torch.log(torch.sigmoid(torch.log(odds_ratio)))
    else:
        with torch.no_grad():
            ref_w, ref_r = (
                answer_log_prob(reference, pair[f"{side}_ids"], pair[f"{side}_mask"])[0]
                for side in ("chosen", "rejected")
            )
        h = (w - ref_w) - (r - ref_r)
        if args.loss == "ipo":
            loss = (h - 0.5 / args.beta) ** 2
        elif args.loss == "hinge":
            loss = torch.clamp(1 - args.beta * h, min=0)
        else:
            smooth = args.label_smoothing
            loss = -(1 - smooth) * torch.log(torch.sigmoid(args.beta * h))
            loss = loss - smooth * torch.log(torch.sigmoid(-args.beta * h))
    return loss + args.nll_loss_coef * (-w / w_length)


def log_ratio(model, reference, ids: list[int], mask: list[int]) -> torch.Tensor:
    with torch.no_grad():
        fixed = answer_log_prob(reference, ids, mask)[0]
    return answer_log_prob(model, ids, mask)[0] - fixed


def kto_reference_point(args, model, reference, batch: list[dict]) -> float:
    """z_0 of Ethayarajh et al. 2024, section 4.1: each prompt with the answer before it in the global batch."""
    ratios = []
    for x, y in zip(batch, [batch[-1], *batch[:-1]]):
        prompt, answer = x["input_ids"][: x["loss_mask"].index(1)], y["input_ids"][y["loss_mask"].index(1) :]
        mask = [0] * len(prompt) + y["loss_mask"][y["loss_mask"].index(1) :]
        with torch.no_grad():
            ratios.append(log_ratio(model, reference, (prompt + answer)[: args.max_len], mask[: args.max_len]))
    return max(0.0, (sum(ratios) / len(ratios)).item())


def kto_loss(args, model, reference, sample: dict, z_0: float) -> torch.Tensor:
    """lambda_D (1 - v) with v = sigmoid(beta (r - z_0)), or lambda_U (1 - v) with v = sigmoid(beta (z_0 - r))."""
    r = log_ratio(model, reference, sample["input_ids"], sample["loss_mask"])
    if sample["label"]:
        return args.desirable_weight * (1 - 1 / (1 + torch.exp(-args.beta * (r - z_0))))
    return args.undesirable_weight * (1 - 1 / (1 + torch.exp(-args.beta * (z_0 - r))))


def reward_pair_loss(args, model, pair: dict) -> torch.Tensor:
    """Scores by transformers' own forward of one row without padding."""
    scores = [
        model(input_ids=torch.tensor([pair[f"{side}_ids"]])).logits[0, 0].double() for side in ("chosen", "rejected")
    ]
    if args.loss == "logexp":
        return torch.log(1 + torch.exp(scores[1] - scores[0]))
    return -torch.log(torch.sigmoid(scores[0] - scores[1] - pair["margin"]))


def main(argv: list[str]) -> None:
    command = importlib.import_module(f"trainer.cli.{argv[0]}")
    groups, _ = command.parse(argv[1:])
    args = SimpleNamespace(**flat(groups))
    args.learning_rate = rate_of(argv[0], args.learning_rate, args.lora_rank)
    tokenizer = AutoTokenizer.from_pretrained(args.pretrain)
    load_chat_template(args.tokenizer_chat_template, tokenizer)
    pairs, _ = LOADERS[argv[0]](groups, tokenizer, args.dataset, args.dataset_split, "--dataset")
    os.makedirs(args.output_dir, exist_ok=True)
    if argv[0] == "train_rm":
        make_initial_reward_model(args.pretrain, f"{args.output_dir}/initial", args.seed)
        model = AutoModelForSequenceClassification.from_pretrained(f"{args.output_dir}/initial", dtype=torch.float32)
        model = add_lora(model, args, "SEQ_CLS") if args.lora_rank else model

        def batch_losses(batch):
            return (reward_pair_loss(args, model, pair) for pair in batch)
    else:
        model, reference = (AutoModelForCausalLM.from_pretrained(args.pretrain, dtype=torch.float32) for _ in "12")
        model = add_lora(model, args) if args.lora_rank else model

        def batch_losses(batch):
            if args.loss != "kto":
                return (dpo_pair_loss(args, model, reference, pair) for pair in batch)
            z_0 = kto_reference_point(args, model, reference, batch)
            return (kto_loss(args, model, reference, sample, z_0) for sample in batch)

    assert args.optim == "adamw"
    model.eval()  # gradients as ever, and no dropout, whatever rates the model's config has
    named = trained(model)
    optimizer = torch.optim.AdamW(
        [
            {"params": [parameter for _, parameter in named if parameter.ndim >= 2], "weight_decay": args.weight_decay},
            {"params": [parameter for _, parameter in named if parameter.ndim < 2], "weight_decay": 0.0},
        ],
        lr=args.learning_rate,
        betas=tuple(args.adam_betas),
        eps=args.adam_eps,
    )
    steps, size = args.max_steps, args.train_batch_size
    scheduler = schedule(args, optimizer, steps)
    order = epoch_order(len(pairs), args.seed, 0, shuffle=not args.no_shuffle)
    with open(os.path.join(args.output_dir, "metrics.jsonl"), "w") as log:
        for step in range(1, steps + 1):
            batch = [pairs[i] for i in order[(step - 1) * size : step * size]]
            losses = []
            for loss in batch_losses(batch):
                loss = loss / len(batch)
                loss.backward()
                losses.append(loss.item())
            if vars(args).get("aux_loss_coef"):
                sides = ("chosen_ids", "rejected_ids") if args.loss != "kto" else ("input_ids",)
                answers = [{"input_ids": sample[side]} for sample in batch for side in sides]
                balance = args.aux_loss_coef * balance_loss(model, answers)
                balance.backward()
                losses.append(balance.item())
            if step == 1 and args.parity_dump:
                dump({name: p.grad for name, p in named if p.grad is not None}, args.parity_dump, "grads_step1")
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm or math.inf).item()
            log.write(
                json.dumps({"step": step, "loss": sum(losses), "grad_norm": grad_norm, "tokens": len(batch)}) + "\n"
            )
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    if args.parity_dump:
        dump(dict(named), args.parity_dump, "weights_final")


if __name__ == "__main__":
    if sys.argv[1] == "--many":
        with open(sys.argv[2]) as file:
            for command_line in json.load(file):
                main(command_line)
    else:
        main(sys.argv[1:])
