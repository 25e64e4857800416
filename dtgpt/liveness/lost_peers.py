"""Errors that say that another process of the run is lost."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

from dtgpt.util.errors import UserError

LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "remote process exit",
)
LATE = ("timed out", "timeout")


class LostPeer(UserError):
    """Another process of the run has ended."""


@contextmanager
def lost_peers_as_user_errors(timeout: float, remedy: Callable[[], str]) -> Iterator[None]:
    """Turn what gloo, the store of the rendezvous and NCCL raise on the remaining ranks when another one has died, or
    did not answer within `timeout` seconds, into a UserError with this remedy. NCCL's watchdog ends most such ranks by
    itself."""
    try:
        yield
    except RuntimeError as error:
        sentence = "another process of the run {}; see what it says, and {}"
        if is_late(error):
            raise UserError(sentence.format(f"did not answer within timeout={timeout:g} s", remedy())) from None
        if is_loss(error):
            raise LostPeer(sentence.format("ended", remedy())) from None
        raise


def is_late(error: BaseException) -> bool:
    """Return whether a collective or the store has waited too long for another process."""
    return any(words in str(error).lower() for words in LATE) and (_of_store(error) or "gloo" in str(error))


def is_loss(error: BaseException) -> bool:
    """Return whether a collective, or the store, has failed since another process has ended."""
    return isinstance(error, LostPeer) or _of_store(error) or any(words in str(error) for words in LOST)


def _of_store(error: BaseException) -> bool:
    return isinstance(error, dist.DistNetworkError | dist.DistStoreError)
