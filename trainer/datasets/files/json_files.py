"""Read JSON and JSON Lines files as tables: texts and numbers with their types, lists and objects as unchanged JSON.

The reader of the datasets library gives types to their content. 1 becomes 1.0 if another row has 1.5. Keys of one row
become null in all others, and "2024-05-01" becomes a date.
"""

import io
import json
import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO, ClassVar

import datasets
import pyarrow as pa
import pyarrow.json as paj
from datasets.builder import Key
from datasets.features.features import register_feature

from trainer.datasets.files.input_checks import check_columns
from trainer.datasets.rows import AsWritten, Written, unique, written
from trainer.limits import MB, limit

READER_VERSION = "4"  # raise this if the same file would give another table: an older cache file must not be used
CHUNK_BYTES = 64 << 20
# names under which one object holds all rows of a file
LISTS_OF_ROWS = ("data", "rows", "train", "examples", "samples", "instances", "items", "records")
TYPES = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}
SPACE = re.compile(r"[ \t\r\n]*")
ENCODER = json.JSONEncoder(ensure_ascii=False, default=str)  # default: other sets may hold Arrow's dates
NESTING = (dict, list, Written)
DECODER = json.JSONDecoder(object_pairs_hook=unique, parse_float=written)


@dataclass
class JsonText(datasets.Json):
    """The feature of a column of lists or objects. Unlike its base class, it keeps all digits of their numbers."""

    pa_type: ClassVar[Any] = pa.string()
    _type: str = field(default="JsonText", init=False, repr=False)

    def encode_example(self, value: Any) -> str:
        return json_of(value)

    def decode_example(self, value: str, token_per_repo_id: Any = None) -> Any:
        return json.loads(value, object_hook=AsWritten, parse_float=written)

    def cast_storage(self, storage: pa.Array) -> pa.Array:
        if pa.types.is_string(storage.type):
            return storage
        values = (_own_values(value, storage.type) for value in storage.to_pylist())
        return pa.array([None if value is None else self.encode_example(value) for value in values], pa.string())


@dataclass
class JsonNumber(JsonText):
    """The feature of a column of numbers that keeps their texts: 1.50 stays 1.50, and 1 beside 2.5 stays 1."""

    _type: str = field(default="JsonNumber", init=False, repr=False)


def json_of(value: Any) -> str:
    """The JSON of a value, with the texts of its numbers as they were written."""
    if isinstance(value, Written):
        return value.text
    if isinstance(value, dict) and any(isinstance(child, NESTING) for child in value.values()):
        return "{" + ", ".join(f"{ENCODER.encode(str(key))}: {json_of(child)}" for key, child in value.items()) + "}"
    if isinstance(value, list) and any(isinstance(child, NESTING) for child in value):
        return "[" + ", ".join(map(json_of, value)) + "]"
    return ENCODER.encode(value)


def _own_values(value: Any, kind: pa.DataType) -> Any:
    """A value from Arrow, without the nulls that Arrow adds for keys of other rows."""
    if value is None:
        return None
    if isinstance(kind, pa.JsonType):
        return json.loads(value)
    if pa.types.is_struct(kind):
        return {key.name: _own_values(value[key.name], key.type) for key in kind if value[key.name] is not None}
    return [_own_values(item, kind.value_type) for item in value] if isinstance(value, list) else value


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the library warns that this function is experimental
    register_feature(JsonText, "JsonText")
    register_feature(JsonNumber, "JsonNumber")


def as_json(rows: datasets.Dataset, column: str) -> datasets.Dataset:
    """The rows with a column that may hold any JSON value. A column of bytes stays."""
    if "binary" in str(rows.data.schema.field(column).type):
        return rows
    values, name = [None if value is None else json_of(value) for value in rows[column]], f"{column} as JSON"
    return rows.add_column(name, values, feature=JsonText()).remove_columns(column).rename_column(name, column)


