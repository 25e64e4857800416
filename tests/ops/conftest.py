"""What tests of several operations share."""

import pytest
import torch


@pytest.fixture
def poison():
    """New memory is full of NaN and of the largest integers."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
