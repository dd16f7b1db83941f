"""The plain loop of train_ppo: one process, one sample per forward pass, fp32, on rollouts from a file.

    python test/ppo_reference.py <the flags of train_ppo, among them --rollouts_from>

A transformers model, torch AdamW and this file, which writes every formula out for one sample at a time: GRPO
(group_norm, a KL term in the loss) and PPO (gae with a critic, the KL in the rewards). It shares with the trainer the
parsing of flags, the new head of the critic, and nothing of the training.
"""

import base64
import functools
import json
import math
import os
import statistics
import sys

import numpy as np
import torch
from reference import add_lora, balance_loss, dump, trained
from schedules import schedule
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))
from types import SimpleNamespace

from trainer.cli.train_ppo import parse
from trainer.flags.parse_flags import flat
from trainer.models.reward import make_initial_reward_model
from trainer.runs.flag_checks import rate_of


def replay_routing(model) -> None:
    """From now on, each router sends the first tokens to the experts in its `forced`, and later ones to the best of all."""

    def forward(gate, hidden):
        logits = hidden.flatten(0, -2) @ gate.weight.T
        probabilities, chosen = torch.softmax(logits, -1), []
        for token, row in enumerate(probabilities.tolist()):
            best = sorted(range(len(row)), key=lambda expert: -row[expert])[: gate.top_k]
            chosen.append(gate.forced[token] if token < len(gate.forced) else best)
        weights = torch.stack([row[experts] for row, experts in zip(probabilities, chosen)])
        weights = weights / weights.sum(-1, keepdim=True) if gate.norm_topk_prob else weights
        return logits, weights, torch.tensor(chosen)

    model.gates = [module for name, module in model.named_modules() if name.endswith(".mlp.gate")]
    for gate in model.gates:
        gate.forward = functools.partial(forward, gate)


def logits_of(args, model, sample: dict) -> torch.Tensor:
    """(response tokens, vocabulary), at the temperature of sampling."""
    ids, start = torch.tensor([sample["prompt_ids"] + sample["response_ids"]]), len(sample["prompt_ids"])
    return model(input_ids=ids).logits[0, start - 1 : -1] / args.temperature


def log_probs_and_entropies(args, model, sample: dict) -> tuple[torch.Tensor, torch.Tensor]:
    for layer, gate in enumerate(vars(model).get("gates", [])):
        shape, text = sample["experts"]
        experts = np.frombuffer(base64.b64decode(text), np.int16).reshape(shape)  # (tokens, layers, k)
        gate.forced = experts[:, layer].tolist()
    logits = logits_of(args, model, sample)
    for row, kept in enumerate(sample.get("kept_ids", [])):  # what truncated sampling drew from
        left_out = sorted(set(range(logits.shape[1])) - set(kept))
        logits = logits.index_put((torch.tensor(row), torch.tensor(left_out)), torch.tensor(-1e30))
    distribution = torch.log_softmax(logits, -1)
    picked = distribution[torch.arange(len(sample["response_ids"])), sample["response_ids"]]
    return picked.double(), -(distribution.exp() * distribution).sum(-1).double()


def values_of(critic, sample: dict) -> torch.Tensor:
    ids, start = torch.tensor([sample["prompt_ids"] + sample["response_ids"]]), len(sample["prompt_ids"])
    critic = critic.get_base_model() if hasattr(critic, "get_base_model") else critic
    return critic.score(critic.model(input_ids=ids).last_hidden_state)[0, start - 1 : -1, 0].double()


def kl_of(estimator: str, log_probs, ref_log_probs):
    difference = log_probs - ref_log_probs
    return {"k1": difference, "k2": difference**2 / 2, "k3": torch.exp(-difference) - 1 + difference}[estimator]


def group_advantages(args, samples: list[dict]) -> None:
    """Equation 3 of GRPO: the score less the mean of its group, over the deviation, at every token."""
    size = args.n_samples_per_prompt
    for start in range(0, len(samples), size):
        group = samples[start : start + size]
        scores = [sample["score"] for sample in group]
        mean, deviation = statistics.fmean(scores), statistics.stdev(scores)
        for sample in group:
            advantage = (sample["score"] - mean) / (deviation + 1e-6)
            sample["advantages"] = [advantage] * len(sample["response_ids"])
            if args.teacher:  # On-policy distillation: log teacher - log policy of each token is added
                of_teacher = [
                    args.init_kl_coef * (t - p) for t, p in zip(sample["ref"].tolist(), sample["old"].tolist())
                ]
                sample["advantages"] = [advantage + own for own in of_teacher]


