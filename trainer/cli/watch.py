"""`watch RUN`: look at a running job in the terminal."""

from trainer.entry import run_command
from trainer.reports.live_view import run


def main() -> None:
    run_command(run)


if __name__ == "__main__":
    main()
