"""`plan`: which layouts of a model fit a machine, what each phase needs, and how long a step takes at given rates.

python -m trainer.cli.plan MODEL --gpus 64 --gpu_memory 80 --nodes 8 --host_memory 2000

Nothing is downloaded but the config, and no weight is read. Predicted memory and bytes are explained in docs/plan.md.
"""

from trainer.entry import run_command
from trainer.errors import UserError
from trainer.help_texts import OneLineParser
from trainer.planning import plan_inputs as inputs


def build_parser() -> OneLineParser:
    parser = OneLineParser("plan", description=__doc__)
    parser.add_argument("model", metavar="MODEL", help="model folder, config.json, or hub name in the cache")
    parser.add_argument("--gpus", type=int, required=True, help="GPUs of all nodes")
    for name, kind, default, text in (
        ("gpu_memory", float, inputs.GPU_MEMORY, "GB of one GPU"),
        ("nodes", int, 1, "number of nodes"),
        ("host_memory", float, inputs.HOST_MEMORY, "GB of one node"),
        ("max_len", int, 4096, "tokens of a packed sample"),
        ("train_batch_size", int, 128, "samples per step, over all ranks"),
        ("micro_train_batch_size", int, 1, "samples per forward pass on one rank"),
        ("reserve", float, inputs.RESERVE, "GB of a GPU for the driver, NCCL and fragments"),
        ("tflops", float, inputs.TFLOPS, "bf16 TFLOP/s that a GPU reaches, not its peak"),
        ("node_rate", float, inputs.NODE_RATE, "GB/s of a GPU to others in its node"),
        ("network_rate", float, inputs.NETWORK_RATE, "GB/s of a GPU to other nodes"),
        ("host_rate", float, inputs.HOST_RATE, "GB/s between a GPU and host memory, and Adam there"),
    ):
        parser.add_argument(f"--{name}", type=kind, default=default, help=text)
    return parser


def parse(argv: list[str]) -> tuple[str, inputs.Machine, float, inputs.Work]:
    """Return (model, machine, GB of one GPU, what a step trains).

    Raises:
        UserError: a number is below 1, or the nodes do not have equally many GPUs.
    """
    flags = vars(build_parser().parse_args(argv))
    for name in ("gpus", "nodes", "max_len", "train_batch_size", "micro_train_batch_size"):
        if flags[name] < 1:
            raise UserError(f"--{name}", str(flags[name]), "1 or more")
    model = flags.pop("model")
    work = inputs.Work(flags.pop("train_batch_size"), flags.pop("micro_train_batch_size"), flags.pop("max_len"))
    return model, inputs.machine_of(**flags), flags["gpu_memory"], work


def run(argv: list[str]) -> None:
    name, machine, gpu_memory, work = parse(argv)
    from trainer.planning.layout_plan import meta_model, report  # not at the top: torch is not needed for --help

    print(report(meta_model(name), name, machine, gpu_memory, work))


def main() -> None:
    run_command(run)


if __name__ == "__main__":
    main()
