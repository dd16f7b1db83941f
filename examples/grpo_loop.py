"""GRPO on one page: sample, score, advantages, loss, step. Copy this file and change it.

    torchrun --nproc_per_node 2 examples/grpo_loop.py --backend fsdp2

The task is that of the embedded demo: "Sort these digits: 7 3 9 1" -> "1 3 7 9". It takes a minute on two CPU cores.
Only the strategy knows how the model is sharded. So `--backend deepspeed` and more ranks run the same lines.
The loss is a mean over the response tokens of a batch, without a KL term. Shao et al. 2024 (DeepSeekMath), section 4.1.
"""

import argparse
import functools
import json
from pathlib import Path

import torch
import torch.distributed as dist
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.datasets.batches.global_batches import contiguous_slice
from trainer.datasets.batches.packing import IGNORE, collate_padded
from trainer.datasets.demos.demo import make_demo
from trainer.distributed.collectives import gather_objects, rank_0_first
from trainer.entry import quiet_libraries, run_command
from trainer.methods.advantages import compare_in_groups, to_rows
from trainer.models.losses.policy_loss import ppo_loss
from trainer.models.losses.token_losses import label_log_probs
from trainer.rollout.engines.hf import HFEngine
from trainer.rollout.engines.sampling import Sampling, sample_seed
from trainer.rollout.engines.sync import sync_weights
from trainer.strategies import get_strategy
from trainer.strategies.options import StrategyOptions

SEED = 0
WARM_UP_STEPS = 60  # of supervised learning before GRPO: afterwards, a third of the digits are in the right place
WARM_UP_RATE, RATE = 2e-3, 5e-4  # learning rates. They are high for a tiny model (0.2 M); a 1 B model takes 1e-6
NUM_PROMPTS, GROUP_SIZE = 32, 8  # a rollout has 8 answers to each of 32 prompts: 256
BATCH_SIZE = 128  # answers of one optimizer step. So a rollout is used for two steps; the second one needs the clip
MICRO_BATCH_SIZE = 32  # answers in one forward pass of a rank. It limits memory, and changes no gradient
EPSILON = 0.2  # the clip: no gradient for a token whose probability has already changed by 20 % in the wanted direction
MAX_NEW_TOKENS = 24  # the longest right answer has 12 tokens and the end token


def reward(answer: str, label: str) -> float:
    """The share of places with the right digit. "1 3 9" in place of "1 3 7 9" gets 2 / 4."""
    found, right = answer.split(" "), label.split(" ")
    return sum(a == b for a, b in zip(found, right)) / max(len(found), len(right))


def as_row(prompt_ids: list[int], response_ids: list[int], log_probs: list[float], advantage: float) -> dict:
    """A sample for the loader. Only response tokens have a loss, and each one has the advantage of the whole answer."""
    return {
        "input_ids": prompt_ids + response_ids,
        "loss_mask": [0] * len(prompt_ids) + [1] * len(response_ids),
        "old_log_probs": log_probs,
        "advantages": [advantage] * len(response_ids),
        "num_tokens": len(prompt_ids) + len(response_ids),
        "num_loss_tokens": len(response_ids),
        "digest": "00",  # runs that can be resumed have a hash of the tokens here
    }


def collate(samples: list[dict], pad_token_id: int) -> dict[str, torch.Tensor]:
    """A micro-batch of tensors (rows, tokens). As in `labels`, the value at position t is about token t + 1."""
    batch = collate_padded(samples, pad_token_id)
    for name in ("old_log_probs", "advantages"):
        values = torch.tensor([value for sample in samples for value in sample[name]], dtype=torch.float64)
        batch[name] = to_rows(values, batch["labels"] != IGNORE)  # 0 where there is no loss
    return batch


def grpo_loss(model, micro_batch: dict) -> torch.Tensor:
    """The sum of -min(ratio A, clip(ratio) A) over the response tokens. A ratio is p now / p when it was sampled."""
    log_ratio = label_log_probs(model, micro_batch) - micro_batch["old_log_probs"]
    losses, _is_clipped = ppo_loss(log_ratio, micro_batch["advantages"], EPSILON, EPSILON)
    return losses.sum()


