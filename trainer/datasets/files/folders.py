"""Read folders as rows by split: folders of data files, and folders written by `save_to_disk`."""

import glob
import os

import datasets
from datasets.data_files import FILES_TO_IGNORE
from huggingface_hub import DatasetCard

from trainer.datasets.files.read_files import read_files
from trainer.datasets.files.set_names import FORMATS
from trainer.datasets.library import one_line
from trainer.errors import UserError
from trainer.limits import limit, too_large


def read_folder(folder: str, where: str) -> dict[str, datasets.Dataset]:
    """Read the splits of a folder of data files or one from `save_to_disk`. Every data file must belong to a split."""
    if all(os.path.exists(os.path.join(folder, name)) for name in ("config.json", "tokenizer_config.json")):
        raise UserError(where, "a model folder, which holds no rows", "a folder or files of data")
    files = files_of_folder(folder, where)
    if files is None:
        try:
            rows = datasets.load_from_disk(folder)
        except Exception as error:  # every error that the library raises here is about this folder
            raise _unreadable(error, where) from None
        return rows if isinstance(rows, dict) else {str(rows.split or "train"): rows}
    if not _card_names_files(folder):
        _refuse_unread_files(folder, files, where)
    return read_files(files, where)


def files_of_folder(folder: str, where: str) -> dict[str, list[str]] | None:
    """The data files of each split, in the order of their rows, or None for a folder that `save_to_disk` wrote."""
    if any(os.path.exists(os.path.join(folder, name)) for name in ("dataset_dict.json", "state.json")):
        return None
    path = os.path.realpath(folder)
    if glob.escape(path) != path:
        raise UserError(where, "the datasets library reads * ? [ in a folder's path as patterns", "a path without them")
    _check_size(folder, where)
    try:
        files = datasets.load_dataset_builder(folder).config.data_files
    except Exception as error:  # as above
        raise _unreadable(error, where) from None
    return {str(split): list(names) for split, names in files.items()}


def _check_size(folder: str, where: str) -> None:
    """Refuse a folder of very many files, or whose links lead back into it. The library reads 100 files in a second."""
    found = 0
    for _, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith((".", "__"))]  # as the library does
        found += len(folders) + len(names)
        if found > limit("files"):
            raise too_large(where, "too many files and folders", "files")


def _unreadable(error: Exception, where: str) -> UserError:
    if isinstance(error, FileNotFoundError):
        return UserError(where, "no data files in this folder", ", ".join(FORMATS))
    return UserError(where, f"cannot be read: {one_line(error)}")


def _card_names_files(folder: str) -> bool:
    """Whether the folder's README (as in a set on the hub) says which files make up a set."""
    card = os.path.join(folder, "README.md")
    return os.path.exists(card) and bool(DatasetCard.load(card).data.to_dict().get("configs"))


def _refuse_unread_files(folder: str, files: dict[str, list[str]], where: str) -> None:
    """Refuse a folder with data files that the library would not read.

    The library reads one format of a folder. If any file name shows a split, it reads only files with such names.
    """
    read = {os.path.realpath(name) for names in files.values() for name in names}
    unread = []
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith((".", "__"))]  # as the library does
        paths = [os.path.join(parent, name) for name in names if name not in FILES_TO_IGNORE and name[0] != "."]
        known = [path for path in paths if os.path.splitext(path)[1].lower() in FORMATS]
        unread += [os.path.relpath(path, folder) for path in known if os.path.realpath(path) not in read]
    if unread:
        found = f"{', '.join(sorted(unread)[:5])}{' ...' if len(unread) > 5 else ''} would not be read"
        raise UserError(where, found, "a list of files, or a folder of one format, with a split in all names or none")
