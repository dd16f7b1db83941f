"""`verify_run RUN`: check a run against its certificate."""

from trainer.compare.certificates.verification import run
from trainer.entry import run_command


def main() -> None:
    run_command(run)


if __name__ == "__main__":
    main()
