"""Names of PyTorch that what capabilities share uses although they are private."""

import torch.distributed as dist
from torch.distributed import distributed_c10d


def default_store() -> dist.Store:
    """Return the store through which the ranks of the default group met. Raises RuntimeError where there is none."""
    try:
        return distributed_c10d._get_default_store()
    except ValueError as error:
        raise RuntimeError(str(error)) from None
