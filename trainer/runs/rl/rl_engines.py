"""Who generates in a run of RL: the engine, the thread of --max_staleness, the environments."""

import functools
import hashlib
import logging
import os
import secrets
import warnings
from typing import Any

import torch

from trainer.comma_separated import names_in
from trainer.datasets.conversations.rendering import chat_template
from trainer.datasets.conversations.turns import check_call_format
from trainer.datasets.samples.prompts import COLUMN
from trainer.distributed.collectives import broadcast_object, wait_for_all
from trainer.errors import UserError
from trainer.metrics import counted
from trainer.model_folders.model_folder import read_config, unwrapped
from trainer.model_folders.model_writer import in_hub_format
from trainer.rollout.asynchronous import Pace, RolloutsAhead
from trainer.rollout.engines.decoding import UncachedRows
from trainer.rollout.engines.hf import HFEngine
from trainer.rollout.engines.on_vllm.vllm_server import VLLMServerEngine
from trainer.rollout.engines.servers import ServerEngine
from trainer.rollout.engines.sglang_server import SGLangServerEngine
from trainer.rollout.envs.container import words_of
from trainer.rollout.envs.env_process import ProcessEnvironment, check_sandbox
from trainer.rollout.envs.environments import SPARE_SECONDS, Caller, Source, load_environment, read_sources
from trainer.rollout.envs.episodes import continue_episodes
from trainer.rollout.envs.long_answers import LongAnswers
from trainer.rollout.envs.one_episode import Environments
from trainer.rollout.envs.sandbox import Box
from trainer.rollout.episode_queue import QueuedRollouts
from trainer.rollout.rewards.remote_rewards import read_key
from trainer.rollout.scoring import TextScores
from trainer.runs.rl.rl_options import engine_tp_size

PLAIN_IN_VLLM = ("minicpm3",)  # models with kv_lora_rank whose keys and values vLLM keeps as in other models


def build_engine(run):
    """The engine of --rollout_engine. Features add options for each kind."""
    strategy, kind = run.setup.strategy, run.args.rollout.rollout_engine
    options = {"dtype": strategy.param_dtype, "device": strategy.device}
    options |= {"batch_size": run.args.rollout.micro_rollout_batch_size, **run.engine_options[kind]}
    return ENGINES[kind](run, options)


def hf_engine(run, options: dict) -> HFEngine:
    """A replica of the policy on every rank."""
    args, setup = run.args, run.setup
    options |= {"trust_remote_code": args.model.trust_remote_code}
    options |= {"compiled": args.model.compile and not args.rollout.max_staleness}
    engine = HFEngine(setup.folder, setup.tokenizer, **options)
    if engine.kind_of_rows is UncachedRows:
        name = type(engine.model).__name__
        if args.rollout.routing_replay:
            raise UserError("--routing_replay", f"no cache for {name}", "leave it out, or another model")
        if run.has_images:
            raise UserError("--pretrain", f"prompts with images, and no cache for {name}", "another model")
        setup.strategy.print(f"rollout engine: no cache for {name}, so each token reads the whole text again")
    return engine


def vllm_servers(run, options: dict) -> VLLMServerEngine:
    """Servers of `serve_engine`."""
    check_attention(run)
    options |= {"mark": broadcast_object(secrets.token_hex(8))}
    engine, flags = server_engine(run, VLLMServerEngine, options), run.args.rollout
    if flags.min_p and engine.drafting:
        found = f"{flags.min_p:g}, and {engine.drafting[0]} has --speculative_tokens: vLLM does not check drafts by it"
        raise UserError("--min_p", found, "--top_p and --top_k")
    if flags.sync_deltas and engine.dtype == torch.float32:
        text = (
            "--sync_deltas with servers in fp32 saves little: a step changes nearly all values. In bf16 it changes few"
        )
        run.setup.strategy.print(f"WARNING: {text}")
    return engine


def check_attention(run) -> None:
    """Raise UserError for multi-head latent attention. vLLM derives values from its weights, and no sync renews them."""
    config = read_config(run.setup.folder, run.setup.trust_remote_code).get_text_config()
    if getattr(config, "kv_lora_rank", None) and config.model_type not in PLAIN_IN_VLLM:
        found = f"{run.args.rollout.rollout_engine} with the multi-head latent attention of {config.model_type}"
        found += f" (kv_lora_rank {config.kv_lora_rank}): vLLM keeps values that it derived from weights"
        raise UserError("--rollout_engine", found, "hf")


def sglang_servers(run, options: dict) -> SGLangServerEngine:
    """Servers of SGLang. They read the weights under the names of published models."""
    model, args, dtype = unwrapped(run.model), run.args, options["dtype"]
    own = hashlib.blake2b(os.path.abspath(run.output_dir).encode(), digest_size=4).hexdigest()  # no other run's folder
    options |= {"folder": os.path.join(args.rollout.sync_folder or run.output_dir, f"engine_weights-{own}")}
    options |= {"published": lambda tensors: in_hub_format(model, tensors, dtype)}
    engine = server_engine(run, SGLangServerEngine, options)
    if not engine.are_seeded:
        text = "not all servers have --enable-deterministic-inference, so --seed does not decide the samples"
        run.setup.strategy.print(f"WARNING: {text}")
    return engine


