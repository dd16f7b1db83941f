"""Who scores in a run of RL: reward functions, reward models, servers, environments."""

import os
from collections.abc import Callable

import torch.distributed as dist
from transformers import AutoModelForSequenceClassification

from trainer.comma_separated import names_in
from trainer.datasets.conversations.turn_ends import as_trained, scored_ends, stop_ids
from trainer.distributed.collectives import rank_0_alone, rank_0_first
from trainer.errors import UserError
from trainer.flags.rl_flags import PPOArguments
from trainer.methods.roles import reward_scores
from trainer.metrics import counted
from trainer.models.model_loading import load_tokenizer, resolve_adapted_model
from trainer.models.reward import check_head, lacks_head, make_initial_reward_model, return_token_scores, scoring_pad
from trainer.rollout.placement import share
from trainer.rollout.rewards.judge import FOLDER as CACHE
from trainer.rollout.rewards.judge import Judge, facts_of_judge
from trainer.rollout.rewards.remote_rewards import read_key, remote_scorer
from trainer.rollout.rewards.reward_functions import (
    check_scores,
    function_scorer,
    short_name,
    wanted_facts,
    weighted_scorer,
)
from trainer.rollout.scoring import TextScores
from trainer.runs.flag_checks import refuse_length
from trainer.runs.rl.rl_checks import judge_options
from trainer.runs.run_models import frozen_model, load_model
from trainer.runs.run_setup import Setup, check_vocabulary, tokenizer_folder


def build_reward(run, make_batches: Callable) -> Callable:
    """Return `score(samples, group_size)`, which sets the score of every sample on every rank (collective)."""
    args, setup, functions = run.args, run.setup, run.functions
    adds = bool(args.environment.env)  # to its scores; then a function may pass, and the log needs its name
    if args.scores.reward_pretrain:
        return _reward_models(args, setup, run.output_dir, make_batches)
    if args.scores.remote_rm_url:
        key = read_key("--remote_rm_api_key", args.scores.remote_rm_api_key) if args.scores.remote_rm_api_key else None
        scorer = remote_scorer(
            args.scores.remote_rm_url, args.scores.remote_rm_timeout, args.scores.remote_rm_retries, key
        )
    elif names := names_in(args.scores.reward_func):
        options = {"timeout": args.scores.reward_timeout, "alone": len(names) == 1 and not adds}
        scorers = {
            short_name(name): function_scorer(name, functions[name], **options)
            if name in functions
            else Judge(judge_options(args.scores), os.path.join(run.output_dir, CACHE), dist.get_rank())
            for name in names
        }
        [scorer, *others] = scorers.values()
        if others or args.scores.reward_weights or not functions or adds:
            scorer = weighted_scorer(scorers, args.scores.reward_weights or [1.0] * len(scorers), may_pass=adds)
    elif args.kl.teacher and not adds:
        return _score_nothing
    else:  # scores come from --env; or from --rollouts_from, and nothing is evaluated
        return lambda samples, group_size: None
    facts = wanted_facts(functions) | facts_of_judge(args.scores.reward_func, args.scores.judge_mode)
    ends = stop_ids(setup.tokenizer, setup.folder)
    return TextScores(scorer, setup.tokenizer, ends, facts, adds)


def _score_nothing(samples: list, _group_size: int) -> None:
    for sample in samples:
        sample.score = 0.0


def check_reward_models(run) -> None:
    """Raise UserError for a --reward_pretrain without a score head, before prompts are read. An adapter is looked at later."""
    for name in names_in(run.args.scores.reward_pretrain):
        folder, adapter = rank_0_first(lambda name=name: resolve_adapted_model(name, "--reward_pretrain"))
        if not adapter:
            check_head(folder, "--reward_pretrain")


def _with_head(base: str, adapter: str, folder: str, args: PPOArguments) -> str:
    """The folder of the classifier that a reward adapter changes: `base`, or the new `folder` with a head (rank 0)."""
    if not lacks_head(base, adapter, "--reward_pretrain"):
        return base
    options = {"trust_remote_code": args.model.trust_remote_code, "flag": "--reward_pretrain"}
    rank_0_alone(lambda: make_initial_reward_model(base, folder, args.batch.seed, **options))
    return folder


def _reward_models(args: PPOArguments, setup: Setup, output_dir: str, make_batches: Callable) -> Callable:
    """Return `score(samples, group_size)` with the weighted scores of frozen reward models. They read the policy's tokens.

    Of an adapter, the model is its base with the update and the head added.
    """

    models, remote_code = [], args.model.trust_remote_code
    for number, name in enumerate(names_in(args.scores.reward_pretrain)):
        folder, adapter = rank_0_first(lambda name=name: resolve_adapted_model(name, "--reward_pretrain"))
        if adapter:
            folder = _with_head(folder, adapter, os.path.join(output_dir, f"initial_reward_{number}"), args)
        check_head(folder, "--reward_pretrain")
        place = tokenizer_folder(folder, adapter)
        tokenizer = load_tokenizer(place, remote_code)
        cure = (
            "It cannot read the policy's tokens: serve it with python -m trainer.cli.serve_rm, and use --remote_rm_url."
        )
        check_vocabulary(setup, name, place, "--reward_pretrain", instead=cure, tokenizer=tokenizer)
        model = load_model(
            args.model, setup, folder, AutoModelForSequenceClassification, "--reward_pretrain", False, adapter
        )
        if model.config.num_labels != 1:
            raise UserError("--reward_pretrain", f"{name} has {counted(model.config.num_labels, 'label')}", "1")
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        refuse_length(args, positions, f"--reward_pretrain {name.strip()}")
        pad = scoring_pad(model, tokenizer)  # it may differ from the policy's pad token
        return_token_scores(model)
        model = frozen_model(setup, model, args.scores.offload_reward)
        ends = scored_ends(tokenizer if tokenizer.chat_template else setup.tokenizer)
        models.append((f"--reward_pretrain {name.strip()}", pad, model, ends, tokenizer.eos_token_id))
    weights = args.scores.reward_weights or [1.0] * len(models)

    stops = stop_ids(setup.tokenizer, setup.folder)

    def score(samples: list, _group_size: int) -> None:
        here = [s for s in samples if s.held.here]
        parts = []
        for where, pad, model, ends, eos in models:
            read = [s.with_response(as_trained(s.prompt_ids, s.response_ids, ends, stops, eos)) for s in here]
            read = share(read)
            batches, _ = make_batches(read, 0, pad)
            found = reward_scores(setup.strategy, model, batches, len(samples), setup.sp_group)
            parts.append(check_scores(where, found.tolist(), len(samples))[0])  # the same scores on every rank
        totals = [sum(weight * value for weight, value in zip(weights, values)) for values in zip(*parts)]
        totals, _ = check_scores("--reward_weights", totals, len(samples))
        for sample, total in zip(samples, totals):
            sample.score = total

    return score
