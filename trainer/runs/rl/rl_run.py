"""One run of reinforcement learning, from flags to a saved policy. `train` shows its order."""

import contextlib
import dataclasses
import functools
from typing import Optional

from transformers import AutoModelForCausalLM

from trainer.comma_separated import names_in
from trainer.datasets.conversations.turn_ends import stop_ids
from trainer.datasets.files.image_files import has_images
from trainer.datasets.images.image_samples import prompts_with_images
from trainer.datasets.samples.parts import WHOLE, Part
from trainer.datasets.samples.prompts import render_prompt_text, tokenize_prompts, with_columns
from trainer.datasets.shapes.columns import TEMPLATE_ARGS
from trainer.errors import UserError
from trainer.flags.groups import options_of_flags, public_flags
from trainer.flags.rl_flags import PPOArguments
from trainer.flags.rules import refuse
from trainer.methods.ppo import train_ppo
from trainer.methods.ppo_state import EntropyCoef, PPORun, RLState
from trainer.metrics import Rows, counted
from trainer.rollout.evaluation import groups_of_rows
from trainer.rollout.prompt_order import WRONG_AND_RIGHT, PromptOrder
from trainer.rollout.resumed_rollouts import origin_of
from trainer.rollout.rewards.formulas import can_compare
from trainer.rollout.rewards.judge import rewards_need_labels
from trainer.rollout.rewards.math_reward import MATH_REWARDS
from trainer.rollout.rewards.reward_functions import load_reward_functions, wanted_columns
from trainer.rollout.rollouts_file import RolloutsLog
from trainer.runs import outputs
from trainer.runs.feature import apply
from trainer.runs.rl.rl_evaluation import answers_log, with_groups
from trainer.runs.rl.rl_features import RL_FEATURES
from trainer.runs.rl.rl_options import evaluation_of, ppo_options
from trainer.runs.rl.rl_parts import RLMethod, RLRun
from trainer.runs.rl.rl_roles import build_roles, make_batches_of
from trainer.runs.rl.rl_teachers import with_teachers
from trainer.runs.run_data import load_sets, load_sets_of, note_small_data, text_options, tokenized
from trainer.runs.run_record import identity_of
from trainer.runs.run_setup import set_up
from trainer.training.checkpointing import Checkpoints, SavePolicy, Trained
from trainer.training.loop import LoopOptions
from trainer.training.stop_request import ENDING, StopRequest
from trainer.training.verify_resume import verify_replay

POLICY = RLMethod("train_ppo", make_batches_of)


def train(args: PPOArguments, is_demo: bool = False, method: RLMethod = POLICY) -> None:
    """One run, in the order of its parts: strategy, prompts, roles, features, state, phases, save. Flags are checked."""
    run = RLRun(method=method, args=args, auto_class=AutoModelForCausalLM)
    apply(RL_FEATURES, run, "before_setup")
    args = run.args
    kind = {"rolls_out": True, "vllm": args.rollout.rollout_engine == "vllm", "is_demo": is_demo}
    run.setup = set_up("train_ppo", args, longest=args.prompts.prompt_max_len + args.rollout.generate_max_len, **kind)

    apply(RL_FEATURES, run, "before_data")
    read_prompts(run, is_demo)
    apply(RL_FEATURES, run, "with_data")
    size = args.rollout.rollout_batch_size
    note_math(run.setup.strategy, args.scores.reward_func)
    note_small_data(run.setup.strategy, "--rollout_batch_size", size, run.samples, "prompts")
    order = {"batch_size": size, "curriculum": args.rollout.curriculum, "delay": args.rollout.max_staleness}
    order["reward_range"] = args.scores.reward_range or WRONG_AND_RIGHT
    run.order = PromptOrder(run.samples, seed=args.batch.seed, shuffle=not args.batch.no_shuffle, **order)
    run.total_steps = count_steps(args, run.order, run.frozen, method.per_prompt)

    run.open()
    run.options = ppo_options(args, (*stop_ids(run.setup.tokenizer, run.setup.folder), *run.more_stops))
    run.roles = build_roles(run)
    apply(RL_FEATURES, run, "with_roles")

    run.checkpoints = checkpoints_of(run)
    run.progress = run.checkpoints.resume(args.checkpoint.load_checkpoint, run.total_steps)
    run.loader, sp_group = run.checkpoints.trained.loader, run.setup.sp_group  # its state is the position in the data
    batches, strategy = method.make_batches(run), run.setup.strategy
    run.ppo = PPORun(strategy, run.roles, run.loader, run.options, batches, run.checkpoints, sp_group)
    run.ppo.updates = method.make_updates(run)
    run.ppo.groups = groups_of_rows(run.samples)
    apply(RL_FEATURES, run, "with_loss")
    loop = options_of_flags(LoopOptions, args, total_steps=run.total_steps)
    if args.checkpoint.verify_resume:
        loop = dataclasses.replace(loop, eval_steps=None, parity_dump=None)
        strategy.print(verify_resume(run.ppo, loop, run.progress, args.checkpoint.verify_resume))
        return

    if run.eval_samples:
        run.ppo.evaluation = evaluation_of(args, run.eval_samples, run.options.sampling)
        run.ppo.answers_log = answers_log(run.output_dir, run.ppo.evaluation, run.setup.tokenizer)
    run.ppo.rollouts_log = RolloutsLog(run.output_dir, run.setup.tokenizer)
    apply(RL_FEATURES, run, "with_logs")
    facts = {"data": run.ledger.counts, "total_steps": run.total_steps}
    metrics = outputs.start_metrics(strategy, run.own_flags, run.output_dir, run.checkpoints, **facts)
    with contextlib.ExitStack() as ending:
        with metrics or contextlib.nullcontext():
            note_first_rollout(run, bool(loop.eval_steps))
            train_ppo(run.ppo, loop, run.progress, metrics)
            ending.enter_context(StopRequest(ENDING))
            steps = run.progress.step
            apply(RL_FEATURES, run, "before_save")
            save(run)
            if metrics:
                metrics.event("end", steps=steps)
        apply(RL_FEATURES, run, "at_end")