def gae_advantages(args, samples: list[dict]) -> None:
    """Equation 16 of Schulman et al. 2016 as a sum over all later tokens; whitened over the rollout."""
    for sample in samples:
        length, values = len(sample["response_ids"]), [*sample["old_values"].tolist(), 0.0]
        kl = kl_of(args.kl_estimator, sample["old"], sample["ref"]).tolist()
        rewards = [-args.init_kl_coef * k for k in kl]
        rewards[-1] += sample["score"]
        deltas = [rewards[t] + args.gamma * values[t + 1] - values[t] for t in range(length)]
        decay = args.gamma * args.lambd
        sample["advantages"] = [
            sum(decay ** (later - t) * deltas[later] for later in range(t, length)) for t in range(length)
        ]
        sample["returns"] = [a + v for a, v in zip(sample["advantages"], values)]
    everything = [a for sample in samples for a in sample["advantages"]]
    mean, variance = statistics.fmean(everything), statistics.pvariance(everything)
    for sample in samples:
        sample["advantages"] = [(a - mean) / math.sqrt(variance + 1e-8) for a in sample["advantages"]]


def weight(args, sample: dict, batch: list[dict]) -> float:
    """What a token of the sample counts in the mean."""
    batch = [other for other in batch if other["finished"] or not args.mask_truncated]
    if not any(other is sample for other in batch):
        return 0.0
    if args.loss_agg == "token":
        return 1 / sum(len(other["response_ids"]) for other in batch)
    length = len(sample["response_ids"]) if args.loss_agg == "sequence" else args.generate_max_len
    return 1 / length / len(batch)


def kl(p, q):
    return (p * (p.log() - q.log())).sum()


def shares_of(args, teachers: dict, sample: dict) -> dict[str, float]:
    """What each teacher counts for a sample: 1 for that of its row in --dataset, or its weight."""
    if args.teacher_key:
        with open(args.dataset) as file:
            row = json.loads(file.readlines()[sample["row"]])
        return {row[args.teacher_key]: 1.0}
    return dict(zip(teachers, args.teacher_weights or [1 / len(teachers)] * len(teachers)))


def distance_loss(args, model, sample: dict) -> torch.Tensor:
    """The mean of the distances from the teachers of the sample."""
    return sum(share * distance_from(args, model, sample, logits) for share, logits in sample["teacher_logits"])


def distance_from(args, model, sample: dict, teacher_logits) -> torch.Tensor:
    """Agarwal et al. 2024, equation 1, at each token of the response; with --kd_top_k, other tokens are one."""
    total, beta = 0.0, args.kd_beta
    for p, q in zip(teacher_logits.softmax(-1), logits_of(args, model, sample).softmax(-1)):
        if args.kd_top_k:
            order = p.argsort(descending=True)
            top, rest = order[: args.kd_top_k], order[args.kd_top_k :]
            p, q = (torch.cat([x[top], x[rest].sum(0, keepdim=True)]) for x in (p, q))
        if args.kd_loss == "jsd":
            mixture = beta * p + (1 - beta) * q
            total = total + beta * kl(p, mixture) + (1 - beta) * kl(q, mixture)
        else:
            total = total + (kl(p, q) if args.kd_loss == "kl" else kl(q, p))
    return total


def policy_loss(args, model, sample: dict) -> torch.Tensor:
    """The sum over the sample's tokens."""
    if args.kd_loss:
        return distance_loss(args, model, sample)
    log_probs, entropies = log_probs_and_entropies(args, model, sample)
    total, high = 0.0, args.eps_clip if args.eps_clip_high is None else args.eps_clip_high
    for t, advantage in enumerate(sample["advantages"]):
        ratio = torch.exp(log_probs[t] - sample["old"][t])
        bound = 1 + high if advantage > 0 else 1 - args.eps_clip
        gain = torch.minimum(ratio * advantage, ratio.new_tensor(bound) * advantage)
        if args.tis_cap:
            gain = gain * min(math.exp(sample["old"][t] - sample["log_probs"][t]), args.tis_cap)
        total = total - gain - args.entropy_loss_coef * entropies[t]
    if args.use_kl_loss:
        total = total + args.init_kl_coef * kl_of(args.kl_estimator, log_probs, sample["ref"]).sum()
    return total


def value_loss(args, critic, sample: dict) -> torch.Tensor:
    values, old, returns = values_of(critic, sample), sample["old_values"], torch.tensor(sample["returns"])
    held = torch.minimum(torch.maximum(values, old - args.value_clip), old + args.value_clip)
    return torch.maximum((values - returns) ** 2, (held - returns) ** 2).sum() / 2


