"""PPO, GRPO and related methods. This file is the one place with the order of the phases.

`train_ppo` repeats for each rollout:

1. `make_rollout`: sync the weights to the engine, generate responses to some prompts, score them.
2. `policy_updates`:
   - `add_log_probs`: of the responses, under the policy and the reference; the values of the critic
   - `add_advantages`: from the scores to one advantage for each generated token
   - for each batch of responses: one step of the critic, one step of the policy

Every rank runs the same program, and knows the scores and sizes of all samples. See `rollout/placement.py` for tokens.
"""

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator
from typing import Optional

import torch

from trainer.errors import UserError
from trainer.methods import advantages as adv
from trainer.methods.ppo_state import PPOOptions, PPORun, RLState, Roles
from trainer.methods.roles import (
    critic_values,
    make_policy_loss,
    make_value_loss,
    policy_log_probs,
    reference_log_probs,
)
from trainer.methods.rollout_corrections import (
    COVARIANCE_LOSSES,
    add_likelihood_of_right,
    chosen_here,
    importance_corrections,
    leave_out,
)
from trainer.methods.rollout_facts import (
    check_log_probs,
    group_facts,
    log_prob_facts,
    means_over_tokens,
    rewards_by_group,
    rewards_of_turns,
    rollout_log_probs_of,
    sample_facts,
    score_notes,
    scores_by_reward,
    scores_of,
)
from trainer.methods.rollout_phase import (
    answers_to,
    evaluation_facts,
    filtered_samples,
    offloaded,
    patiently,
    scored_samples,
    sync,
)
from trainer.metrics import MetricsLog, counted
from trainer.rollout.asynchronous import staleness_facts
from trainer.rollout.micro_batches import collect, compute, spread, spread_sets
from trainer.rollout.placement import Part
from trainer.rollout.prompt_order import WRONG_AND_RIGHT
from trainer.rollout.samples import Sample
from trainer.rollout.scoring import check_failed
from trainer.rollout.timeline import FILE, span, timed
from trainer.training.checkpointing import Progress
from trainer.training.loop import (
    LoopOptions,
    LossFunction,
    StepLog,
    dump,
    forward_backward,
    inspect_gradients,
    mean_metrics,
    step_row,
    train_step,
)
from trainer.training.stop_request import StopRequest


def train_ppo(
    run: PPORun, loop: LoopOptions, progress: Progress, metrics: Optional[MetricsLog]
) -> Optional[dict[str, float]]:
    """Run the optimizer steps up to `loop.total_steps`. Returns the metrics of the last evaluation.

    Raises:
        Interrupted: a signal came. A checkpoint is saved first, as between rollouts.
        UserError: a reward failed. A checkpoint is saved first.
    """
    strategy, state, roles = run.strategy, run.state, run.roles
    log, last_eval, passes = StepLog(strategy, metrics, loop, progress), None, run.options.num_episodes
    told: set[str] = set()  # each note comes once
    for model, _, _ in filter(None, (roles.actor, roles.critic)):
        model.train()
    if run.evaluation and loop.eval_steps and progress.step == 0:
        last_eval = _evaluation(run, log, progress)
    quiet = contextlib.nullcontext()
    with StopRequest() as stop, run.timeline or quiet, roles.ahead or quiet, log.bar:
        is_over = run.checkpoints.policy.has_lost_patience
        while progress.step < loop.total_steps and not (state.is_used_up(passes) or is_over(progress)):
            first_step, episode = progress.step, state.prompts.episode
            facts = {"rollout": state.rollout} | ({"timeline": FILE} if run.timeline else {})
            samples = make_rollout(run, progress, facts)
            _log_samples(run, samples, metrics, progress)
            if samples:
                notes = score_notes(samples, run.options, state.prompts.curriculum, bool(run.evaluation))
                for subject in notes.keys() - told:
                    strategy.print(notes[subject])
                told |= notes.keys()
                (run.updates or policy_updates)(run, loop, log, progress, samples, episode, facts)
            state.go_on(samples)
            if run.options.kl_target is not None and samples:
                kl, horizon = facts["kl_per_response"], run.options.kl_horizon
                count = sum(not sample.failed for sample in samples)
                state.kl_coef = adv.adapt_kl_coef(state.kl_coef, kl, run.options.kl_target, count, horizon)
            num_steps, eval_metrics = progress.step - first_step, None
            if run.evaluation and (loop.eval_is_due(progress.step, num_steps) or state.is_used_up(passes)):
                with _saved_if_a_reward_fails(run, progress):
                    last_eval = eval_metrics = _evaluation(run, log, progress)
            if run.timeline:
                run.timeline.write()
            with span("save"):
                run.checkpoints.after_step(progress, eval_metrics, stop.received, num_steps)
        run.checkpoints.end(progress)
    log.end()
    if state.is_used_up(passes):
        kept = f"dynamic filtering kept {state.prompts_kept} of {counted(state.prompts_drawn, 'prompt')}"
        strategy.print(
            f"{kept}: the passes over the prompts end after {progress.step} of {counted(loop.total_steps, 'step')}"
        )
    if loop.parity_dump:
        dump(strategy, loop.parity_dump, "weights_final", strategy.iter_full_params, roles.actor[0])
    return last_eval


