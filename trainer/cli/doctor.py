"""`doctor`: would training run here? One line for each thing that it needs, and what to do about those that fail.

python -m trainer.cli.doctor [--path FOLDER]
torchrun --nnodes 2 ... -m trainer.cli.doctor --path FOLDER    also tries the network, and the folder on every node

Exit code: 0 if nothing would fail, else 2.
"""

from trainer.entry import run_command
from trainer.flags.names.word_parser import OneLineParser


def run(argv: list[str]) -> None:
    parser = OneLineParser("doctor", description=__doc__)
    parser.add_argument("--path", help="a folder for runs; under torchrun each node must see it")
    path = parser.parse_args(argv).path
    from trainer.planning.doctor_findings import examine  # not at the top: torch is not needed for --help

    examine(path)


def main() -> None:
    run_command(run)


if __name__ == "__main__":
    main()
