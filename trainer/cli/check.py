"""`check MODEL`: what can the trainer do with a model?

Exit code: 0 if all that it tried passes or is refused, 1 if something is wrong, 2 for a user error or a model that no command trains.
"""

import os
import sys

from trainer.compare.zoo.check_flags import build_parser
from trainer.entry import run_command
from trainer.errors import UserError
from trainer.model_folders.folder_names import check_model_name


def run(argv: list[str]) -> None:
    options = build_parser().parse_args(argv)
    if not options.timeout > 0:
        raise UserError("--timeout", f"{options.timeout:g}", "seconds above 0")
    model = options.model
    if not os.path.isdir(model):
        check_model_name(model, "MODEL")
    from trainer.compare.zoo.check_model import main as check  # torch: --help and a wrong flag have answered

    sys.exit(check(argv))


def main() -> None:
    run_command(run)


if __name__ == "__main__":
    main()
