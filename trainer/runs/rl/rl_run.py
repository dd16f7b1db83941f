"""A run of reinforcement learning: data, roles, state and phases in the order of the calls."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Optional

from trainer.errors import UserError
from trainer.flags.presets import told
from trainer.flags.rl_flags import PPOArguments
from trainer.runs import run_training
from trainer.runs.image_runs import tokenizer_of_rows
from trainer.runs.rl.rl_options import ppo_options, refuse_with_images

COMMAND = "train_ppo"


def load_data(args: PPOArguments, tokenizer, names: str, split: str, flag: str, functions: Optional[dict] = None):
    """Return (prompts, ledger) of --dataset or --eval_dataset, with the columns that the reward functions take."""
    from trainer.datasets.images.image_samples import prompts_with_images
    from trainer.datasets.samples.prompts import tokenize_prompts, with_columns
    from trainer.rollout.rewards.reward_functions import needs_labels, wanted_columns

    rows = run_training.load_flag_rows(args, names, split, flag)
    columns = rows.column_names if args.env else wanted_columns(functions or {}, rows.column_names, flag)
    prompts, ledger = tokenizer_of_rows(args, rows, tokenize_prompts)(
        rows,
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
    add_columns = prompts_with_images if "images" in prompts.column_names else with_columns
    return add_columns(prompts, rows, columns), ledger


def verify_resume(ppo_run, loop, progress, num_steps: int) -> str:
    """Run --verify_resume: replay steps together with their rollouts. Returns the line that reports the result."""
    from trainer.methods.ppo import train_ppo
    from trainer.metrics import Rows
    from trainer.training.verify_resume import verify_replay

    def some_steps(progress) -> list[dict]:
        rows, ppo_run.roles.synced_step = Rows(), None  # the engine must get the loaded weights again
        train_ppo(ppo_run, dataclasses.replace(loop, total_steps=progress.step + num_steps), progress, rows)
        return rows.found

    return verify_replay(ppo_run.checkpoints, progress, some_steps)


@dataclass(frozen=True)
class Method:
    """What another command changes: it shares the rollouts and the reward, and makes updates of its own."""

    command: str
    flags: Any  # its own, which the run folder records
    make_batches_of: Callable  # (args, setup), in place of that of `rl_roles`
    make_updates: Callable  # (setup, roles) to the `updates` of a PPORun
    per_prompt: int  # of what a batch counts, for each prompt


def _balance(args: PPOArguments, folder: str) -> Optional[Callable]:
    """The function that adds the load-balancing loss to the policy's loss, if there is one."""
    if not args.aux_loss_coef:
        return None
    from trainer.methods.load_balance import experts_per_token, with_batch_balance_loss
    from trainer.model_folders.model_folder import read_config

    top_k = experts_per_token(read_config(folder, args.trust_remote_code))
    return functools.partial(with_batch_balance_loss, aux_loss_coef=args.aux_loss_coef, top_k=top_k)


def _resume_rollouts(args: PPOArguments, ppo_run, output_dir: str) -> None:
    """Let a resumed run train the rollouts that it has generated after its checkpoint."""
    from trainer.rollout.resumed_rollouts import AheadFiles, ResumedRollouts, find_resumed

    found, ahead = ResumedRollouts(), ppo_run.roles.ahead
    if args.load_checkpoint is not None and not args.dynamic_filtering:
        found = find_resumed(output_dir, ppo_run.state, args.n_samples_per_prompt)
    if found:
        ppo_run.strategy.print(
            f"rollouts {min(found)} to {max(found)} were generated before the resume: they are trained as they are"
        )
    if ahead:
        ahead.files, ahead.resumed = AheadFiles(output_dir), found
    else:
        ppo_run.recorded = found


