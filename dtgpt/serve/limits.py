"""What a server accepts of a client."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RequestLimits:
    """Sizes, numbers and times that a request must keep."""

    body: int = 2**20  # bytes
    nesting: int = 32  # levels of lists and objects in a JSON body
    read_seconds: float = 30.0  # for a body to arrive
    prompts: int = 128  # of a request
    queue: int = 1024  # rows (sequences) of all requests that are not finished
    seconds: float = 300.0  # for a request whose body has been read
    retry_after: int = 1  # seconds after which a client that was refused should ask again
    stalled: float = 30.0  # seconds without a round, with work waiting, after which the server is not healthy
