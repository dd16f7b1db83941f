"""`doctor`: would training run here?"""

from trainer.entry import run_command
from trainer.planning.doctor_findings import run


def main() -> None:
    run_command(run)


if __name__ == "__main__":
    main()
