"""`convert_ckpt IN OUT`: rewrite a checkpoint in the portable form, with whole tensors under Hugging Face names.

Every backend and layout resumes from both forms. The portable form is for other programs. It is plain safetensors,
which torch.distributed.checkpoint can also read (HuggingFaceStorageReader). The command is one process and holds the
tensors of one file in memory at a time.
"""

import os
import shutil

from trainer.entry import run_command
from trainer.errors import UserError

USAGE = "python -m trainer.cli.convert_ckpt IN OUT"


def check_folders(argv: list[str], usage: str) -> tuple[str, str]:
    """Return a command's two arguments: (complete checkpoint, folder that does not exist yet). Raises UserError."""
    from trainer.checkpoints.checkpoint_store import find_damage

    if len(argv) != 2:
        raise UserError("arguments", " ".join(argv) or "none", usage)
    source, target = (os.path.abspath(path) for path in argv)
    damage = find_damage(source) if os.path.isdir(source) else "no such folder"
    if damage:
        raise UserError("IN", f"{source}: {damage}", "a complete checkpoint, such as <output_dir>/checkpoints/step_100")
    if os.path.exists(target):
        raise UserError("OUT", f"{target} exists already", "a new folder")
    return source, target


def run(argv: list[str]) -> None:
    source, target = check_folders(argv, USAGE)
    from trainer.checkpoints import checkpoint_store as store
    from trainer.checkpoints.piece_index import INDEX, PieceIndex
    from trainer.checkpoints.shards import ShardReader, full_shards, write_shards

    temporary = target + ".tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        shutil.copytree(source, temporary, ignore=shutil.ignore_patterns("pieces-*", "full-*", store.MANIFEST, INDEX))
        entries, pieces = write_shards(full_shards(ShardReader(source)), temporary, "full-00000")
        entries[INDEX] = PieceIndex.of_pieces(pieces).write(temporary)
        store.commit(temporary, target, entries)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError("OUT", f"{target}: {error.strerror or error}") from None
    print(f"{source} written as whole tensors to {target}")


def main() -> None:
    run_command(run)


if __name__ == "__main__":
    main()
