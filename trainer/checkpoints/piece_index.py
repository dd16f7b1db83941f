"""The index of a checkpoint: which file holds which part of a tensor. A reader opens only the files that it needs.

The index is one table of integers, sorted by tensor. A row is a piece: file, start, length, offset, box. A reader takes
only the rows of its own tensors from the disk, and compares them with numpy. Reading stays fast for millions of pieces.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Optional

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save

from trainer.checkpoints import checkpoint_store as store
from trainer.limits import is_inside

INDEX = "pieces.index"  # safetensors. Other programs read every *.safetensors as weights, so it has another ending
NOT_FLAT = -1  # in the column of starts


class Piece(NamedTuple):
    """One part of a tensor in a file. Its fields mean the same as in a TensorShard. `length` counts its elements."""

    key: str
    shape: tuple[int, ...]
    file: str
    offset: tuple[int, ...]
    box: tuple[int, ...]
    start: Optional[int]
    length: int


class PieceIndex:
    """The pieces of a checkpoint by key. `shapes` holds the full shape of each tensor."""

    def __init__(self, shapes: dict[str, tuple], files: list[str], firsts: np.ndarray, rows, counts=None):
        """`rows` (pieces, 3 + 2 dims): an array, or a slice of an open file. Key n has rows [firsts[n], firsts[n+1]).

        `counts`: the number of pieces of each file. Older indexes do not have it."""
        self.shapes, self._files, self._firsts, self._rows = shapes, files, firsts, rows
        self.counts = dict(zip(files, counts or []))
        self._numbers = {key: number for number, key in enumerate(shapes)}

    @classmethod
    def of_pieces(cls, pieces: Iterable[Piece]) -> "PieceIndex":
        pieces = list(pieces)
        shapes = {piece.key: tuple(piece.shape) for piece in pieces}
        files = {name: number for number, name in enumerate(dict.fromkeys(piece.file for piece in pieces))}
        dims, numbers = max(map(len, shapes.values()), default=1), {key: n for n, key in enumerate(shapes)}
        rows = np.empty((len(pieces), 3 + 2 * dims), np.int64)
        for row, piece in zip(rows, pieces):
            rest = [0] * (dims - len(piece.box))
            start = NOT_FLAT if piece.start is None else piece.start
            row[:] = files[piece.file], start, piece.length, *piece.offset, *rest, *piece.box, *rest
        return cls(shapes, list(files), *_sorted_by_key([numbers[piece.key] for piece in pieces], rows, len(shapes)))

    @classmethod
    def merged(cls, parts: list["PieceIndex"]) -> "PieceIndex":
        """The index of all ranks from the indexes of single ranks."""
        shapes = {key: shape for part in parts for key, shape in part.shapes.items()}
        numbers, dims = {key: n for n, key in enumerate(shapes)}, max(map(len, shapes.values()), default=1)
        files, keys, tables = [], [], []
        for part in parts:
            own = np.array([numbers[key] for key in part.shapes], np.int64)
            keys.append(np.repeat(own, np.diff(part._firsts)))
            rows = np.zeros((len(part._rows), 3 + 2 * dims), np.int64)
            rows[:, :3], own_dims = part._rows[:, :3], (part._rows.shape[1] - 3) // 2
            rows[:, 0] += len(files)
            rows[:, 3 : 3 + own_dims], rows[:, 3 + dims : 3 + dims + own_dims] = np.split(part._rows[:, 3:], 2, axis=1)
            tables.append(rows)
            files += part._files
        return cls(shapes, files, *_sorted_by_key(np.concatenate(keys), np.concatenate(tables), len(shapes)))

    @classmethod
    def open(cls, path: str) -> "PieceIndex":
        handle = safe_open(path, framework="np")
        facts = {name: json.loads(text) for name, text in handle.metadata().items()}
        shapes = {key: tuple(shape) for key, shape in facts["shapes"].items()}
        rows, counts = handle.get_slice("rows"), facts.get("counts")
        if outside := next((name for name in facts["files"] if not is_inside(name)), None):
            raise store.DamagedFile(f"{INDEX} names a file outside of its folder: {outside}")
        return cls(shapes, facts["files"], handle.get_tensor("firsts"), rows, counts)

    def write(self, folder: str) -> dict:
        """Write the index into a checkpoint folder. Returns its entry in the manifest. Raises OSError."""
        counts = np.bincount(self._rows[:, 0], minlength=len(self._files)).tolist()
        facts = {"shapes": self.shapes, "files": self._files, "counts": counts}
        facts = {name: json.dumps(fact) for name, fact in facts.items()}
        return store.write_file(os.path.join(folder, INDEX), save({"firsts": self._firsts, "rows": self._rows}, facts))

    def overlapping(self, key: str, offset: tuple[int, ...], size: tuple[int, ...]) -> Iterator[Piece]:
        """The pieces of a tensor that may hold elements of the box of `size` at `offset`."""
        number, dims = self._numbers[key], len(offset)
        rows = self._rows[int(self._firsts[number]) : int(self._firsts[number + 1])]
        lows, sizes = np.split(rows[:, 3:], 2, axis=1)
        lows, sizes = lows[:, :dims], sizes[:, :dims]
        room, ends = np.array(self.shapes[key]) - lows, np.maximum(rows[:, 1], 0) + rows[:, 2]
        if (lows < 0).any() or (sizes < 0).any() or (sizes > room).any() or (ends > sizes.prod(1)).any():
            raise store.DamagedFile(f"{INDEX}: a piece of {key} does not fit its shape {self.shapes[key]}")
        first, last = lows.copy(), lows + sizes
        flat, row_length = rows[:, 1] != NOT_FLAT, np.maximum(sizes[:, 1:].prod(1), 1)
        starts, stops = rows[:, 1], rows[:, 1] + rows[:, 2]  # a stretch of a box covers some of its rows
        first[flat, 0] = (lows[:, 0] + starts // row_length)[flat]
        last[flat, 0] = (lows[:, 0] - -stops // row_length)[flat]
        near = ((first < np.add(offset, size)) & (last > offset)).all(1)
        for row, low, box in zip(rows[near, :3].tolist(), lows[near].tolist(), sizes[near].tolist()):
            start = None if row[1] == NOT_FLAT else row[1]
            yield Piece(key, self.shapes[key], self._files[row[0]], tuple(low), tuple(box), start, row[2])


def _sorted_by_key(keys, rows: np.ndarray, num_keys: int) -> tuple[np.ndarray, np.ndarray]:
    """(firsts, rows): the rows sorted by the number of their key, and where each key begins."""
    counts = np.bincount(np.asarray(keys, np.int64), minlength=num_keys)
    order = np.argsort(keys, kind="stable")
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64), np.ascontiguousarray(rows[order])


def open_index(folder: str) -> PieceIndex:
    """The index of a checkpoint. For an older one without an index, every file is opened once and read."""
    path = os.path.join(folder, INDEX)
    return PieceIndex.open(path) if os.path.exists(path) else PieceIndex.of_pieces(_pieces_in_files(folder))


def _pieces_in_files(folder: str) -> Iterator[Piece]:
    for name in sorted(name for name in os.listdir(folder) if name.endswith(".safetensors")):
        handle = safe_open(os.path.join(folder, name), framework="np")
        for key, facts in json.loads(handle.metadata()["pieces"]).items():
            length = math.prod(handle.get_slice(key).get_shape())
            shape, offset, box = (tuple(facts[field]) for field in ("shape", "offset", "box"))
            yield Piece(key, shape, name, offset, box, facts["start"], length)