class Trained:
    """A model with its optimizer and scheduler."""

    def __init__(self, args, model, lr: float):
        assert args.optim == "adamw"
        self.model, self.max_norm = model, args.max_norm or math.inf
        groups = [[p for _, p in trained(model) if (p.ndim >= 2) == matrix] for matrix in (True, False)]
        decays = [{"params": p, "weight_decay": d} for p, d in zip(groups, (args.weight_decay, 0.0)) if p]
        self.optimizer = torch.optim.AdamW(decays, lr=lr, betas=tuple(args.adam_betas), eps=args.adam_eps)
        self.scheduler = schedule(args, self.optimizer, args.max_steps)

    def backward(self, args, batch: list[dict], loss_fn) -> float:
        total = 0.0
        for sample in batch:
            loss = loss_fn(args, self.model, sample) * weight(args, sample, batch)
            loss.backward()
            total += loss.item()
        return total

    def step(self) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm).item()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return norm


def read(path: str) -> list[list[dict]]:
    rollouts: dict[int, list[dict]] = {}
    with open(path) as file:
        for line in file:
            row = json.loads(line)
            rollouts.setdefault(row["rollout"], []).append(row)
    return [rollouts[number] for number in sorted(rollouts)]


def main(argv: list[str]) -> None:
    args = SimpleNamespace(**flat(parse(argv)[0]))
    args.learning_rate = rate_of("train_ppo", args.learning_rate, args.lora_rank)
    os.makedirs(args.output_dir, exist_ok=True)
    parts = [part.rpartition("=") for part in (args.teacher or args.ref_model or args.pretrain).split(",")]
    folders = {name or folder: folder for name, _, folder in parts}
    model, *others = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for folder in (args.pretrain, *folders.values())
    )
    references = dict(zip(folders, others))
    if args.routing_replay:
        replay_routing(model)
    model = add_lora(model, args) if args.lora_rank else model
    actor, critic = Trained(args, model, args.learning_rate), None
    if args.advantage_estimator == "gae":
        make_initial_reward_model(args.pretrain, f"{args.output_dir}/initial", args.seed)
        kind = AutoModelForSequenceClassification
        scorer = kind.from_pretrained(f"{args.output_dir}/initial", dtype=torch.float32)
        scorer = add_lora(scorer, args, "SEQ_CLS") if args.lora_rank else scorer
        critic = Trained(args, scorer, args.critic_learning_rate)
    rows, step = [], 0
    for samples in read(args.rollouts_from):
        with torch.no_grad():
            for sample in samples:
                sample["old"] = log_probs_and_entropies(args, actor.model, sample)[0]
                if args.bypass_mode:
                    sample["old"] = torch.tensor(sample["log_probs"], dtype=torch.float64)
                shares = shares_of(args, references, sample)
                sample["ref"] = sum(
                    share * log_probs_and_entropies(args, references[name], sample)[0] for name, share in shares.items()
                )
                if args.kd_loss:
                    sample["teacher_logits"] = [
                        (share, logits_of(args, references[name], sample)) for name, share in shares.items()
                    ]
                if critic:
                    sample["old_values"] = values_of(critic.model, sample)
        (gae_advantages if critic else group_advantages)(args, samples)
        for start in [*range(0, len(samples), args.train_batch_size)] * args.max_epochs:
            if step == args.max_steps:
                break
            step, batch = step + 1, samples[start : start + args.train_batch_size]
            row = {"step": step, "loss": actor.backward(args, batch, policy_loss)}
            if args.aux_loss_coef:
                texts = [{"input_ids": sample["prompt_ids"] + sample["response_ids"]} for sample in batch]
                balance = args.aux_loss_coef * balance_loss(model, texts)
                balance.backward()
                row["loss"] += balance.item()
            if step == 1 and args.parity_dump:
                dump({name: p.grad for name, p in trained(actor.model)}, args.parity_dump, "grads_step1")
            row["grad_norm"] = actor.step()
            if critic:
                row["value_loss"] = critic.backward(args, batch, value_loss)
                row["critic_grad_norm"] = critic.step()
            rows.append(row)
    with open(f"{args.output_dir}/metrics.jsonl", "w") as log:
        log.writelines(json.dumps(row) + "\n" for row in rows)
    if args.parity_dump:
        dump(dict(trained(actor.model)), args.parity_dump, "weights_final")


if __name__ == "__main__":
    main(sys.argv[1:])