def count_steps(args: PPOArguments, order, frozen: Optional[list], per_prompt: Optional[int] = None) -> int:
    """Optimizer steps of the whole run: --max_steps, or those of all rollouts. An episode's last one may be shorter.

    A batch counts responses, or `per_prompt` pairs of each prompt. Raises UserError if even the largest rollout is
    smaller than an optimizer step, or if the policy never trains.
    """
    size, num = args.rollout.rollout_batch_size, len(order.prompts)
    prompts = [min(size, num - start) for start in range(0, num, size)]
    each = per_prompt or args.rollout.n_samples_per_prompt
    sizes = [count * each for count in prompts] * args.rollout.num_episodes
    if frozen is not None:
        sizes = [len(samples) // args.rollout.n_samples_per_prompt * each for samples in frozen]
    if args.batch.train_batch_size > max(sizes):
        found = (
            f"{args.batch.train_batch_size}, but a rollout has {max(sizes)} {'pairs' if per_prompt else 'responses'}"
        )
        raise UserError("--train_batch_size", found, f"up to {max(sizes)}, or larger rollouts")
    steps_of_rollouts = sum(-(-size // args.batch.train_batch_size) for size in sizes)
    total = args.batch.max_steps or args.batch.max_epochs * steps_of_rollouts
    if args.critic.freezing_actor_steps >= total:
        found = f"{args.critic.freezing_actor_steps}, but the run has {counted(total, 'step')}, so the policy would not train"
        raise UserError("--freezing_actor_steps", found, f"up to {total - 1}")
    return total


def note_first_rollout(run: RLRun, evaluates: bool) -> None:
    """Say what the time before the first step of this process is for, unless its rollout is there already."""
    step, order, ahead = run.progress.step, run.order, run.roles.ahead
    if step >= run.total_steps or run.ppo.recorded or (ahead and ahead.resumed):
        return
    size, each = run.args.rollout.rollout_batch_size, run.args.rollout.n_samples_per_prompt
    size = min(size, len(order.prompts) - order.next_index)
    first = "evaluating, then " if run.ppo.evaluation and evaluates and step == 0 else ""
    if step:
        first = f"rollout {run.ppo.state.rollout}, from prompt {order.next_index + 1} of {len(order.prompts)} on: "
    run.setup.strategy.print(
        f"step {step + 1}: {first}generating {counted(size * each, 'response')} to {counted(size, 'prompt')}"
    )


def note_math(strategy, reward_func: Optional[str]) -> None:
    """Say that formulas are compared as texts, if a reward compares formulas and the package for it is not installed."""
    if not MATH_REWARDS.keys().isdisjoint(names_in(reward_func)) and not can_compare():
        text = "math-verify is not installed, so formulas are compared as texts"
        strategy.print(f"--reward_func {reward_func}: {text}")


def read_prompts(run: RLRun, is_demo: bool) -> None:
    """Read the prompts with the columns that the reward functions take."""
    args = run.args
    run.functions = load_reward_functions(args.scores.reward_func)
    load = functools.partial(load_data, args, run.setup.tokenizer, functions=run.functions)
    run.samples, run.eval_samples, run.ledger = load_sets(
        args.data, args.batch.seed, run.setup, load, render_prompt_text
    )
    facts = {"is_demo": is_demo, "has_images": run.has_images, "no_images": not run.has_images}
    refuse(run.method.rules, run.own_flags, **facts)


def load_data(args: PPOArguments, tokenizer, names: str, split: str, flag: str, part: Part = WHOLE, *, functions: dict):
    """Return (prompts, ledger) of a part of --dataset or --eval_dataset, with the columns that the reward functions take."""
    is_evaluation = flag == "--eval_dataset" or part.is_evaluation

    def options_of(args) -> dict:
        options = text_options(args.data) | {"max_len": args.prompts.prompt_max_len}
        options |= {"input_key": args.prompts.input_key, "label_key": args.prompts.label_key}
        needed = rewards_need_labels(args.scores.reward_func, args.scores.judge_rubric, args.scores.judge_mode)
        takes = bool(functions or args.scores.remote_rm_url)
        return options | {"needs_labels": needed, "takes_labels": takes, "drop_answer": bool(args.kl.teacher)}

    rows = load_sets_of(args, args.batch.seed, options_of, names, split, flag)
    if args.environment.env and TEMPLATE_ARGS in rows.column_names:
        found = "later turns of the environment would lack these arguments"
        raise UserError(
            f"{flag} column {TEMPLATE_ARGS}", found, f"--template_args, or --ignore_columns {TEMPLATE_ARGS}"
        )
    columns = wanted_columns(functions, rows.column_names, flag)
    columns = rows.column_names if args.environment.env else columns
    taken = [name for name in (*columns, args.kl.teacher_key) if name not in (TEMPLATE_ARGS, None)]
    tokenize = functools.partial(tokenize_prompts, taken=taken)
    prompts, ledger = tokenized(args, tokenizer, rows, tokenize, options_of, flag, part)
    prompts = with_groups(prompts, rows, args, names, split, flag, is_evaluation)
    prompts = prompts if is_evaluation else with_teachers(prompts, rows, args.kl, flag)
    add_columns = prompts_with_images if has_images(prompts) else with_columns
    return add_columns(prompts, rows, columns), ledger


def checkpoints_of(run: RLRun) -> Checkpoints:
    """The checkpoints of the run, with its state between rollouts as the position in the data."""
    args, roles = run.args, run.roles
    facts = {"n_samples_per_prompt": args.rollout.n_samples_per_prompt, "train_batch_size": args.batch.train_batch_size}
    history = {
        "origin": origin_of(public_flags(run.own_flags)),
        "num_histories": args.rollout.max_staleness + 1,
    }
    history["entropy"] = EntropyCoef(args.advantage.entropy_loss_coef)
    state = RLState(run.order, args.kl.init_kl_coef, facts=facts, **history)
    others = {"critic": roles.critic} if roles.critic else {}
    trained = Trained(run.setup.strategy, *roles.actor, state, run.setup.tokenizer, others, roles.average)
    policy = SavePolicy() if args.checkpoint.verify_resume else outputs.save_policy(args.checkpoint)
    return Checkpoints(run.output_dir, trained, policy, identity_of(run, run.own_flags))


def verify_resume(ppo_run, loop, progress, num_steps: int) -> str:
    """Run --verify_resume: replay steps together with their rollouts. Returns the line that reports the result."""

    def some_steps(progress) -> list[dict]:
        rows, ppo_run.roles.synced_step = Rows(), None  # the engine must get the loaded weights again
        train_ppo(ppo_run, dataclasses.replace(loop, total_steps=progress.step + num_steps), progress, rows)
        return rows.found

    return verify_replay(ppo_run.checkpoints, progress, some_steps)


def save(run: RLRun) -> None:
    """Write the policy, and the average of its weights if there is one, unless --no_save is given."""
    facts = (run.method.command, run.own_flags, run.progress, run.ledger, run.output_dir)
    for path, is_average in zip(run.saved_models(run.output_dir), (False, True)):
        with run.roles.average.in_place() if is_average else contextlib.nullcontext():
            outputs.save_model(run.setup.strategy, run.roles.actor[0], run.setup.tokenizer, path, *facts)
