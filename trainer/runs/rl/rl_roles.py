"""The roles of a run of RL: policy, reference and critic, and the batches of a rollout."""

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Optional

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification

from trainer.datasets.batches import shared_prompts
from trainer.datasets.images import image_batches
from trainer.distributed.collectives import rank_0_alone, rank_0_first
from trainer.errors import UserError
from trainer.flags.rl_flags import PPOArguments
from trainer.methods.ppo_state import Roles
from trainer.models.layers.routing_replay import Routers
from trainer.models.model_loading import load_tokenizer, resolve_model_folder
from trainer.models.reward import make_initial_reward_model, return_token_scores
from trainer.rollout.micro_batches import SampleSet, collate_samples
from trainer.rollout.placement import move, trained_by
from trainer.rollout.rollouts_file import read_rollouts
from trainer.runs.image_runs import freeze_parts
from trainer.runs.rl.rl_engines import build_engine, build_environments
from trainer.runs.rl.rl_options import reference_is_base, sampling_of
from trainer.runs.rl.rl_rewards import build_reward
from trainer.runs.run_models import add_adapter_of_flags, frozen_model, load_model, shard_model
from trainer.runs.run_setup import Setup
from trainer.training.ema import WeightAverage


def count_steps(args: PPOArguments, order, frozen: Optional[list], per_prompt: Optional[int] = None) -> int:
    """Optimizer steps of the whole run: --max_steps, or those of all rollouts. An episode's last one may be shorter.

    A batch counts responses, or `per_prompt` pairs of each prompt. Raises UserError if even the largest rollout is
    smaller than an optimizer step.
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
    return args.batch.max_steps or args.batch.max_epochs * sum(
        -(-size // args.batch.train_batch_size) for size in sizes
    )


def frozen_rollouts(args: PPOArguments) -> Optional[list]:
    """The rollouts of --rollouts_from, or None. Raises UserError if they do not fit this run."""
    if not args.rollout.rollouts_from:
        return None
    frozen, size = read_rollouts(args.rollout.rollouts_from), args.rollout.n_samples_per_prompt
    if not frozen:
        raise UserError(
            "--rollouts_from", f"{args.rollout.rollouts_from} holds no rollout", "a rollouts.jsonl of train_ppo"
        )
    for sample in (sample for samples in frozen for sample in samples):
        if bool(sample.kept_ids) != sampling_of(args).truncates:
            found = (
                f"{args.rollout.rollouts_from} was made {'with' if sample.kept_ids else 'without'} truncated sampling"
            )
            raise UserError("--top_p, --top_k, --min_p", found, "the values of the run that made the rollouts")
        if args.rollout.routing_replay and sample.experts is None:
            found = f"{args.rollout.rollouts_from} was made without it"
            raise UserError("--routing_replay", found, "rollouts with it, or leave it out")
    odd = next((len(samples) for samples in frozen if len(samples) % size), None)
    if odd is not None:
        found = f"{size} with a rollout of {odd} samples in {args.rollout.rollouts_from}"
        raise UserError("--n_samples_per_prompt", found, "the value of the run that made the rollouts")
    return frozen


def make_batches_of(args: PPOArguments, setup: Setup, image_run=None) -> Callable:
    """Return `make_batches(samples, episode)`: this rank's batches of a rollout, and the samples, moved to where they train.

    It communicates (all-to-all over the world). `image_run`: prompts have images.
    """
    max_len = args.prompts.prompt_max_len + args.rollout.generate_max_len
    capacity = args.batch.max_tokens_per_micro_batch or args.batch.micro_train_batch_size * max_len

    def make_batches(samples: list, episode: int, scoring_pad: Optional[int] = None) -> tuple[list, list]:
        facts = {
            "loss_agg": args.advantage.loss_agg,
            "max_len": args.rollout.generate_max_len,
            "mask_truncated": args.advantage.mask_truncated,
        }
        as_set = functools.partial(SampleSet, **facts)
        options = {"pad_token_id": setup.tokenizer.pad_token_id, "scoring_pad": scoring_pad}
        images = image_run and image_run.rows_of_rollout
        options["collate"] = shared_prompts.collate_shared if args.rollout.share_prompts else images
        collate = functools.partial(collate_samples, packed=args.batch.packing_samples, **options)
        loader = setup.strategy.setup_dataloader(
            as_set(samples),
            collate,
            batch_size=args.batch.train_batch_size,
            micro_batch_size=args.batch.micro_train_batch_size,
            max_tokens=args.batch.max_tokens_per_micro_batch,
            packed_capacity=capacity if args.batch.packing_samples else None,
            shuffle=False,
            num_workers=image_batches.WORKERS if image_run else 1,
        )
        loader.load_state_dict({"epoch": episode, "next_index": 0})
        if args.rollout.share_prompts:
            loader.sizes_to_plan = shared_prompts.sizes_to_plan(samples)
        samples = move(samples, trained_by(setup.strategy.meshes, loader))
        loader.dataset = as_set(samples)
        return list(loader), samples

    return make_batches


def build_roles(
    args: PPOArguments,
    setup: Setup,
    output_dir: str,
    total_steps: int,
    make_batches: Callable,
    functions: dict[str, Callable],
    image_run=None,
):
    """Load and shard all models one after the other, so that only one model is ever whole."""

    auto_class = AutoModelForImageTextToText if image_run else AutoModelForCausalLM
    model = load_model(args.model, setup, setup.folder, auto_class)
    _check_length(args, model.config)
    if args.rollout.share_prompts:
        shared_prompts.refuse_model(model)
    if image_run:
        image_run.fit(model)
        freeze_parts(setup.strategy, model, bool(args.lora.lora_rank), args.vision.freeze_vision)
    if args.lora.lora_rank:
        add_adapter_of_flags(args.lora, setup.strategy, model, args.model.pretrain)
    tower_lr, config = args.vision.vision_learning_rate, model.config
    actor = tuple(shard_model(args.model, args.optimizer, args.layout, setup, model, total_steps, tower_lr))
    return Roles(
        actor=actor,
        routers=Routers(actor[0], config) if args.rollout.routing_replay else None,
        average=WeightAverage(setup.strategy, *actor[:2], args.advantage.ema_beta)
        if args.advantage.ema_beta is not None
        else None,
        score=build_reward(args, setup, make_batches, functions),
        engine=build_engine(args, setup, image_run)
        if args.data.eval_dataset or not args.rollout.rollouts_from
        else None,
        environment=build_environments(args, setup) if args.environment.env else None,
        critic=_critic(args, setup, output_dir, total_steps) if args.advantage.advantage_estimator == "gae" else None,
        has_reference=bool(args.kl.init_kl_coef),
        reference=_reference(args, setup, image_run) if args.kl.init_kl_coef and not reference_is_base(args) else None,
        offload_actor_optimizer=args.rollout.offload_actor_optimizer,
        offload_critic=args.critic.offload_critic,
    )


def _check_length(args: PPOArguments, config) -> None:
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    longest = args.prompts.prompt_max_len + args.rollout.generate_max_len
    if limit and longest > limit:
        found = f"{args.prompts.prompt_max_len} + {args.rollout.generate_max_len} tokens, more than the model's {limit} positions"
        raise UserError("--prompt_max_len + --generate_max_len", found, f"up to {limit} together")


def _reference(args: PPOArguments, setup: Setup, image_run=None):

    folder, flag = setup.folder, "--pretrain"
    if args.kl.ref_model:
        flag = "--teacher" if args.kl.teacher else "--ref_model"
        folder = rank_0_first(lambda: resolve_model_folder(args.kl.ref_model, flag))
    if (
        args.kl.teacher
        and load_tokenizer(folder, args.model.trust_remote_code).get_vocab() != setup.tokenizer.get_vocab()
    ):
        raise UserError(
            "--teacher", f"{args.kl.teacher} has another vocabulary than --pretrain", "a model with the same one"
        )
    auto_class = AutoModelForImageTextToText if image_run else AutoModelForCausalLM
    reference = load_model(args.model, setup, folder, auto_class, flag, trained=False)
    if args.rollout.share_prompts:
        shared_prompts.refuse_model(reference)
    if image_run:
        image_run.fit(reference)
    return frozen_model(setup, reference, args.kl.offload_ref)


def _critic(args: PPOArguments, setup: Setup, output_dir: str, total_steps: int) -> tuple:
    """Build the critic, which scores tokens, from --critic_pretrain: with its head if it has one, else a new head."""

    strategy, source, initial = setup.strategy, setup.folder, os.path.join(output_dir, "initial_critic")
    flag = "--critic_pretrain" if args.critic.critic_pretrain else "--pretrain"
    if args.critic.critic_pretrain:
        source = rank_0_first(lambda: resolve_model_folder(args.critic.critic_pretrain, flag))
    rank_0_alone(
        lambda: make_initial_reward_model(source, initial, args.batch.seed, args.model.trust_remote_code, flag=flag)
    )
    model = load_model(args.model, setup, initial, AutoModelForSequenceClassification, flag)
    if args.lora.lora_rank:
        add_adapter_of_flags(args.lora, strategy, model, args.model.pretrain)
    return_token_scores(model)
    optimizer = dataclasses.replace(args.optimizer, learning_rate=args.critic.critic_learning_rate)
    return tuple(shard_model(args.model, optimizer, args.layout, setup, model, total_steps))
