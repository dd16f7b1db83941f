"""`plan`: which layouts of a model fit a machine, what each phase needs, and how long a step takes at given rates.

python -m trainer.cli.plan MODEL --gpus 64 --gpu_memory 80 --nodes 8 --host_memory 2000
python -m trainer.cli.plan MODEL --gpus 8 --rollout_engine vllm_server --servers 24 --max_staleness 2

Nothing is downloaded but the config, and no weight is read. Predicted memory and bytes are explained in docs/plan.md.
"""

import math
import os
from typing import Optional

from trainer.entry import run_command
from trainer.errors import UserError
from trainer.flags.names.word_parser import ReadingParser
from trainer.metrics import counted
from trainer.model_folders.folder_names import only_on_hub
from trainer.planning import plan_inputs as inputs
from trainer.planning.idle_share import Lengths

ENGINES = ("hf", "vllm", *inputs.ON_SERVERS)
ROLLOUT_FLAGS = {  # kind, default, help
    "servers": (int, 0, "vllm_server and sglang: number of servers, on GPUs of their own"),
    "engine_tensor_parallel_size": (int, 1, "vllm and servers: GPUs of an engine"),
    "engine_memory": (float, 0.0, "vllm and servers: share of a GPU's memory (default: 0.5 and 0.9)"),
    "max_staleness": (int, 0, "rollouts by which weights may be old"),
    "changed_share": (float, 0.02, "--sync_deltas: share of the values that change between two syncs"),
    "micro_rollout_batch_size": (int, 32, "responses at a time of a rank or a server"),
    "rollout_batch_size": (int, 128, "prompts of a rollout"),
    "n_samples_per_prompt": (int, 8, "responses to a prompt"),
    "prompt_len": (int, 512, "tokens of a prompt; --max_len bounds it with its response"),
    "response_median": (float, 1000, "median of the tokens of a response"),
    "response_spread": (float, 0.9, "standard deviation of the logarithm of its tokens"),
    "folder_rate": (
        float,
        inputs.FOLDER_RATE,
        "sglang: GB/s of a node that writes --sync_folder, and of a server that reads",
    ),
    "token_rate": (float, 40, "tokens per second of one response, while all are at work"),
}


def build_parser() -> ReadingParser:
    parser = ReadingParser("plan", description=__doc__)
    parser.add_argument("model", metavar="MODEL", help="model folder, config.json, or hub name in the cache")
    parser.add_argument("--gpus", type=int, required=True, help="GPUs of all nodes")
    for name, kind, default, text in (
        ("gpu_memory", float, inputs.GPU_MEMORY, "GB of one GPU"),
        ("nodes", int, 1, "number of nodes"),
        ("host_memory", float, inputs.HOST_MEMORY, "GB of one node"),
        ("max_len", int, 4096, "tokens of a packed sample"),
        ("train_batch_size", int, 128, "samples per step, over all ranks"),
        ("micro_train_batch_size", int, 1, "samples per forward pass on one rank"),
        ("frozen_models", int, 0, "models of the same size that are only read: a reference, each teacher"),
        ("lora_rank", int, 0, "train an adapter of this rank on the default layers, above frozen weights"),
        ("reserve", float, inputs.RESERVE, "GB of a GPU for the driver, NCCL and fragments"),
        ("tflops", float, inputs.TFLOPS, "bf16 TFLOP/s that a GPU reaches, not its peak"),
        ("node_rate", float, inputs.NODE_RATE, "GB/s of a GPU to others in its node"),
        ("network_rate", float, inputs.NETWORK_RATE, "GB/s of a GPU to other nodes"),
        ("host_rate", float, inputs.HOST_RATE, "GB/s between a GPU and host memory, and Adam there"),
    ):
        parser.add_argument(f"--{name}", type=kind, default=default, help=text)
    rollouts = parser.add_argument_group("Reinforcement learning")
    rollouts.add_argument("--rollout_engine", choices=ENGINES, help="what generates, as in train_ppo")
    for name, (kind, default, text) in ROLLOUT_FLAGS.items():
        rollouts.add_argument(f"--{name}", type=kind, default=default, help=text)
    rollouts.add_argument("--sync_deltas", action="store_true", help="servers get changed weights only")
    return parser


def parse(argv: list[str]) -> tuple[str, inputs.Machine, float, inputs.Work, Optional[inputs.Rollouts]]:
    """Return (model, machine, GB of one GPU, what a step trains, how rollouts are made).

    Raises:
        UserError: a number is too small, the nodes do not have equally many GPUs, or flags do not go together.
    """
    flags = vars(build_parser().parse_args(argv))
    for name in ("gpus", "nodes", "max_len", "train_batch_size", "micro_train_batch_size"):
        if flags[name] < 1:
            raise UserError(f"--{name}", str(flags[name]), "1 or more")
    for name in ("frozen_models", "lora_rank"):
        if flags[name] < 0:
            raise UserError(f"--{name}", str(flags[name]), "0 or more")
    for name, value in flags.items():
        if isinstance(value, float) and not 0 <= value < math.inf:
            raise UserError(f"--{name}", f"{value:g}", "a finite number of 0 or more")
    if flags["gpu_memory"] <= flags["reserve"]:
        raise UserError("--gpu_memory", f"{flags['gpu_memory']:g} GB, and --reserve takes {flags['reserve']:g}", "more")
    model, engine = flags.pop("model"), flags.pop("rollout_engine")
    own = {name: flags.pop(name) for name in (*ROLLOUT_FLAGS, "sync_deltas")}
    sizes = [flags.pop(name) for name in ("train_batch_size", "micro_train_batch_size", "max_len")]
    work = inputs.Work(*sizes, num_frozen=flags.pop("frozen_models"), lora_rank=flags.pop("lora_rank"))
    machine = inputs.machine_of(**flags, folder_rate=own["folder_rate"])
    return model, machine, flags["gpu_memory"], work, rollouts_of(engine, own, machine.gpus, work.max_len)


