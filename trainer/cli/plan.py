"""`plan MODEL`: which layouts of a model fit a machine."""

from trainer.entry import run_command
from trainer.planning.layout_plan import run


def main() -> None:
    run_command(run)


if __name__ == "__main__":
    main()
