"""What several capabilities need of torch that it gives by a private name alone: groups by their names, and texts that
ranks leave for each other in the store of the process group. These are no collective: any thread may do so at any time.
"""

from contextlib import suppress
from typing import Any, cast

import torch.distributed as dist
from torch.distributed import distributed_c10d


def group_of_name(name: str) -> dist.ProcessGroup:
    """Return the process group whose `group_name` this is."""
    return distributed_c10d._resolve_process_group(cast(Any, name))  # a string subtype of torch, for types alone


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
