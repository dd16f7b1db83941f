"""Text files line by line: as rows, or as a stream with a limit for a line. The mark of UTF-8 at the start is no text."""

from collections.abc import Iterator
from typing import Any

import datasets
import pyarrow as pa
from datasets.builder import Key
from datasets.packaged_modules.text.text import Text

from trainer.datasets.library import place_of_file
from trainer.errors import UserError
from trainer.limits import MB, limit, lines_of, too_large

ENCODING = "utf-8-sig"  # without the mark of UTF-8 that some programs put first


def read_text_files(patterns: dict[str, list[str]], names: list[str], where: str) -> datasets.DatasetDict:
    """The lines of each split as rows with the column `text`. Raises UserError for a line with a carriage return inside:
    the library would make two rows of it."""
    for name in names:
        for number, line in enumerate(lines_of(name), 1):
            if b"\r" in line.rstrip(b"\r\n"):
                cure = "lines that end with \\n or \\r\\n, as tr '\\r' '\\n' writes them; or .jsonl, whose texts may hold it"
                raise UserError(
                    f"{place_of_file(name, where)} line {number}", "a carriage return inside the line", cure
                )
    return datasets.load_dataset("text", data_files=patterns, encoding=ENCODING)


class Lines(Text):
    """Rows with one column: the lines without their ends. A line without an end could fill the memory."""

    def _generate_tables(self, base_files: list[str], files_iterables: list) -> Iterator[tuple[Key, pa.Table]]:
        [column], most = self.config.features, limit("row_mb") * MB
        for shard, files in enumerate(files_iterables):
            for name in files:
                with open(
                    name, encoding=self.config.encoding
                ) as file:  # the library's own, which reads URLs and unpacks
                    block = 0
                    while text := file.read(self.config.chunksize):
                        if len(end := file.readline(most)) == most:
                            raise too_large(name, f"a line has more than {limit('row_mb')} MB", "row_mb")
                        lines: list[Any] = (text + end).split("\n")
                        lines = lines[:-1] if not lines[-1] else lines
                        yield Key(shard, block), self._cast_table(pa.table({column: lines}))
                        block += 1
