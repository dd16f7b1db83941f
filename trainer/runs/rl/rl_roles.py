"""The roles of a run of RL: policy, reference and critic, and the batches of a rollout."""

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Optional

from transformers import AutoModelForSequenceClassification

from trainer.distributed.collectives import rank_0_alone, rank_0_first
from trainer.flags.data_rules import has_evaluation
from trainer.flags.rl_flags import PPOArguments
from trainer.methods.ppo_state import Roles
from trainer.models.model_loading import resolve_adapted_model
from trainer.models.reward import make_initial_reward_model, return_token_scores
from trainer.rollout.micro_batches import SampleSet, collate_samples
from trainer.rollout.placement import move, trained_by
from trainer.runs.feature import apply
from trainer.runs.features.adapter import add_adapter_of_flags
from trainer.runs.flag_checks import refuse_length
from trainer.runs.rl.rl_engines import build_engine
from trainer.runs.rl.rl_features import RL_FEATURES
from trainer.runs.rl.rl_options import reference_is_base
from trainer.runs.rl.rl_parts import RLRun
from trainer.runs.rl.rl_rewards import build_reward
from trainer.runs.run_data import build_loader
from trainer.runs.run_models import frozen_model, load_model, shard_model


def make_batches_of(run: RLRun) -> Callable:
    """Return `make_batches(samples, episode)`: this rank's batches of a rollout, and the samples, moved to where they train.

    It communicates (all-to-all over the world).
    """
    args, setup, packed = run.args, run.setup, run.args.batch.packing_samples
    facts = {"loss_agg": args.advantage.loss_agg, "mask_truncated": args.advantage.mask_truncated}
    facts["group_size"] = args.rollout.n_samples_per_prompt
    leaves_out = args.advantage.advantage_estimator == "scalerl"
    as_set = functools.partial(SampleSet, max_len=args.rollout.generate_max_len, **facts)

    def make_batches(samples: list, episode: int, scoring_pad: Optional[int] = None) -> tuple[list, list]:
        options = {"packed": packed, "scoring_pad": scoring_pad, "collate": run.collate_rollout}
        collate = functools.partial(collate_samples, **options)
        counted = {"only_differing": leaves_out and scoring_pad is None}  # before they are scored, all count
        loader = build_loader(
            args.batch, setup, as_set(samples, **counted), collate, shuffle=False, **run.loader_options
        )
        loader.load_state_dict({"epoch": episode, "next_index": 0})
        if run.sizes_to_plan:
            loader.sizes_to_plan = run.sizes_to_plan(samples)
        samples = move(samples, trained_by(setup.strategy.meshes, loader))
        loader.dataset = as_set(samples, **counted)
        return list(loader), samples

    return make_batches


def build_roles(run: RLRun) -> Roles:
    """Load and shard all models one after the other, so that only one model is ever whole."""
    args, setup = run.args, run.setup
    run.model = run.load(setup.folder, adapter=run.merged_adapter)
    check_length(args, run.model.config)
    apply(RL_FEATURES, run, "with_model")
    groups, tower_lr = (args.model, args.optimizer, args.layout), args.vision.vision_learning_rate
    actor = tuple(shard_model(*groups, setup, run.model, run.total_steps, tower_lr))
    generates = has_evaluation(args.data) or not args.rollout.rollouts_from
    return Roles(
        actor=actor,
        score=build_reward(run, make_batches_of(run)),
        max_failed_share=args.scores.max_failed_share,
        engine=build_engine(run) if generates else None,
        critic=build_critic(run) if args.advantage.advantage_estimator == "gae" else None,
        references=build_references(run) if args.kl.init_kl_coef else (),
        offload_actor_optimizer=args.rollout.offload_actor_optimizer,
        offload_critic=args.critic.offload_critic,
    )


def check_length(args: PPOArguments, config) -> None:
    """Raise UserError for texts that are longer than the model's positions."""
    refuse_length(args, getattr(config.get_text_config(), "max_position_embeddings", None))


def build_references(run: RLRun) -> tuple:
    """The reference model or the teachers, frozen and sharded like the policy. None is the policy with its adapter off."""
    flags = run.args.kl
    if reference_is_base(run.args):
        return (None,)
    flag = "--teacher" if flags.teacher else "--ref_model" if flags.ref_model else "--pretrain"
    return tuple(
        frozen_model(run.setup, run.load(folder, flag, False, adapter), flags.offload_ref)
        for folder, adapter in run.references
    )


def build_critic(run: RLRun) -> tuple:
    """The critic, which scores tokens, from --critic_pretrain: with its head if it has one, else a new head."""
    args, setup, source, flag = run.args, run.setup, run.setup.folder, "--pretrain"
    adapter = args.lora.lora_adapter  # the critic begins as the policy does
    if args.critic.critic_pretrain:
        flag = "--critic_pretrain"
        source, adapter = rank_0_first(lambda: resolve_adapted_model(args.critic.critic_pretrain, flag))
    initial, options = os.path.join(run.output_dir, "initial_critic"), (args.batch.seed, args.model.trust_remote_code)
    rank_0_alone(lambda: make_initial_reward_model(source, initial, *options, flag=flag))
    model = load_model(args.model, setup, initial, AutoModelForSequenceClassification, flag, adapter=adapter)
    if args.lora.lora_rank:
        add_adapter_of_flags(args.lora, setup.strategy, model, args.model.pretrain)
    return_token_scores(model)
    optimizer = dataclasses.replace(args.optimizer, learning_rate=args.critic.critic_learning_rate)
    return tuple(shard_model(args.model, optimizer, args.layout, setup, model, run.total_steps))
