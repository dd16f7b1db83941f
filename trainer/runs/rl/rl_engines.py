"""Who generates in a run of RL: the engine, the thread of --max_staleness, the environments."""

import functools
import logging
import os
import warnings

import torch
from transformers import AutoModelForImageTextToText

from trainer.datasets.conversations.templates import chat_template
from trainer.errors import UserError
from trainer.flags.rl_flags import PPOArguments
from trainer.rollout.asynchronous import Pace, RolloutsAhead
from trainer.rollout.engines.decoding import UncachedRows
from trainer.rollout.engines.hf import HFEngine
from trainer.rollout.envs.environments import SPARE_SECONDS, Caller, load_environment
from trainer.rollout.envs.episodes import Environments
from trainer.rollout.scoring import TextScores
from trainer.runs.rl.rl_options import engine_tp_size
from trainer.runs.run_setup import Setup


def build_engine(args: PPOArguments, setup: Setup, image_run=None):
    options = {
        "dtype": setup.strategy.param_dtype,
        "device": setup.strategy.device,
        "batch_size": args.rollout.micro_rollout_batch_size,
        "trust_remote_code": args.model.trust_remote_code,
    }
    if args.rollout.rollout_engine == "vllm":
        return _vllm_engine(args, setup, options, image_run)
    if args.rollout.rollout_engine == "vllm_server":
        from trainer.distributed.collectives import wait_for_all
        from trainer.rollout.engines.vllm_server import VLLMServerEngine

        options.pop("trust_remote_code")  # a flag of serve_engine
        urls = [url.strip() for url in args.rollout.engine_urls.split(",")]
        options |= {
            "max_len": args.prompts.prompt_max_len + args.rollout.generate_max_len,
            "own_server_only": bool(args.rollout.max_staleness),
        }
        engine = VLLMServerEngine(urls, **options)
        wait_for_all()  # a server that waits for weights of a quick rank would not answer a slow one
        return engine

    options |= {
        "record_experts": args.rollout.routing_replay,
        "compiled": args.model.compile and not args.rollout.max_staleness,
    }
    if image_run:
        options |= {"auto_class": AutoModelForImageTextToText, "read_images": image_run.read_prompts}
    engine = HFEngine(setup.folder, setup.tokenizer, **options)
    if engine.kind_of_rows is UncachedRows:
        name = type(engine.model).__name__
        if args.rollout.routing_replay:
            raise UserError("--routing_replay", f"no cache for {name}", "leave it out, or another model")
        if image_run:
            raise UserError("--pretrain", f"prompts with images, and no cache for {name}", "another model")
        setup.strategy.print(f"rollout engine: no cache for {name}, so each token reads the whole text again")
    return engine


def _vllm_engine(args: PPOArguments, setup: Setup, options: dict, image_run=None):
    share, num_ranks = args.rollout.vllm_gpu_memory_utilization, int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if setup.strategy.device.type == "cuda" and num_ranks > torch.cuda.device_count():
        found = f"vllm with {num_ranks} ranks on {torch.cuda.device_count()} GPUs"
        raise UserError("--rollout_engine", found, "hf, or a GPU for each rank")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine runs in this process
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("vllm").setLevel(logging.ERROR)  # it already logs while it is imported
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
    os.environ.setdefault("RANK", "0")  # vLLM reads it even if torchrun did not start the process
    # vLLM is an extra, and reads the variables above when it is imported
    from trainer.rollout.engines.vllm import VLLMEngine

    if share is not None:
        options["gpu_memory_utilization"] = share
    if image_run:
        options |= {"images_of": image_run.tensors_of_prompt, "processor": image_run.collate.processor}
    max_len = args.prompts.prompt_max_len + args.rollout.generate_max_len
    return VLLMEngine(setup.folder, **options, max_len=max_len, tp_size=engine_tp_size(args))


def rollouts_ahead(args: PPOArguments, roles, total_steps: int, sampling):
    """The thread of --max_staleness, or None."""
    if not args.rollout.max_staleness:
        return None

    def steps_of(num_samples: int) -> int:
        return args.batch.max_epochs * -(-num_samples // args.batch.train_batch_size)

    pace = Pace(
        args.rollout.max_staleness,
        total_steps,
        steps_of,
        args.rollout.micro_rollout_batch_size,
        partial=args.rollout.partial_rollouts,
    )
    score_mine = roles.score.score_mine if isinstance(roles.score, TextScores) else None
    options = {"seed": args.batch.seed, "group_size": args.rollout.n_samples_per_prompt}
    if roles.environment is not None:
        from trainer.rollout.envs.episodes import continue_episodes

        options["generate"] = functools.partial(continue_episodes, roles.environment)
    return RolloutsAhead(roles.engine, score_mine, pace, sampling, **options)


def build_environments(args: PPOArguments, setup: Setup):
    chat_template(setup.tokenizer)  # raises if there is none
    where = f"--env {args.environment.env}"
    timeout, make = args.environment.env_timeout, load_environment(args.environment.env)
    if args.environment.env_sandbox:
        from trainer.rollout.envs.env_process import ProcessEnvironment

        make = functools.partial(ProcessEnvironment, args.environment.env, args.environment.env_memory_mb, timeout)
        timeout += SPARE_SECONDS  # a process that hangs is lost before its call is late
    call = Caller(where, timeout, args.environment.env_concurrency)
    return Environments(make, call, where, setup.tokenizer, args.environment.env_max_turns, args.prompts.prompt_max_len)
