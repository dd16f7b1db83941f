"""`check MODEL`: what can the trainer do with a model?

Exit code: 0 if all that it tried passes or is refused, 1 if something is wrong, 2 for a user error.
"""

import os
import sys

from trainer.compare.zoo.check_flags import build_parser
from trainer.entry import run_command
from trainer.model_folders.folder_names import check_model_name


def run(argv: list[str]) -> None:
    model = build_parser().parse_args(argv).model
    if not os.path.isdir(model):
        check_model_name(model, "MODEL")
    from trainer.compare.zoo.check_model import main as check  # torch: --help and a wrong flag have answered

    sys.exit(check(argv))


def main() -> None:
    run_command(run)


if __name__ == "__main__":
    main()