# --- 1. sync, generate, score


def make_rollout(run: PPORun, progress: Progress, facts: dict) -> list[Sample]:
    """Sync weights, generate, score. If a reward fails, the checkpoint has the state before this rollout."""
    strategy, roles, before = run.strategy, run.roles, run.state.state_dict()
    with _saved_if_a_reward_fails(run, progress):
        try:
            if roles.ahead is not None:
                return _rollout_ahead(run, progress, facts)
            with offloaded(strategy, roles):

                def generated() -> list[Sample]:
                    facts.update(sync(strategy, roles, progress.step))
                    return scored_samples(roles, run.state, run.options, run.recorded, facts)

                samples = patiently(generated, strategy, roles, undo=lambda: run.state.load_state_dict(before))
                if roles.engine is not None:
                    roles.engine.sleep()
                    roles.synced_step = None  # it keeps no weights while it sleeps
        except UserError:
            run.state.load_state_dict(before)
            raise
    return samples


def _rollout_ahead(run: PPORun, progress: Progress, facts: dict) -> list[Sample]:
    """The same with --max_staleness: a thread has generated the samples, and mostly scored them."""
    ahead, state = run.roles.ahead, run.state
    facts |= ahead.update(run.strategy, run.roles.actor[0], state)

    def draw(first: int) -> list[Sample]:
        state.refills += first > 0
        samples = ahead.next(state, progress.step, facts)
        for sample in samples:
            sample.number += first
        if any(math.isnan(sample.score) and not sample.failed for sample in samples):
            with timed(facts, "reward"):
                run.roles.score(samples, run.options.advantages.group_size)
        check_failed(samples, run.roles.max_failed_share)
        state.prompts.note(samples)
        ahead.note(samples)
        return samples

    return draw(0) if run.options.filtering_range is None else filtered_samples(draw, state, run.options, facts)


@contextlib.contextmanager
def _saved_if_a_reward_fails(run: PPORun, progress: Progress) -> Iterator[None]:
    """If a reward fails inside, save all finished steps. It fails with the same UserError on every rank."""
    try:
        yield
    except UserError:
        run.checkpoints.save(progress)
        raise


# --- 2. log-probs, advantages, updates


def policy_updates(
    run: PPORun, loop: LoopOptions, log: StepLog, progress: Progress, samples: list[Sample], episode: int, facts: dict
) -> None:
    """Compute log-probs and advantages, then do the optimizer steps of one rollout. Adds to `facts`."""
    strategy, roles, options, state = run.strategy, run.roles, run.options, run.state
    policy_loss, value_loss = _losses(run)
    batches, samples = run.make_batches(samples, episode)  # tokens move to the ranks that train them
    part = Part(strategy, samples, run.sp_group)
    spread_sets(batches, part.samples)
    with timed(facts, "logprobs"):
        flat = add_log_probs(strategy, roles, batches, options, part)
    facts |= sample_facts(samples) | group_facts(samples, options) | staleness_facts(samples, state.rollout)
    facts |= rewards_by_group(samples, run.groups)
    facts |= add_advantages(batches, samples, part, flat, state, options)
    for number, batch in enumerate(batches * options.num_epochs):
        with span("train"):
            critic_row = update_critic(strategy, roles.critic, batch, value_loss)
            row = update_actor(run, loop, batch, policy_loss, progress)
        row |= state.entropy.after_step(row["entropy"], options)
        if number == 0:
            facts |= _facts_of_first_update(run, batches, samples, part, flat)
            check_log_probs(facts["rollout_logprob_diff"], options.max_logprob_diff)
        row = {**row, "mfu": None, **critic_row, **facts}
        log.after_step(roles.actor[0], row, batch, note=f" | reward {row['reward']:.4f}")
        if not math.isfinite(row["loss"]) and not row.get("skipped"):
            raise UserError(f"step {row['step']}", f"loss {row['loss']}")
        if progress.step == loop.total_steps:
            break