def train(strategy, policy: tuple, rows: list[dict], batch_size: int, pad_token_id: int, loss_fn) -> None:
    """One optimizer step for each global batch of `rows`, which are the same on every rank.

    A rank has the sum of the losses of its part. The strategy divides by the number of tokens of the whole global batch.
    """
    model, optimizer, scheduler = policy
    sizes = {"batch_size": batch_size, "micro_batch_size": MICRO_BATCH_SIZE}
    make_batch = functools.partial(collate, pad_token_id=pad_token_id)
    for batch in strategy.setup_dataloader(Dataset.from_list(rows), make_batch, **sizes):
        for number, micro_batch in enumerate(batch.micro_batches, start=1):
            is_last = number == len(batch.micro_batches)
            strategy.backward(loss_fn(model, micro_batch), model, num_targets=batch.num_targets, is_last=is_last)
        strategy.optimizer_step(optimizer, model, scheduler)


def read_prompts(file: str, tokenizer) -> list[tuple[list[int], dict]]:
    """(tokens of the prompt, row) of each row."""
    chat = functools.partial(tokenizer.apply_chat_template, add_generation_prompt=True, return_dict=False)
    rows = [json.loads(line) for line in Path(file).read_text().splitlines()]
    return [(chat(row["messages"][:1]), row) for row in rows]


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="fsdp2")
    parser.add_argument("--num_rollouts", type=int, default=40)
    parser.add_argument("--output_dir", default="runs/grpo_loop")
    args = parser.parse_args(argv)
    quiet_libraries()

    # The policy is sharded. To generate, each rank has an engine with a whole copy of the weights.
    strategy = get_strategy(args.backend, StrategyOptions(seed=SEED, param_dtype="fp32"))
    strategy.setup_distributed()
    rank_0_first(lambda: make_demo("demo"))
    tokenizer = AutoTokenizer.from_pretrained("demo/model")
    model = strategy.load_model("demo/model", AutoModelForCausalLM)
    optimizer = strategy.create_optimizer(model, lr=1.0)  # times the rate of the schedule
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: WARM_UP_RATE if step < WARM_UP_STEPS else RATE)
    policy = strategy.prepare((model, optimizer, rates))
    engine = HFEngine("demo/model", tokenizer, dtype=strategy.param_dtype, device=strategy.device, batch_size=128)
    sampling = Sampling(temperature=1.0, max_new_tokens=MAX_NEW_TOKENS, stop_ids=(tokenizer.eos_token_id,))

    # Warm-up: the demo model knows nothing, and where all answers are wrong there is nothing to prefer.
    rows = []
    for prompt_ids, row in read_prompts("demo/sft.jsonl", tokenizer)[: WARM_UP_STEPS * 64]:
        response_ids = [*tokenizer.encode(row["messages"][1]["content"]), tokenizer.eos_token_id]
        rows.append(as_row(prompt_ids, response_ids, [0.0] * len(response_ids), 0.0))
    train(strategy, policy, rows, 64, tokenizer.pad_token_id, lambda model, batch: -label_log_probs(model, batch).sum())

    prompts, numbers = read_prompts("demo/prompts.jsonl", tokenizer), range(NUM_PROMPTS * GROUP_SIZE)
    for rollout in range(args.num_rollouts):
        # 1. Sample. Each answer has its own seed, so the number of ranks does not change it.
        sync_weights(strategy, policy[0], engine)
        asked = [prompts[(rollout * NUM_PROMPTS + n // GROUP_SIZE) % len(prompts)] for n in numbers]
        mine = contiguous_slice(numbers, dist.get_rank(), dist.get_world_size())
        found = engine.generate([asked[n][0] for n in mine], sampling, [sample_seed(SEED, rollout, n) for n in mine])
        responses = [response for part in gather_objects(found) for response in part]  # of all ranks, in order
        # 2. Score.
        answers = [tokenizer.decode(response.token_ids, skip_special_tokens=True) for response in responses]
        scores = torch.tensor([reward(answer, row["label"]) for answer, (_, row) in zip(answers, asked)]).double()
        # 3. Advantages: the distance to the mean score of the prompt's answers, in standard deviations.
        advantages = compare_in_groups(scores, "group_norm", GROUP_SIZE).tolist()
        # 4. Loss and step.
        samples = zip(asked, responses, advantages)
        rows = [as_row(ids, found.token_ids, found.log_probs, advantage) for (ids, _), found, advantage in samples]
        train(strategy, policy, rows, BATCH_SIZE, tokenizer.pad_token_id, grpo_loss)
        strategy.print(f"rollout {rollout} | reward {scores.mean():.4f} | {asked[0][1]['label']!r}: {answers[0]!r}")
    strategy.save_model(policy[0], tokenizer, f"{args.output_dir}/model")


if __name__ == "__main__":
    run_command(main)