def read_json_files(patterns: dict[str, list[str]]) -> datasets.DatasetDict:
    """Read the rows of each split and cache them on disk. patterns: split -> glob patterns of its JSON files.

    Every row has the columns of all files, and None where it has no value. Raises the reader's own errors. They often
    lack the file name and the line: see `read_faults`.
    """
    kept = _JsonBuilder(data_files=patterns, hash=READER_VERSION).cache_dir + ".columns.json"
    columns = None
    if os.path.exists(kept):  # the columns that an earlier read of these files needed
        with open(kept) as file:
            columns = datasets.Features.from_dict(json.load(file))
    while True:
        builder = _JsonBuilder(data_files=patterns, features=columns, hash=READER_VERSION)
        try:
            builder.download_and_prepare()
            return builder.as_dataset()
        except Exception as error:
            if not isinstance(error.__cause__, _MoreColumns):
                raise
            columns = error.__cause__.args[0]
            with open(f"{kept}.{os.getpid()}", "w") as file:
                json.dump(columns.to_dict(), file)
            os.replace(file.name, kept)


class _MoreColumns(Exception):
    """args: the columns (Features) of all rows read so far. They are more than the columns at the start of the read."""


@dataclass
class _Config(datasets.BuilderConfig):
    features: datasets.Features | None = None


class _JsonBuilder(datasets.ArrowBasedBuilder):
    BUILDER_CONFIG_CLASS = _Config

    def _info(self) -> datasets.DatasetInfo:
        return datasets.DatasetInfo(features=self.config.features)

    def _split_generators(self, dl_manager: Any) -> list[datasets.SplitGenerator]:
        splits = self.config.data_files.items()
        paths = {name: dl_manager.download_and_extract(list(files)) for name, files in splits}  # may be compressed
        return [datasets.SplitGenerator(name=str(name), gen_kwargs={"files": files}) for name, files in paths.items()]

    def _generate_shards(self, files: list[str]) -> Iterator[str]:
        yield from files

    def _generate_tables(self, files: list[str]) -> Iterator[tuple[Key, pa.Table]]:
        for file_index, name in enumerate(files):
            for index, (table, columns) in enumerate(_tables(name)):
                known = self.info.features
                # A column may be empty or absent at first and full later: start again with all known columns
                self.info.features = _merged(known, columns, name)
                if known is not None and self.info.features != known:
                    raise _MoreColumns(self.info.features)
                yield Key(file_index, index), _as_columns(table, self.info.features)
        if self.info.features is None:  # no file had any rows
            self.info.features = datasets.Features()
            yield Key(0, 0), pa.table({})


def _merged(known: datasets.Features | None, found: datasets.Features, name: str) -> datasets.Features:
    merged = dict(known or {})
    for column, feature in found.items():
        pair = {_dtype(merged.setdefault(column, feature)), _dtype(feature)}
        if len(pair) == 2 and "null" not in pair and not pair <= {"int64", "float64", "number"}:
            raise ValueError(f"column {column!r} is {_dtype(feature)} in {name} but {_dtype(merged[column])} before")
        if _dtype(merged[column]) == "null":
            merged[column] = feature
        elif len(pair) == 2 and "null" not in pair:
            merged[column] = JsonNumber()
    check_columns(len(merged), name)
    return datasets.Features(merged)


def _dtype(feature: Any) -> str:
    return "number" if isinstance(feature, JsonNumber) else getattr(feature, "dtype", "json")


def _as_columns(table: pa.Table, columns: datasets.Features) -> pa.Table:
    schema, present = columns.arrow_schema, set(table.column_names)
    arrays = [
        _cast(table[field.name], field.type) if field.name in present else pa.nulls(len(table), field.type)
        for field in schema
    ]
    return pa.table(arrays, schema=schema)


def _cast(column: Any, kind: pa.DataType) -> Any:
    if pa.types.is_string(kind) and column.type in (pa.int64(), pa.float64()):  # for `JsonNumber`
        return pa.array([None if value is None else repr(value) for value in column.to_pylist()], kind)
    return column.cast(kind, safe=False)


def is_array(file: BinaryIO) -> bool:
    """Whether a file is one JSON array, not lines. The file is at its beginning before and after."""
    start = file.read(256).lstrip(b"\xef\xbb\xbf \t\r\n")
    file.seek(0)
    return start.startswith(b"[")