def add_log_probs(strategy, roles: Roles, batches: list, options: PPOOptions, part: Part) -> dict[str, torch.Tensor]:
    """Add log-probs of policy and reference, and values of the critic, to the micro-batches (all-reduces over sp).

    Returns the flat vectors of `part` by name. With `bypass_mode`, the old log-probs are those of the rollout engine. Else
    training uses the same micro-batches, so the ratio on the first update is exactly 1. If a rollout has only one update, and
    advantages need no log-probs of the policy, they are not computed here. They are then those of the update's own forward pass.
    """
    log_probs = functools.partial(policy_log_probs, temperature=options.policy.temperature, routers=roles.routers)
    actor, by_entropy = roles.actor[0], options.top_entropy_quantile is not None
    models: dict[str, Callable[[dict], torch.Tensor]] = {}
    corrects = options.tis_cap is not None or options.rollout_kl_max is not None
    corrects = corrects or options.policy.loss in COVARIANCE_LOSSES
    needed = options.num_epochs * len(batches) > 1 or options.kl_in_rewards or corrects or by_entropy
    if needed and not options.bypass_mode:
        models["old_log_probs"] = functools.partial(log_probs, actor, notes_entropies=by_entropy)
    if roles.references:
        models["ref_log_probs"] = functools.partial(reference_log_probs, roles.references, log_probs, actor)
    if roles.critic is not None:
        models["old_values"] = functools.partial(critic_values, roles.critic[0])
    flat = {}
    if options.bypass_mode:
        flat["old_log_probs"] = rollout_log_probs_of(part)
        spread(batches, "old_log_probs", flat["old_log_probs"])
    for name, function in models.items():
        compute(batches, name, function)
        flat[name] = collect(strategy, batches, name, part)
    if by_entropy:
        flat["old_entropies"] = collect(strategy, batches, "old_entropies", part)
    return flat


def add_advantages(
    batches: list, samples: list[Sample], part: Part, flat: dict, state: RLState, options: PPOOptions
) -> dict:
    """Add advantages, returns and importance weights to the micro-batches. Returns their metrics.

    Every rank compares the scores of all samples. It has only the tokens of `part` (all-reduces over dp x sp of a few
    numbers per sample).
    """
    mask, penalty, values = adv.rows_mask(part.lengths, part.width), None, None
    if options.kl_in_rewards:
        kl = adv.kl_estimate(flat["old_log_probs"], flat["ref_log_probs"], options.kl_estimator)
        penalty = state.kl_coef * adv.to_rows(kl, mask)
    if "old_values" in flat:
        values = adv.to_rows(flat["old_values"], mask)
    scores = shaped_scores(samples, state, options)
    if options.kl_in_score:
        scores, penalty = scores - part.share(penalty.sum(1)), None
    advantages, returns = adv.estimate_advantages(
        options.advantages, scores, mask, penalty, values, part.places, total=lambda sums: part.share(sums).sum(),
        of_turns=rewards_of_turns(part) if options.turn_rewards else None,
    )  # fmt: skip
    flat["advantages"] = advantages[mask]
    spread(batches, "advantages", flat["advantages"])
    spread(batches, "returns", returns[mask])
    if options.policy.loss in COVARIANCE_LOSSES:
        spread(batches, "chosen", chosen_here(part, mask, flat, options, state.rollout))
    if options.policy.off_policy_mask_threshold is not None:
        spread(batches, "rollout_log_probs", rollout_log_probs_of(part))
    corrections, rejections = importance_corrections(part, mask, flat, options)
    kept = functools.reduce(torch.mul, rejections.values(), torch.ones_like(advantages[mask]))
    if corrections or rejections:
        spread(batches, "tis_weights", functools.reduce(torch.mul, corrections.values(), kept))
    if options.rejected_leave:
        leave_out(part, batches, adv.to_rows(kept, mask) > 0, mask, options.policy.loss_agg)
    if options.positive_nll_coef:
        _, right = options.reward_range or WRONG_AND_RIGHT
        add_likelihood_of_right(part, batches, scores_of(samples) >= right, options.positive_nll_coef)
    facts = {"rejected_fraction": 1 - kept} if rejections else {}
    if options.advantages.has_teacher:
        facts["teacher_advantage_abs"] = penalty[mask].abs()
    return means_over_tokens(part, advantage_abs=flat["advantages"].abs(), **corrections, **rejections, **facts)


def shaped_scores(samples: list[Sample], state: RLState, options: PPOOptions) -> torch.Tensor:
    """Scores as the advantages use them: with the overlong penalty, normalised and clipped. For gdpo, see `normalized_apart`."""
    scores = scores_of(samples)
    if options.rewards_apart:
        names, weights = zip(*options.rewards_apart)
        size, rewards = options.advantages.group_size, scores_by_reward(samples, names)
        if any(lost and not s.failed for lost, s in zip(rewards.isnan().all(1).tolist(), samples)):
            found = f"a sample without a score of {', '.join(names)}"
            raise UserError("--advantage_estimator gdpo", found, "rollouts that these functions scored")
        return adv.normalized_apart(rewards, torch.tensor(weights, dtype=torch.float64), size)
    if options.overlong_buffer_len:
        lengths = torch.tensor([sample.size().response for sample in samples], dtype=torch.float64)
        limit, factor = options.sampling.max_new_tokens, options.overlong_penalty_factor
        scores = scores + adv.overlong_penalty(lengths, limit, options.overlong_buffer_len, factor)
    if options.normalize_reward:
        state.moments.update(scores)
        scores = state.moments.normalize(scores)
    return scores if options.reward_clip_range is None else scores.clamp(*options.reward_clip_range)


