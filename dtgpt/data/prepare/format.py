"""Files of which `dtgpt prepare` makes data, as the core asks for them."""

import re
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

from dtgpt.config.sections import DataConfig
from dtgpt.data.open import DataFormat


class Files(DataFormat):
    def check_text(self, data: DataConfig, path: str, model: Path | None) -> None:
        """Raise UserError for a table, with the lines that make JSON lines of it."""
        if re.search(r"\.[ct]sv(\.\w+)?$", path.lower()):  # perhaps compressed
            from dtgpt.data.prepare.inputs import check_not_csv

            check_not_csv(path)

    def documents(self, path: str, json_key: str) -> Iterator[str] | None:
        """Return the documents of JSON lines."""
        if not path.endswith(".jsonl"):
            return None
        from dtgpt.data.prepare.documents import read_json_lines

        return read_json_lines(path, json_key)

    def unpacked(self, file: BufferedReader, name: str) -> Iterator[bytes]:
        from dtgpt.data.prepare.compressed import decompressed

        return decompressed(file, name)


FILES = Files()
