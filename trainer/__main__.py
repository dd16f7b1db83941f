"""`python -m trainer COMMAND` is the command `trainer`."""

from trainer.cli.__main__ import main

if __name__ == "__main__":
    main()