def _facts_of_first_update(run: PPORun, batches: list, samples: list[Sample], part: Part, flat: dict) -> dict:
    """How log-probs of the engine and of training differ, also as a page of samples (all-reduces over dp x sp)."""
    flat["seen"] = torch.ones(sum(part.lengths), dtype=torch.float64)
    flat["trained_log_probs"] = flat.get("old_log_probs")
    if run.options.bypass_mode or "old_log_probs" not in flat:  # the updated batch has those of the update
        compute(batches[:1], "seen", lambda micro_batch: torch.ones_like(micro_batch["labels"]))
        flat["seen"], noted = (collect(run.strategy, batches[:1], name, part) for name in ("seen", "noted_log_probs"))
        flat["trained_log_probs"] = torch.where(flat["seen"] > 0, noted, rollout_log_probs_of(part))
        flat.setdefault("old_log_probs", flat["trained_log_probs"])
    facts = log_prob_facts(part, flat, run.state, run.options)
    if run.pages:
        size = run.options.advantages.group_size
        of_prompts = scores_of(samples).view(-1, size).tolist()
        groups = [of_prompts[place // size] for place in part.places]
        values = flat["trained_log_probs"], flat["advantages"]
        facts |= run.pages.write(run.state.rollout, part.samples, *values, groups)
    return facts


def _losses(run: PPORun) -> tuple[LossFunction, LossFunction]:
    """The loss functions of the policy and of the critic."""

    def note_log_probs(micro_batch: dict, log_probs: torch.Tensor) -> None:
        micro_batch["noted_log_probs"] = log_probs

    policy, state = run.options.policy, run.state
    loss_fn = make_policy_loss(policy, *state.coefs(run.options), run.sp_group, note_log_probs, run.roles.routers)
    return (run.change_loss(loss_fn) if run.change_loss else loss_fn), make_value_loss(policy, run.sp_group)


def update_actor(run: PPORun, loop: LoopOptions, batch, loss_fn: LossFunction, progress: Progress) -> dict:
    """Do one step of the policy. In the first `freezing_actor_steps` steps, compute only its loss."""
    strategy, average, (model, optimizer, scheduler) = run.strategy, run.roles.average, run.roles.actor
    first_step = run.options.freezing_actor_steps
    if progress.step < first_step:
        started = time.perf_counter()
        sums, count = forward_backward(strategy, model, batch, loss_fn, train=False)
        return step_row(strategy, batch, progress, mean_metrics(sums, count), count, 0.0, 0.0, started)
    inspect = None
    if progress.step == first_step:
        inspect = functools.partial(inspect_gradients, strategy, model, loop.parity_dump)
    row = train_step(strategy, model, optimizer, scheduler, batch, loss_fn, progress, inspect)
    if average and not row.get("skipped"):
        average.update()
    return row


def update_critic(strategy, critic: Optional[tuple], batch, loss_fn: LossFunction) -> dict[str, float]:
    """Do one step of the critic. Returns its metrics, or none if there is no critic."""
    if critic is None:
        return {}
    model, optimizer, scheduler = critic
    means = mean_metrics(*forward_backward(strategy, model, batch, loss_fn, train=True))
    lr = scheduler.get_last_lr()[0]
    grad_norm = strategy.optimizer_step(optimizer, model, scheduler)
    return {"value_loss": means.pop("loss"), **means, "critic_grad_norm": grad_norm, "critic_lr": lr}


# --- between rollouts


def _log_samples(run: PPORun, samples: list[Sample], metrics: Optional[MetricsLog], progress: Progress) -> None:
    if run.rollouts_log:
        first = run.rollouts_log.write(run.state.rollout, samples, run.state.link())
        if metrics:
            run.rollouts_log.show(first, metrics, progress.step)


def _evaluation(run: PPORun, log: StepLog, progress: Progress) -> dict[str, float]:
    started = time.perf_counter()
    with span("evaluate"):
        samples, facts = answers_to(run.strategy, run.roles, run.evaluation, progress.step)
        if run.answers_log:
            run.answers_log(progress.step, samples)
    values = evaluation_facts(run.evaluation, samples) | facts
    log.evaluation(values, started, digits=6)
    return values