def _tables(name: str) -> Iterator[tuple[pa.Table, datasets.Features]]:
    with open(name, "rb") as file:
        if is_array(file):
            rows = DECODER.decode(file.read().decode("utf-8-sig"))
            # the library reads an array of texts as rows with one column
            yield _table_of_rows([{"text": row} if isinstance(row, str) else row for row in rows])
            return
        number = 0
        while chunk := file.read(CHUNK_BYTES):
            if len(end := file.readline(limit("row_mb") * MB)) == limit("row_mb") * MB:
                raise ValueError(f"a line of {name} has more than {limit('row_mb')} MB; --limits row_mb=N raises it")
            chunk, number = (chunk + end).removeprefix(b"\xef\xbb\xbf"), number + 1
            if chunk.strip():
                table, columns = _table_of_lines(chunk)
                if number == 1 and len(table) == 1 and (key := list_of_rows(table)):
                    raise Wrapped(key)
                yield table, columns


class Wrapped(ValueError):
    """args: the key under which the only object of a file holds rows."""


def list_of_rows(table: pa.Table) -> str | None:
    """The key under which the only row of a table holds a list of objects as rows, or None."""
    for key in LISTS_OF_ROWS:
        value = table[key][0].as_py() if key in table.column_names else None
        if isinstance(value, str) and value.startswith("[{"):
            return key
    return None


def _table_of_lines(chunk: bytes) -> tuple[pa.Table, datasets.Features]:
    text = chunk.decode()
    first = next(_rows(text))
    if isinstance(first, dict) and not any(isinstance(value, (dict, list)) for value in first.values()):
        try:
            # This is several times faster. One block only: the library says that Arrow may crash on several blocks.
            check_columns(len(first), "a JSON file")
            table = paj.read_json(io.BytesIO(chunk), paj.ReadOptions(block_size=len(chunk) + 1))
            known = all(pa.types.is_null(kind) or kind in TYPES.values() for kind in table.schema.types)
            if known and _has_plain_numbers(chunk, table):
                return table, datasets.Features.from_arrow_schema(table.schema)
        except pa.ArrowException:
            pass
    return _table_of_rows(list(_rows(text)))


def _has_plain_numbers(chunk: bytes, table: pa.Table) -> bool:
    """Whether lines have their numbers with a point as `written` takes them for plain ones. A doubt is a no."""
    for field_ in table.schema:
        if field_.type == pa.float64():
            key = re.escape(ENCODER.encode(field_.name).encode())
            texts = re.findall(rb"%b\s*:\s*(-?[0-9][0-9.eE+-]*)" % key, chunk)
            values = table[field_.name].drop_null().to_pylist()
            if [repr(value).encode() for value in values] != texts or any(
                isinstance(written(t.decode()), Written) for t in texts
            ):
                return False
    return True


def _rows(text: str) -> Iterator[Any]:
    """Yield each row. A row may span several lines, as Arrow also allows."""
    end = SPACE.match(text).end()
    while end < len(text):
        row, end = DECODER.raw_decode(text, end)
        yield row
        end = SPACE.match(text, end).end()


def _table_of_rows(rows: list[Any]) -> tuple[pa.Table, datasets.Features]:
    if not all(row is None or isinstance(row, dict) for row in rows):
        raise ValueError("a row that is not an object")
    arrays, features = {}, {}
    columns = dict.fromkeys(key for row in rows if row for key in row)
    check_columns(len(columns), "a JSON file")
    for column in columns:
        values = [row.get(column) if row else None for row in rows]
        present = [value for value in values if value is not None]
        kinds = set(map(type, present))
        is_written = len(kinds) + (Written in kinds) > 1 and kinds <= {int, float, Written}
        if kinds == {int} and max(map(abs, present)) >= 1 << 63:  # as Arrow does
            kinds, values = {float}, [None if value is None else float(value) for value in values]
        if len(kinds) > 1 and not is_written:
            raise ValueError(f"column {column!r} has values of several types")
        nested = bool(kinds & {list, dict}) or is_written
        if nested:
            values = [None if value is None else json_of(value) for value in values]
        arrays[column] = pa.array(
            values, pa.string() if nested else TYPES.get(*kinds, pa.string()) if kinds else pa.null()
        )
        features[column] = (
            JsonNumber() if is_written else JsonText() if nested else datasets.Value(str(arrays[column].type))
        )
    return pa.table(arrays), datasets.Features(features)
