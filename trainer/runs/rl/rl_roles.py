"""What `train_ppo` builds from its flags: the models of its roles, the reward and the loader of a rollout's samples."""

import dataclasses
import functools
import logging
import os
import warnings
from collections.abc import Callable
from typing import Optional

from trainer.errors import UserError
from trainer.flags.rl_flags import PPOArguments
from trainer.runs import run_training
from trainer.runs.lora_flags import add_adapter_of_flags
from trainer.runs.rl.rl_options import engine_tp_size, reference_is_base, sampling_of


def stop_ids(setup: run_training.Setup) -> tuple[int, ...]:
    """The tokens that end a response: eos of the tokenizer, and eos of the generation config."""
    from transformers import GenerationConfig

    found = {setup.tokenizer.eos_token_id}
    if os.path.exists(os.path.join(setup.folder, "generation_config.json")):
        eos = GenerationConfig.from_pretrained(setup.folder).eos_token_id
        found |= set(eos) if isinstance(eos, list) else {eos}
    found.discard(None)
    if not found:
        raise UserError("--pretrain", "the tokenizer has no eos token, so no response can end")
    return tuple(sorted(found))


def count_steps(args: PPOArguments, order, frozen: Optional[list], per_prompt: Optional[int] = None) -> int:
    """Optimizer steps of the whole run: --max_steps, or those of all rollouts. An episode's last one may be shorter.

    A batch counts responses, or `per_prompt` pairs of each prompt. Raises UserError if even the largest rollout is
    smaller than an optimizer step.
    """
    size, num = args.rollout_batch_size, len(order.prompts)
    prompts = [min(size, num - start) for start in range(0, num, size)]
    each = per_prompt or args.n_samples_per_prompt
    sizes = [count * each for count in prompts] * args.num_episodes
    if frozen is not None:
        sizes = [len(samples) // args.n_samples_per_prompt * each for samples in frozen]
    if args.train_batch_size > max(sizes):
        found = f"{args.train_batch_size}, but a rollout has {max(sizes)} {'pairs' if per_prompt else 'responses'}"
        raise UserError("--train_batch_size", found, f"up to {max(sizes)}, or larger rollouts")
    return args.max_steps or args.max_epochs * sum(-(-size // args.train_batch_size) for size in sizes)


def frozen_rollouts(args: PPOArguments) -> Optional[list]:
    """The rollouts of --rollouts_from, or None. Raises UserError if they do not fit this run."""
    from trainer.rollout.rollouts_file import read_rollouts

    if not args.rollouts_from:
        return None
    frozen, size = read_rollouts(args.rollouts_from), args.n_samples_per_prompt
    if not frozen:
        raise UserError("--rollouts_from", f"{args.rollouts_from} holds no rollout", "a rollouts.jsonl of train_ppo")
    for sample in (sample for samples in frozen for sample in samples):
        if bool(sample.kept_ids) != sampling_of(args).truncates:
            found = f"{args.rollouts_from} was made {'with' if sample.kept_ids else 'without'} truncated sampling"
            raise UserError("--top_p, --top_k, --min_p", found, "the values of the run that made the rollouts")
        if args.routing_replay and sample.experts is None:
            found = f"{args.rollouts_from} was made without it"
            raise UserError("--routing_replay", found, "rollouts with it, or leave it out")
    odd = next((len(samples) for samples in frozen if len(samples) % size), None)
    if odd is not None:
        found = f"{size} with a rollout of {odd} samples in {args.rollouts_from}"
        raise UserError("--n_samples_per_prompt", found, "the value of the run that made the rollouts")
    return frozen


def make_batches_of(args: PPOArguments, setup: run_training.Setup, image_run=None) -> Callable:
    """Return `make_batches(samples, episode)`: this rank's batches of a rollout, and the samples, moved to where they train.

    It communicates (all-to-all over the world). `image_run`: prompts have images.
    """
    from trainer.datasets.batches import shared_prompts
    from trainer.datasets.images import image_batches
    from trainer.rollout.micro_batches import SampleSet, collate_samples
    from trainer.rollout.placement import move, trained_by

    max_len = args.prompt_max_len + args.generate_max_len
    capacity = args.max_tokens_per_micro_batch or args.micro_train_batch_size * max_len

    def make_batches(samples: list, episode: int, scoring_pad: Optional[int] = None) -> tuple[list, list]:
        facts = {"loss_agg": args.loss_agg, "max_len": args.generate_max_len, "mask_truncated": args.mask_truncated}
        as_set = functools.partial(SampleSet, **facts)
        options = {"pad_token_id": setup.tokenizer.pad_token_id, "scoring_pad": scoring_pad}
        images = image_run and image_run.rows_of_rollout
        options["collate"] = shared_prompts.collate_shared if args.share_prompts else images
        collate = functools.partial(collate_samples, packed=args.packing_samples, **options)
        loader = setup.strategy.setup_dataloader(
            as_set(samples),
            collate,
            batch_size=args.train_batch_size,
            micro_batch_size=args.micro_train_batch_size,
            max_tokens=args.max_tokens_per_micro_batch,
            packed_capacity=capacity if args.packing_samples else None,
            shuffle=False,
            num_workers=image_batches.WORKERS if image_run else 1,
        )
        loader.load_state_dict({"epoch": episode, "next_index": 0})
        if args.share_prompts:
            loader.sizes_to_plan = shared_prompts.sizes_to_plan(samples)
        samples = move(samples, trained_by(setup.strategy.meshes, loader))
        loader.dataset = as_set(samples)
        return list(loader), samples

    return make_batches


def build_roles(
    args: PPOArguments,
    setup: run_training.Setup,
    output_dir: str,
    total_steps: int,
    make_batches: Callable,
    functions: dict[str, Callable],
    image_run=None,
):
    """Load and shard all models one after the other, so that only one model is ever whole."""
    from transformers import AutoModelForCausalLM

    from trainer.datasets.batches import shared_prompts
    from trainer.methods.ppo_state import Roles
    from trainer.training.ema import WeightAverage

    auto_class = image_run.auto_class if image_run else AutoModelForCausalLM
    model = run_training.load_model(args, setup, setup.folder, auto_class)
    _check_length(args, model.config)
    if args.share_prompts:
        shared_prompts.refuse_model(model)
    if image_run:
        image_run.use(model)
    if args.lora_rank:
        add_adapter_of_flags(args, setup.strategy, model)
    tower_lr, config = args.vision_learning_rate, model.config
    actor = tuple(run_training.prepare_training(args, setup.strategy, model, total_steps, tower_lr))
    return Roles(
        actor=actor,
        routers=_routers(actor[0], config) if args.routing_replay else None,
        average=WeightAverage(setup.strategy, *actor[:2], args.ema_beta) if args.ema_beta is not None else None,
        score=build_reward(args, setup, make_batches, functions),
        engine=_engine(args, setup, image_run) if args.eval_dataset or not args.rollouts_from else None,
        environment=_environments(args, setup) if args.env else None,
        critic=_critic(args, setup, output_dir, total_steps) if args.advantage_estimator == "gae" else None,
        has_reference=bool(args.init_kl_coef),
        reference=_reference(args, setup, image_run) if args.init_kl_coef and not reference_is_base(args) else None,
        offload_actor_optimizer=args.offload_actor_optimizer,
        offload_critic=args.offload_critic,
    )


def _routers(actor, config):
    from trainer.models.layers.routing_replay import Routers

    return Routers(actor, config)


def _check_length(args: PPOArguments, config) -> None:
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    longest = args.prompt_max_len + args.generate_max_len
    if limit and longest > limit:
        found = f"{args.prompt_max_len} + {args.generate_max_len} tokens, more than the model's {limit} positions"
        raise UserError("--prompt_max_len + --generate_max_len", found, f"up to {limit} together")


def _engine(args: PPOArguments, setup: run_training.Setup, image_run=None):
    options = {
        "dtype": setup.strategy.param_dtype,
        "device": setup.strategy.device,
        "batch_size": args.micro_rollout_batch_size,
        "trust_remote_code": args.trust_remote_code,
    }
    if args.rollout_engine == "vllm":
        return _vllm_engine(args, setup, options, image_run)
    if args.rollout_engine == "vllm_server":
        from trainer.distributed.collectives import wait_for_all
        from trainer.rollout.engines.vllm_server import VLLMServerEngine

        options.pop("trust_remote_code")  # a flag of serve_engine
        urls = [url.strip() for url in args.engine_urls.split(",")]
        options |= {"max_len": args.prompt_max_len + args.generate_max_len, "own_server_only": bool(args.max_staleness)}
        engine = VLLMServerEngine(urls, **options)
        wait_for_all()  # a server that waits for weights of a quick rank would not answer a slow one
        return engine
    from trainer.rollout.engines.decoding import UncachedRows
    from trainer.rollout.engines.hf import HFEngine

    options |= {"record_experts": args.routing_replay, "compiled": args.compile and not args.max_staleness}
    if image_run:
        options |= {"auto_class": image_run.auto_class, "read_images": image_run.read_prompts}
    engine = HFEngine(setup.folder, setup.tokenizer, **options)
    if engine.kind_of_rows is UncachedRows:
        name = type(engine.model).__name__
        if args.routing_replay:
            raise UserError("--routing_replay", f"no cache for {name}", "leave it out, or another model")
        if image_run:
            raise UserError("--pretrain", f"prompts with images, and no cache for {name}", "another model")
        setup.strategy.print(f"rollout engine: no cache for {name}, so each token reads the whole text again")
    return engine


def rollouts_ahead(args: PPOArguments, roles, total_steps: int, sampling):
    """The thread of --max_staleness, or None."""
    if not args.max_staleness:
        return None
    from trainer.rollout.asynchronous import Pace, RolloutsAhead
    from trainer.rollout.scoring import TextScores

    def steps_of(num_samples: int) -> int:
        return args.max_epochs * -(-num_samples // args.train_batch_size)

    pace = Pace(args.max_staleness, total_steps, steps_of, args.micro_rollout_batch_size, partial=args.partial_rollouts)
    score_mine = roles.score.score_mine if isinstance(roles.score, TextScores) else None
    options = {"seed": args.seed, "group_size": args.n_samples_per_prompt}
    if roles.environment is not None:
        from trainer.rollout.envs.episodes import continue_episodes

        options["generate"] = functools.partial(continue_episodes, roles.environment)
    return RolloutsAhead(roles.engine, score_mine, pace, sampling, **options)


def _environments(args: PPOArguments, setup: run_training.Setup):
    from trainer.datasets.conversations.templates import chat_template
    from trainer.rollout.envs.environments import SPARE_SECONDS, Caller, load_environment
    from trainer.rollout.envs.episodes import Environments

    chat_template(setup.tokenizer)  # raises if there is none
    where = f"--env {args.env}"
    timeout, make = args.env_timeout, load_environment(args.env)
    if args.env_sandbox:
        from trainer.rollout.envs.env_process import ProcessEnvironment

        make = functools.partial(ProcessEnvironment, args.env, args.env_memory_mb, timeout)
        timeout += SPARE_SECONDS  # a process that hangs is lost before its call is late
    call = Caller(where, timeout, args.env_concurrency)
    return Environments(make, call, where, setup.tokenizer, args.env_max_turns, args.prompt_max_len)


def _vllm_engine(args: PPOArguments, setup: run_training.Setup, options: dict, image_run=None):
    import torch

    share, num_ranks = args.vllm_gpu_memory_utilization, int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if setup.strategy.device.type == "cuda" and num_ranks > torch.cuda.device_count():
        found = f"vllm with {num_ranks} ranks on {torch.cuda.device_count()} GPUs"
        raise UserError("--rollout_engine", found, "hf, or a GPU for each rank")
    if share is not None and setup.strategy.device.type != "cuda":
        found = f"{share:g} on the CPU: the cache there has room for --micro_rollout_batch_size responses"
        raise UserError("--vllm_gpu_memory_utilization", found, "leave it out")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine runs in this process
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("vllm").setLevel(logging.ERROR)  # it already logs while it is imported
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
    os.environ.setdefault("RANK", "0")  # vLLM reads it even if torchrun did not start the process
    from trainer.rollout.engines.vllm import VLLMEngine

    if share is not None:
        options["gpu_memory_utilization"] = share
    if image_run:
        options |= {"images_of": image_run.tensors_of_prompt, "processor": image_run.collate.processor}
    max_len = args.prompt_max_len + args.generate_max_len
    return VLLMEngine(setup.folder, **options, max_len=max_len, tp_size=engine_tp_size(args))


def _reference(args: PPOArguments, setup: run_training.Setup, image_run=None):
    from transformers import AutoModelForCausalLM

    from trainer.datasets.batches import shared_prompts
    from trainer.distributed.collectives import rank_0_first
    from trainer.models.model_loading import load_tokenizer, resolve_model_folder

    folder, flag = setup.folder, "--pretrain"
    if args.ref_model:
        flag = "--teacher" if args.teacher else "--ref_model"
        folder = rank_0_first(lambda: resolve_model_folder(args.ref_model, flag))
    if args.teacher and load_tokenizer(folder, args.trust_remote_code).get_vocab() != setup.tokenizer.get_vocab():
        raise UserError(
            "--teacher", f"{args.teacher} has another vocabulary than --pretrain", "a model with the same one"
        )
    auto_class = image_run.auto_class if image_run else AutoModelForCausalLM
    reference = run_training.load_model(args, setup, folder, auto_class, flag, trained=False)
    if args.share_prompts:
        shared_prompts.refuse_model(reference)
    if image_run:
        image_run.fit(reference)
    return setup.strategy.prepare(reference.eval().requires_grad_(False), offload=args.offload_ref)


def _critic(args: PPOArguments, setup: run_training.Setup, output_dir: str, total_steps: int) -> tuple:
    """Build the critic, which scores tokens, from --critic_pretrain: with its head if it has one, else a new head."""
    from transformers import AutoModelForSequenceClassification

    from trainer.distributed.collectives import rank_0_alone, rank_0_first
    from trainer.models.model_loading import resolve_model_folder
    from trainer.models.reward import make_initial_reward_model, return_token_scores

    strategy, source, initial = setup.strategy, setup.folder, os.path.join(output_dir, "initial_critic")
    flag = "--critic_pretrain" if args.critic_pretrain else "--pretrain"
    if args.critic_pretrain:
        source = rank_0_first(lambda: resolve_model_folder(args.critic_pretrain, flag))
    rank_0_alone(lambda: make_initial_reward_model(source, initial, args.seed, args.trust_remote_code, flag=flag))
    model = run_training.load_model(args, setup, initial, AutoModelForSequenceClassification, flag)
    if args.lora_rank:
        add_adapter_of_flags(args, strategy, model)
    return_token_scores(model)
    flags = dataclasses.replace(args, learning_rate=args.critic_learning_rate)
    return tuple(run_training.prepare_training(flags, strategy, model, total_steps))


# --- rewards


def build_reward(
    args: PPOArguments, setup: run_training.Setup, make_batches: Callable, functions: dict[str, Callable]
) -> Callable:
    """Return `score(samples)`, which sets the score of every sample on every rank (collective)."""
    from trainer.rollout.rewards.remote_rewards import read_key, remote_scorer
    from trainer.rollout.rewards.reward_functions import function_scorer, short_name, weighted_scorer
    from trainer.rollout.scoring import TextScores

    if args.reward_pretrain:
        return _reward_models(args, setup, make_batches)
    if args.remote_rm_url:
        key = read_key("--remote_rm_api_key", args.remote_rm_api_key) if args.remote_rm_api_key else None
        scorer = remote_scorer(args.remote_rm_url, args.remote_rm_timeout, args.remote_rm_retries, key)
    elif functions:
        scorers = {short_name(name): function_scorer(name, f, args.reward_timeout) for name, f in functions.items()}
        [scorer, *others] = scorers.values()
        if others or args.reward_weights:
            scorer = weighted_scorer(scorers, args.reward_weights or [1.0] * len(scorers))
    elif args.teacher and not args.env:
        return _score_nothing
    else:  # scores come from --env; or from --rollouts_from, and nothing is evaluated
        return lambda samples: None
    return TextScores(scorer, setup.tokenizer, stop_ids(setup))


def _score_nothing(samples: list) -> None:
    for sample in samples:
        sample.score = 0.0


def _reward_models(args: PPOArguments, setup: run_training.Setup, make_batches: Callable) -> Callable:
    """Return `score(samples)` with the weighted scores of frozen reward models. They read the policy's tokens."""
    from transformers import AutoModelForSequenceClassification

    from trainer.datasets.samples.prompts import as_conversation, chat_ends
    from trainer.distributed.collectives import rank_0_first
    from trainer.methods.roles import reward_scores
    from trainer.models.model_loading import load_tokenizer, resolve_model_folder
    from trainer.models.reward import return_token_scores, scoring_pad
    from trainer.rollout.placement import share
    from trainer.rollout.rewards.reward_functions import check_scores

    models = []
    for name in args.reward_pretrain.split(","):
        folder = rank_0_first(lambda name=name: resolve_model_folder(name.strip(), "--reward_pretrain"))
        tokenizer = load_tokenizer(folder, args.trust_remote_code)
        if tokenizer.get_vocab() != setup.tokenizer.get_vocab():
            found = f"{name} has another vocabulary than --pretrain, so it cannot read the policy's tokens"
            raise UserError(
                "--reward_pretrain", found, "serve it with python -m trainer.cli.serve_rm, and use --remote_rm_url"
            )
        model = run_training.load_model(
            args, setup, folder, AutoModelForSequenceClassification, "--reward_pretrain", trained=False
        )
        if model.config.num_labels != 1:
            raise UserError("--reward_pretrain", f"{name} has {model.config.num_labels} labels", "1")
        pad = scoring_pad(model, tokenizer)  # it may differ from the policy's pad token
        return_token_scores(model)
        model = setup.strategy.prepare(model.eval().requires_grad_(False), offload=args.offload_reward)
        models.append((f"--reward_pretrain {name.strip()}", pad, model))
    weights = args.reward_weights or [1.0] * len(models)

    ends, eos = chat_ends(setup.tokenizer), setup.tokenizer.eos_token_id

    def score(samples: list) -> None:
        here = [s for s in samples if s.held.here]
        read = share([s.with_response(as_conversation(s.prompt_ids, s.response_ids, ends, eos)) for s in here])
        parts = []
        for where, pad, model in models:
            batches, _ = make_batches(read, 0, pad)
            found = reward_scores(setup.strategy, model, batches, len(samples), setup.sp_group)
            parts.append(check_scores(where, found.tolist(), len(samples))[0])  # the same scores on every rank
        totals = [sum(weight * value for weight, value in zip(weights, values)) for values in zip(*parts)]
        totals, _ = check_scores("--reward_weights", totals, len(samples))
        for sample, total in zip(samples, totals):
            sample.score = total

    return score
