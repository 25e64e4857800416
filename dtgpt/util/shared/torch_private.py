"""Texts that ranks leave for each other in the store of the process group, which torch gives by a private name alone.
No collective: any thread may do so at any time."""

from contextlib import suppress

import torch.distributed as dist
from torch.distributed import distributed_c10d


def post(name: str, text: str) -> None:
    """Leave a text for the other ranks. Raises RuntimeError where the store is gone."""
    _default_store().set(f"dtgpt/{name}", text)


def posted(name: str) -> str | None:
    """Return the text that any rank has left under this name; None where there is none, or the store is gone."""
    with suppress(RuntimeError):
        store, key = _default_store(), f"dtgpt/{name}"
        return store.get(key).decode() if store.check([key]) else None
    return None


def _default_store() -> dist.Store:
    """Return the store through which the ranks of the default group met. Raises RuntimeError where there is none."""
    try:
        return distributed_c10d._get_default_store()
    except ValueError as error:
        raise RuntimeError(str(error)) from None
