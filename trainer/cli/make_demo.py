"""`make_demo`: write the embedded demo: a tiny model, its tokenizer, and data for SFT, preferences and RL.

python -m trainer.cli.make_demo --output_dir demo [--vision]
"""

import os
from dataclasses import dataclass

from trainer.entry import quiet_libraries, run_command
from trainer.flags.parse_flags import arg, parse_group
from trainer.runs.output_folders import check_rights, make_writable


@dataclass
class DemoArguments:
    """Embedded demo"""

    output_dir: str = arg("demo", "folder to write")
    vision: bool = arg(
        False, "write the demo with images: pictures of digits, and a tiny model that can learn to read them"
    )
    seed: int = arg(0, "seed of the weights and of the data", type="NonNegativeInt")


def run(argv: list[str]) -> None:
    args = parse_group(DemoArguments, "make_demo", argv)
    check_rights(args.output_dir)
    quiet_libraries()
    # after the flags are read: --help must not import torch
    from trainer.datasets.demos.demo import make_demo
    from trainer.datasets.demos.vision_demo import make_vision_demo

    make_writable("--output_dir", os.path.dirname(os.path.abspath(args.output_dir)))
    (make_vision_demo if args.vision else make_demo)(args.output_dir, args.seed)
    print(f"demo written to {args.output_dir}")


def main() -> None:
    run_command(run)


if __name__ == "__main__":
    main()
