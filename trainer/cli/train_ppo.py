"""`train_ppo`: reinforcement learning of a causal language model: PPO, GRPO and their relatives.

torchrun --nproc_per_node 2 -m trainer.cli.train_ppo --backend fsdp2 --pretrain MODEL --dataset prompts.jsonl
    --input_key question --label_key answer --reward_func math --advantage_estimator group_norm --n_samples_per_prompt 8
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable

from trainer.cli import common
from trainer.cli.entry import quiet_libraries, run_command
from trainer.cli.ppo_flags import demo_defaults, ppo_options, validate
from trainer.ppo_arguments import PPOArguments

COMMAND = "train_ppo"


def parse(argv: list[str]) -> tuple[PPOArguments, bool]:
    """The arguments, and whether they are those of the embedded demo."""
    return common.parse_or_demo(PPOArguments, COMMAND, argv, demo_defaults)


def load_data(args: PPOArguments, tokenizer, names: str, split: str, flag: str):
    """(prompts, ledger) of --dataset or --eval_dataset."""
    from trainer.datasets.prompts import tokenize_prompts
    from trainer.rollout.rewards import needs_labels

    return tokenize_prompts(
        common.load_flag_rows(args, names, split, flag),
        tokenizer,
        flag=flag,
        input_key=args.input_key,
        label_key=args.label_key,
        input_template=args.input_template,
        apply_chat_template=args.apply_chat_template,
        max_len=args.prompt_max_len,
        num_proc=args.dataset_num_proc,
        needs_labels=needs_labels(args.reward_func),
    )


def verify_resume(train: Callable, roles, checkpoints, progress, num_steps: int) -> str:
    """--verify_resume, of all that a rollout goes through; returns the line that says so."""
    from trainer.metrics import Rows
    from trainer.training.verify_resume import verify_replay

    def some_steps(progress) -> list[dict]:
        rows, roles.synced_step = Rows(), None  # a replay brings the loaded weights to the engine
        train(progress=progress, total_steps=progress.step + num_steps, metrics=rows, rollouts_log=None)
        return rows.found

    return verify_replay(checkpoints, progress, some_steps)


def run(argv: list[str]) -> None:
    args, is_demo = parse(argv)
    quiet_libraries()

    from trainer.cli import ppo_roles as build
    from trainer.cli.outputs import save_policy, start_metrics
    from trainer.datasets.prompts import render_prompt_text
    from trainer.rollout.prompt_order import PromptOrder
    from trainer.rollout.store import RolloutsLog
    from trainer.training.checkpointing import Checkpoints, SavePolicy, Trained
    from trainer.training.ppo import train_ppo
    from trainer.training.ppo_state import RLState

    validate(args)
    setup = common.set_up(args, is_demo)
    strategy, tokenizer = setup.strategy, setup.tokenizer
    prompts, eval_prompts, ledger = common.load_sets(args, setup, load_data, render_prompt_text)
    frozen = build.frozen_rollouts(args)
    output_dir = common.open_run(args, setup, COMMAND)
    order = PromptOrder(prompts, batch_size=args.rollout_batch_size, seed=args.seed, shuffle=not args.no_shuffle)
    total_steps = args.max_steps or build.count_steps(args, order, frozen)
    make_batches = build.make_batches_of(args, setup)
    options = ppo_options(args, build.stop_ids(setup))
    roles = build.build_roles(args, setup, output_dir, total_steps, make_batches)
    facts = {"n_samples_per_prompt": args.n_samples_per_prompt, "train_batch_size": args.train_batch_size}
    state = RLState(order, args.init_kl_coef, facts=facts)
    others = {"critic": roles.critic} if roles.critic else None
    trained = Trained(strategy, *roles.actor, state, tokenizer, others, roles.average)
    policy = SavePolicy() if args.verify_resume else save_policy(args)
    checkpoints = Checkpoints(output_dir, trained, policy, dataclasses.asdict(args))
    progress = checkpoints.resume(args.load_checkpoint)
    train = functools.partial(
        train_ppo,
        strategy,
        roles,
        state,
        options,
        make_batches,
        sp_group=setup.sp_group,
        checkpoints=checkpoints,
        frozen_rollouts=frozen,
        logging_steps=args.logging_steps,
        max_skipped_steps=args.max_skipped_steps,
        check_replicas_every=args.check_replicas_every,
    )
    if args.verify_resume:
        strategy.print(verify_resume(train, roles, checkpoints, progress, args.verify_resume))
        return
    facts = {"data": ledger.as_dict(), "total_steps": total_steps}
    metrics = start_metrics(strategy, args, output_dir, progress, **facts)
    with metrics or contextlib.nullcontext():
        train(
            progress=progress,
            total_steps=total_steps,
            metrics=metrics,
            rollouts_log=RolloutsLog(output_dir, tokenizer) if strategy.is_rank_0() else None,
            eval_prompts=list(eval_prompts) if eval_prompts else None,
            eval_steps=args.eval_steps,
            parity_dump=args.parity_dump,
        )
        run_facts = common.Run(COMMAND, output_dir, ledger, None, None)
        if not args.no_save:
            common.save_model(args, setup, roles.actor[0], run_facts, progress)
        if roles.average and not args.no_save:
            with roles.average.in_place():
                common.save_model(args, setup, roles.actor[0], run_facts, progress, average=True)
        if metrics:
            metrics.event("end", steps=total_steps)


def main() -> None:
    run_command(run)


if __name__ == "__main__":
    main()
