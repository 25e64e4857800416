"""Data sets of the Hub as the data of a run, as the core asks for them."""

from collections.abc import Iterator

from dtgpt.data.open import DataFormat
from dtgpt.hub.names import PREFIX


class NamedData(DataFormat):
    def is_name(self, path: str) -> bool:
        return path.startswith(PREFIX)

    def named_documents(self, name: str, json_key: str) -> Iterator[str] | None:
        if not name.startswith(PREFIX):
            return None
        from dtgpt.hub.rows import texts

        return texts(name, json_key)


DATA = NamedData()