def server_engine(run, kind: type, options: dict) -> ServerEngine:
    """Servers of any number and with a dtype of their own."""
    trained, key = options.pop("dtype"), run.args.rollout.engine_api_key
    config = read_config(run.setup.folder, run.setup.trust_remote_code)
    options |= {"max_len": run.setup.longest, "vocab_size": config.get_text_config().vocab_size}
    engine = kind(server_urls(run), **options, key=read_key("--engine_api_key", key) if key else None)
    if engine.dtype != trained:
        run.setup.strategy.print(f"rollout servers compute in {engine.dtype}, and training in {trained}")
    wait_for_all()  # a server that waits for weights of a quick rank would not answer a slow one
    return engine


def server_urls(run) -> list[str]:
    return names_in(run.args.rollout.engine_urls)


def vllm_engine(run, options: dict):
    """An engine of vLLM in this process, or one for each tp group."""
    args, setup = run.args, run.setup
    share, num_ranks = args.rollout.vllm_gpu_memory_utilization, int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if setup.strategy.device.type == "cuda" and num_ranks > torch.cuda.device_count():
        found = f"vllm with {counted(num_ranks, 'rank')} on {counted(torch.cuda.device_count(), 'GPU')}"
        raise UserError("--rollout_engine", found, "hf, or a GPU for each rank")
    check_attention(run)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine runs in this process
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("vllm").setLevel(logging.ERROR)  # it already logs while it is imported
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
    for name in ("RANK", "LOCAL_RANK"):  # vLLM reads them even if torchrun did not start the process
        os.environ.setdefault(name, "0")
    # vLLM is an extra, and reads the variables above when it is imported
    from trainer.rollout.engines.on_vllm.vllm import VLLMEngine

    if share is not None:
        options["gpu_memory_utilization"] = share
    return VLLMEngine(
        setup.folder,
        **options,
        trust_remote_code=args.model.trust_remote_code,
        max_len=setup.longest,
        tp_size=engine_tp_size(args),
        speculative_tokens=args.rollout.speculative_tokens,
    )


ENGINES = {"hf": hf_engine, "vllm": vllm_engine, "vllm_server": vllm_servers, "sglang": sglang_servers}


def rollouts_ahead(run) -> RolloutsAhead:
    """The thread of --max_staleness."""
    args, roles, total_steps, sampling = run.args, run.roles, run.total_steps, run.options.sampling

    def steps_of(num_samples: int) -> int:
        return args.batch.max_epochs * -(-num_samples // args.batch.train_batch_size)

    pace = Pace(
        args.rollout.max_staleness,
        total_steps,
        steps_of,
        args.rollout.micro_rollout_batch_size,
        partial=args.rollout.partial_rollouts,
        num_episodes=run.options.num_episodes,
    )
    alone = isinstance(roles.score, TextScores) and not roles.score.takes_groups  # a group may be split over ranks
    score_mine = roles.score.score_mine if alone else None
    options = {"seed": args.batch.seed, "group_size": args.rollout.n_samples_per_prompt}
    if roles.environment is not None:
        options["generate"] = functools.partial(continue_episodes, roles.environment)
    if args.rollout.engine_urls:
        options |= {"num_servers": len(server_urls(run)), "whole_batches": args.environment.env_lockstep}
        return QueuedRollouts(roles.engine, score_mine, pace, sampling, **options)
    return RolloutsAhead(roles.engine, score_mine, pace, sampling, **options)


def build_environments(run) -> Environments:
    """The environments of --env. Raises UserError if the tokenizer has no chat template, or a row has no environment."""
    flags, setup = run.args.environment, run.setup
    chat_template(setup.tokenizer)  # raises if there is none
    timeout, sources, makers = flags.env_timeout, read_sources(flags.env, flags.env_args, bool(flags.env_key)), {}
    if flags.env_key:
        check_choice(flags.env_key, sources, {"--eval_dataset": run.eval_samples, "--dataset": run.samples})
    box = Box(
        flags.env_memory_mb, flags.env_processes, flags.env_disk_mb, flags.env_cpu_seconds, tuple(flags.env_paths or ())
    )
    container = tuple(words_of(flags.env_container)) if flags.env_container else ()
    is_apart = flags.env_sandbox or bool(container)
    for name, source in sources.items():
        if is_apart:
            check_sandbox(source, box, container)
            makers[name] = functools.partial(ProcessEnvironment, source, flags.env_memory_mb, timeout, box, container)
            continue
        tools = getattr(load_environment(source.name), "tools", None)  # of a class; others are checked in `reset`
        check_call_format(setup.tokenizer, tools if isinstance(tools, list) else None)
        makers[name] = source.make

    def make(task: dict) -> Any:
        return makers[str(task[flags.env_key]) if flags.env_key else ""]()

    where = f"--env {flags.env}"
    # a process that hangs is lost before its call is late
    call = Caller(where, timeout + SPARE_SECONDS * is_apart, flags.env_concurrency)
    return Environments(
        make,
        call,
        where,
        setup.tokenizer,
        flags.env_max_turns,
        run.args.prompts.prompt_max_len,
        flags.env_lockstep,
        LongAnswers(flags.env_long_answers, flags.env_answer_max_len),
        flags.env_last_turn_text or "",
    )


def check_choice(key: str, sources: dict[str, Source], sets: dict[str, Any]) -> None:
    """Raise UserError if the prompts of a set lack the column `key`, or one has a value that names no environment."""
    for flag, prompts in sets.items():
        if prompts is None:
            continue
        if COLUMN + key not in prompts.column_names:
            raise UserError(f"--env_key {key}", f"no such column in {flag}", "a column that names environments")
        for row, value in zip(prompts["row"], prompts[COLUMN + key]):
            if str(value) not in sources:
                raise UserError(f"{flag} row {row + 1}: {key}", f"{value}, no environment of --env", ", ".join(sources))
