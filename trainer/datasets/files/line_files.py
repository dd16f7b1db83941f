"""Stream text files line by line, as the reader of the datasets library does, with a limit for a line."""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from datasets.builder import Key
from datasets.packaged_modules.text.text import Text

from trainer.limits import MB, limit, too_large


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
