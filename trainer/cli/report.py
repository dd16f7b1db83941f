"""`report RUN [RUN ...]`: one HTML file with the curves of one run or of several."""

from trainer.entry import run_command
from trainer.reports.report_page import run


def main() -> None:
    run_command(run)


if __name__ == "__main__":
    main()