def train(args: PPOArguments, is_demo: bool = False, method: Optional[Method] = None) -> None:
    from trainer.datasets.samples.prompts import render_prompt_text
    from trainer.methods.ppo import train_ppo
    from trainer.methods.ppo_state import PPORun, RLState
    from trainer.rollout import rollouts_file
    from trainer.rollout.prompt_order import PromptOrder
    from trainer.rollout.resumed_rollouts import origin_of
    from trainer.rollout.rewards.reward_functions import load_reward_functions
    from trainer.rollout.sample_pages import SamplePages
    from trainer.rollout.timeline import Timeline
    from trainer.runs.certify import certify_run
    from trainer.runs.model_card import save_model
    from trainer.runs.outputs import save_policy, start_metrics
    from trainer.runs.rl import rl_roles as build
    from trainer.training.checkpointing import Checkpoints, SavePolicy, Trained

    own, command = (method.flags, method.command) if method else (args, COMMAND)
    setup = run_training.set_up(args, is_demo, args.rollout_engine == "vllm")
    strategy, tokenizer = setup.strategy, setup.tokenizer
    if args.preset:
        strategy.print(told(args))
    functions = load_reward_functions(args.reward_func)
    load = functools.partial(load_data, functions=functions)
    prompts, eval_prompts, ledger = run_training.load_sets(args, setup, load, render_prompt_text)
    image_run = run_training.image_run_of(args, setup, prompts, eval_prompts)
    if image_run:
        if method:
            raise UserError("--online", "with rows that have images", "leave it out")
        refuse_with_images(args)
    stops = (*build.stop_ids(setup), *(image_run.image_tokens() if image_run else ()))
    frozen = build.frozen_rollouts(args)
    sizes = {"batch_size": args.rollout_batch_size, "seed": args.seed, "curriculum": args.curriculum}
    order = PromptOrder(prompts, **sizes, shuffle=not args.no_shuffle)
    total_steps = build.count_steps(args, order, frozen, method and method.per_prompt)
    output_dir = run_training.open_run(args, setup, command)
    make_batches = build.make_batches_of(args, setup, image_run)
    options, balance = ppo_options(args, stops), _balance(args, setup.folder)
    roles = build.build_roles(args, setup, output_dir, total_steps, make_batches, functions, image_run)
    if roles.routers and frozen:
        roles.routers.check(sample.experts for samples in frozen for sample in samples)
    roles.ahead = build.rollouts_ahead(args, roles, total_steps, options.sampling)
    facts = {"n_samples_per_prompt": args.n_samples_per_prompt, "train_batch_size": args.train_batch_size}
    history = {"origin": origin_of(dataclasses.asdict(own)), "num_histories": args.max_staleness + 1}
    state = RLState(order, args.init_kl_coef, facts=facts, **history)
    others = {"critic": roles.critic} if roles.critic else {}
    trained = Trained(strategy, *roles.actor, state, tokenizer, others, roles.average)
    policy = SavePolicy() if args.verify_resume else save_policy(args)
    checkpoints = Checkpoints(output_dir, trained, policy, dataclasses.asdict(own))
    progress = checkpoints.resume(args.load_checkpoint)
    if method:
        make_batches = method.make_batches_of(args, setup)
    ppo_run = PPORun(strategy, roles, state, options, make_batches, checkpoints, setup.sp_group, balance=balance)
    ppo_run.recorded = frozen and rollouts_file.frozen(frozen)
    ppo_run.updates = method and method.make_updates(setup, roles)
    loop = run_training.loop_options(args, total_steps)
    if args.verify_resume:
        loop = dataclasses.replace(loop, eval_steps=None, parity_dump=None)
        strategy.print(verify_resume(ppo_run, loop, progress, args.verify_resume))
        return
    ppo_run.eval_prompts = list(eval_prompts) if eval_prompts else None
    ppo_run.rollouts_log = rollouts_file.RolloutsLog(output_dir, tokenizer)
    if not frozen:
        _resume_rollouts(args, ppo_run, output_dir)
    if args.sample_pages and strategy.is_rank_0():
        ppo_run.pages = SamplePages(output_dir, tokenizer, args.sample_pages)
    ppo_run.timeline = Timeline(output_dir) if args.timeline else None
    facts = {"data": ledger.counts, "total_steps": total_steps}
    metrics = start_metrics(strategy, own, output_dir, progress, **facts)
    with metrics or contextlib.nullcontext():
        train_ppo(ppo_run, loop, progress, metrics)
        run_facts = run_training.Run(command, output_dir, ledger, None, None)
        if not args.no_save:
            save_model(own, setup, roles.actor[0], run_facts, progress)
        if roles.average and not args.no_save:
            with roles.average.in_place():
                save_model(args, setup, roles.actor[0], run_facts, progress, average=True)
        if metrics:
            metrics.event("end", steps=progress.step)
    if metrics and args.certificate:
        certify_run(own, output_dir, command, setup.folder, state.fingerprint(), strategy.device)