def rollouts_of(engine: Optional[str], flags: dict, gpus: int, max_len: int) -> Optional[inputs.Rollouts]:
    """The flags of rollouts. None: no --rollout_engine is given.

    Raises:
        UserError: a flag does not go with the engine, or a number is too small.
    """
    refused = {
        None: (*ROLLOUT_FLAGS, "sync_deltas"),
        "vllm": ("servers", "sync_deltas", "changed_share", "max_staleness", "folder_rate"),
        "sglang": ("sync_deltas", "changed_share"),
        "hf": (
            "folder_rate",
            "servers",
            "sync_deltas",
            "changed_share",
            "engine_tensor_parallel_size",
            "engine_memory",
        ),
    }
    usual = {name: default for name, (_, default, _) in ROLLOUT_FLAGS.items()} | {"sync_deltas": False}
    for name in refused.get(engine, ("folder_rate", *(() if flags["sync_deltas"] else ("changed_share",)))):
        if flags[name] != usual[name]:
            where = f"with --rollout_engine {engine}" if engine else "without --rollout_engine"
            where = "without --sync_deltas" if engine == "vllm_server" and name == "changed_share" else where
            raise UserError(f"--{name}", f"{flags[name]} {where}, where it has no meaning", "leave it out")
    if engine is None:
        return None
    if engine in inputs.ON_SERVERS and flags["servers"] < 1:
        raise UserError("--servers", str(flags["servers"]), f"1 or more with --rollout_engine {engine}")
    if engine not in inputs.ON_SERVERS and gpus % flags["engine_tensor_parallel_size"]:
        raise UserError(
            "--engine_tensor_parallel_size", str(flags["engine_tensor_parallel_size"]), f"a divisor of {gpus}"
        )
    least = ROLLOUT_FLAGS.keys() - {"servers", "max_staleness", "engine_memory", "response_spread"}
    for name in sorted(least):
        if flags[name] <= 0:
            raise UserError(f"--{name}", str(flags[name]), "more than 0")
    longest = max_len - flags["prompt_len"]
    if longest < 1:
        raise UserError("--prompt_len", str(flags["prompt_len"]), f"less than --max_len {max_len}")
    return inputs.Rollouts(
        engine, flags["engine_tensor_parallel_size"], flags["servers"],
        flags["engine_memory"] or (0.9 if engine in inputs.ON_SERVERS else 0.5), flags["micro_rollout_batch_size"],
        flags["max_staleness"], flags["sync_deltas"], flags["changed_share"], flags["rollout_batch_size"],
        flags["n_samples_per_prompt"], flags["prompt_len"],
        Lengths(flags["response_median"], flags["response_spread"], longest), flags["token_rate"],
    )  # fmt: skip


def run(argv: list[str]) -> None:
    name, *rest = parse(argv)
    if not os.path.exists(name):
        only_on_hub(name, "MODEL")
    # not at the top: torch is not needed for --help
    from trainer.models.model_bounds import bounds_of
    from trainer.planning.layout_plan import meta_model, report

    model = meta_model(name)
    machine, gpu_memory, work, rollouts = rest
    text = model.config.get_text_config()
    if rollouts:
        check_rollout_length(work.max_len, getattr(text, "max_position_embeddings", None))
    for warning in check_length(work.max_len, bounds_of(name, trust_remote_code=False)):
        print(warning)
    print(report(model, name, machine, gpu_memory, work, rollouts))


def check_length(max_len: int, bounds) -> list[str]:
    """The warning for samples beyond rotary positions, in which `train_sft` trains, too. `bounds` are those of the model.

    Raises:
        UserError: they are beyond learned positions.
    """
    if bounds.positions is None or max_len <= bounds.positions:
        return []
    found = f"{counted(max_len, 'token')}, more than the model's {counted(bounds.positions, 'position')}"
    if bounds.learned:
        raise UserError("--max_len", found, f"up to {bounds.positions}")
    return [f"WARNING: --max_len: {found}; the model has not learned the last ones, if a row is as long"]


def check_rollout_length(max_len: int, positions: Optional[int]) -> None:
    """Raise UserError for prompts with responses beyond the positions of the model, as `train_ppo` does."""
    if positions and max_len > positions:
        found = f"{max_len} tokens of a prompt and its response, more than the model's {counted(positions, 'position')}"
        raise UserError("--max_len", found, f"up to {positions}")


def main() -> None:
    run_command(run)


if __name__ == "__main__":
    main()
