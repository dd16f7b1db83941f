"""`serve_engine`: a vLLM server that generates for `train_ppo --rollout_engine vllm_server` and takes its weights.

python -m trainer.cli.serve_engine --pretrain MODEL --port 8001 --max_len 2048
"""

import importlib.util
import json
import multiprocessing
import os
import sys
import threading
import time
from dataclasses import dataclass
from typing import Literal, Optional

from trainer.entry import end_with_parent, run_command
from trainer.errors import UserError
from trainer.flags.generating_flags import ListenArguments
from trainer.flags.parse_flags import arg, check_port, parse_group
from trainer.flags.rollout_rules import SERVE_ENGINE_RULES
from trainer.flags.rule import first_broken
from trainer.limits import raise_limits
from trainer.rollout.engines.on_vllm.server_guard import NAME as GUARD
from trainer.rollout.engines.on_vllm.server_guard import guard_with
from trainer.rollout.rewards.remote_rewards import read_key

WORKER = "trainer.rollout.engines.on_vllm.vllm_worker.WeightReceiver"
SECONDS_BETWEEN_LOOKS = 1.0


@dataclass
class EngineArguments(ListenArguments):
    """Rollout server"""

    pretrain: Optional[str] = arg(None, "model folder; its weights are replaced by those of the trainer")
    port: int = arg(8001, "port to listen on", type="PositiveInt")
    max_len: int = arg(2048, "tokens of a prompt and its response together", type="PositiveInt")
    batch_size: int = arg(64, "responses at a time (on CUDA, vllm decides)", type="PositiveInt")
    tensor_parallel_size: int = arg(1, "GPUs of this server", type="PositiveInt")
    param_dtype: Literal["bf16", "fp32"] = arg("bf16", "compute dtype, that of the trainer")
    gpu_memory_utilization: float = arg(
        0.9, "CUDA: share of the GPU memory for weights and cache", type="PositiveFloat"
    )
    speculative_tokens: int = arg(
        0, "tokens that are drafted from the text so far and then checked; 0: none", type="NonNegativeInt"
    )
    trust_remote_code: bool = arg(False, "run Python code that comes with the model or tokenizer")


def run(argv: list[str]) -> None:
    args = parse_group(EngineArguments, "serve_engine", argv)
    if args.pretrain is None:
        raise UserError("--pretrain", "missing", "a model folder")
    check_port(args.port, 1)
    raise_limits(args.limits or ())
    if error := first_broken(SERVE_ENGINE_RULES, vars(args), vars(EngineArguments())):
        raise error
    guard_with(read_key("--api_key", args.api_key) if args.api_key else None)
    if importlib.util.find_spec("vllm") is None:
        raise UserError("serve_engine", "vllm is not installed", "pip install -e '.[vllm]'")
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # for /collective_rpc, which receives weights
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # so that its processes run the end of this file
    from vllm.entrypoints.launchers.api_server.entry import main as vllm_main  # an optional extra

    for line in notes_of_chats(args.pretrain, args.trust_remote_code):
        print(line, flush=True)
    sys.argv = ["serve_engine", *server_flags(args)]
    threading.Thread(target=end_with_engine, daemon=True).start()
    vllm_main()


def notes_of_chats(folder: str, trust_remote_code: bool) -> set[str]:
    """What vLLM's chats lose: it renders and tokenizes a prompt alone. The tokens that `train_ppo` sends stay as they are."""
    from trainer.datasets.conversations.templates import notes_of_template  # --help does not need transformers
    from trainer.models.model_loading import load_tokenizer

    try:
        tokenizer = load_tokenizer(folder, trust_remote_code)
    except UserError:  # vLLM says what it cannot read
        return set()
    return notes_of_template(tokenizer) if tokenizer.chat_template else set()


def end_with_engine() -> None:
    """End this process with status 1 once a process that it has started is gone. The others then end with it.

    vLLM's server would continue to listen, and notice a lost engine only at the next request.
    """
    begun: set[int] = set()
    while begun <= (running := {process.pid for process in multiprocessing.active_children()}):
        begun |= running
        time.sleep(SECONDS_BETWEEN_LOOKS)
    print(f"error: serve_engine: its process {min(begun - running)} is gone, so the server ends", file=sys.stderr)
    sys.stderr.flush()
    os._exit(1)


def server_flags(args: EngineArguments) -> list[str]:
    """The flags of `vllm serve`."""
    import torch  # --help does not need it, nor what follows

    from trainer.rollout.engines.on_vllm.vllm_cpu import cpu_cache_bytes, drafts_from_the_text

    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[args.param_dtype]
    flags = [
        "--model",
        args.pretrain,
        "--host",
        args.host,
        "--port",
        str(args.port),
        "--dtype",
        str(dtype).removeprefix("torch."),
    ]
    flags += ["--max-model-len", str(args.max_len), "--tensor-parallel-size", str(args.tensor_parallel_size)]
    flags += ["--worker-extension-cls", WORKER, "--enable-scale-out", "--generation-config", "vllm", "--seed", "0"]
    flags += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
    flags += ["--middleware", GUARD]  # vLLM's own key guards only some paths
    flags += ["--enable-prefix-caching"]  # requests name the weights that an entry is of, see VLLMServerEngine
    flags += ["--enable-prompt-tokens-details"]  # answers say how much of a prompt was in the cache
    if args.speculative_tokens:
        flags += ["--speculative-config", json.dumps(drafts_from_the_text(args.speculative_tokens))]
    if args.trust_remote_code:
        flags += ["--trust-remote-code"]
    if torch.cuda.is_available():
        # --moe-backend: others change the order of the experts' weights
        return [*flags, "--gpu-memory-utilization", str(args.gpu_memory_utilization), "--moe-backend", "triton"]
    cache = cpu_cache_bytes(args.pretrain, dtype, args.batch_size, args.max_len, args.trust_remote_code)
    return [*flags, "--enforce-eager", "--kv-cache-memory-bytes", str(cache), "--max-num-seqs", str(args.batch_size)]


def main() -> None:
    run_command(run)


if __name__ == "__mp_main__":  # in vLLM's own processes: without a server, they would keep its GPU memory
    end_with_parent()

if __name__ == "__main__":
    main()
