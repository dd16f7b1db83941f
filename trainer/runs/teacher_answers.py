"""Answers of a teacher to the prompts of a dataset, as token samples that `train_sft` reads: the first half of `train_kd`."""

import dataclasses
import shutil
from typing import Any

from trainer.runs import run_training

PROMPTS_AT_A_TIME = 256  # on each rank; rank 0 gets the answers of so many


def draw_answers(args, setup: run_training.Setup, teacher, teacher_folder: str, target: str) -> None:
    """Write --teacher_answers answers to each prompt of --dataset to the folder `target` (collective).

    The hf engine draws them on all ranks, from the weights of the prepared `teacher`. An answer depends on the seed, the
    prompt and its own number only. The tokens are kept as they were drawn.
    """
    from trainer.distributed.collectives import rank_0_first, wait_for_all
    from trainer.rollout.engines.hf import HFEngine
    from trainer.rollout.engines.sampling import Sampling
    from trainer.rollout.engines.sync import sync_weights
    from trainer.rollout.generation import generate_samples
    from trainer.rollout.placement import write_by_rank_0
    from trainer.runs.rl.rl_roles import stop_ids

    strategy = setup.strategy
    prompts, ledger = rank_0_first(lambda: _prompts(args, setup.tokenizer))
    strategy.print(f"prompts for the teacher: {ledger.summary()}")
    options = {"dtype": strategy.param_dtype, "device": strategy.device, "batch_size": args.micro_rollout_batch_size}
    options |= {"trust_remote_code": args.trust_remote_code, "compiled": args.compile}
    engine = HFEngine(teacher_folder, setup.tokenizer, **options)
    sync_weights(strategy, teacher, engine)
    sampling, each = (
        Sampling(args.temperature, args.generate_max_len, stop_ids(dataclasses.replace(setup, folder=teacher_folder))),
        args.teacher_answers,
    )
    samples: list[dict[str, Any]] = []
    at_a_time = PROMPTS_AT_A_TIME * strategy.sizes.world_size

    def keep(part: list) -> None:
        first = len(samples)
        samples.extend(as_row(sample, first + place, setup.tokenizer) for place, sample in enumerate(part))

    for start in range(0, len(prompts), at_a_time):
        asked = [prompts[place] for place in range(start, min(start + at_a_time, len(prompts)))]
        drawn = generate_samples(engine, asked, each, sampling, seed=args.seed, rollout=0, first=start * each)
        write_by_rank_0(drawn, keep)
    if strategy.is_rank_0():
        _write(args, setup.tokenizer, samples, target)
    wait_for_all()


def _prompts(args, tokenizer):
    from trainer.datasets.samples.prompts import tokenize_prompts

    rows = run_training.load_flag_rows(args, args.dataset, args.dataset_split, "--dataset")
    return tokenize_prompts(
        rows,
        tokenizer,
        flag="--dataset",
        input_key=args.input_key,
        label_key=None,
        input_template=args.input_template,
        apply_chat_template=args.apply_chat_template,
        max_len=args.max_len - args.generate_max_len,
        num_proc=args.dataset_num_proc,
    )


def as_row(sample, number: int, tokenizer) -> dict[str, Any]:
    """A sample of a rollout as a row of `sft_samples`, with loss on the answer."""
    from trainer.datasets.conversations.tokens import digest_of, is_stop_token

    ids, answer = sample.prompt_ids + sample.response_ids, len(sample.response_ids)
    return {
        "input_ids": ids,
        "loss_mask": [0] * len(sample.prompt_ids) + [1] * answer,
        "num_tokens": len(ids),
        "num_loss_tokens": answer,
        "digest": digest_of(ids),
        "row": number,
        "truncated": not sample.finished,
        "empty": False,
        "stop_trained": is_stop_token(tokenizer, ids[-1]),
    }


def _write(args, tokenizer, samples: list[dict[str, Any]], target: str) -> None:
    import datasets

    from trainer.datasets.samples.prepared import OPTIONS, write_prepared
    from trainer.datasets.samples.sft_samples import sft_features

    unset = dict.fromkeys(OPTIONS) | {
        "multiturn": False,
        "apply_chat_template": False,
        "pretrain_mode": False,
    }
    shutil.rmtree(target, ignore_errors=True)
    rows = datasets.Dataset.from_list(samples, features=sft_features())
    write_prepared(rows, tokenizer, unset | {"max_len": args.max_len}, {}, target)
