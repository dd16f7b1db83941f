"""How every command starts and ends: one line for an error, exit code 2, and no rank left behind."""

import os
import sys
import time
from collections.abc import Callable

from trainer.errors import UserError

EXIT_USER_ERROR = 2
# how long other ranks let rank 0 speak first; torchrun ends them as soon as rank 0 has left
OTHER_RANKS_WAIT_SECONDS = 10


def run_command(main: Callable[[list[str]], None], argv: list[str] | None = None) -> None:
    """Run `main(argv)`; tell a UserError in one line on stderr and leave with exit code 2."""
    try:
        main(sys.argv[1:] if argv is None else argv)
    except UserError as error:
        rank = int(os.environ.get("RANK", 0))
        if rank:
            time.sleep(OTHER_RANKS_WAIT_SECONDS)
        sys.stdout.flush()
        print(f"error: {error}" + (f" [rank {rank}]" if rank else ""), file=sys.stderr, flush=True)
        # no interpreter shutdown: it could wait for a collective that the other ranks never enter
        os._exit(EXIT_USER_ERROR)


def quiet_libraries() -> None:
    """Keep other libraries' progress bars and deprecation notes out of a run's output."""
    import logging as python_logging
    import warnings

    import torch
    from transformers.utils import logging

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns on every rank that it found no GPU
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    # gathering a weight sharded over tp and fsdp takes two all-gathers; torch says so in a paragraph
    python_logging.getLogger("torch.distributed.tensor._redistribute").setLevel(python_logging.ERROR)
    logging.disable_progress_bar()
    logging.set_verbosity_error()


def close_process_group() -> None:
    """Leave the process group at the end of a command that went well."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
