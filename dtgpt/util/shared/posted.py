"""Texts that ranks leave for each other in the store of the process group. No collective: any thread may do so at any
time."""

from contextlib import suppress

from dtgpt.util.shared.torch_private import default_store


def post(name: str, text: str) -> None:
    """Leave a text for the other ranks. Raises RuntimeError where the store is gone."""
    default_store().set(f"dtgpt/{name}", text)


def posted(name: str) -> str | None:
    """Return the text that any rank has left under this name; None where there is none, or the store is gone."""
    with suppress(RuntimeError):
        store, key = default_store(), f"dtgpt/{name}"
        return store.get(key).decode() if store.check([key]) else None
    return None
