"""The core alone, copied once for the tests that run it."""

import pytest

from dtgpt.capabilities import CAPABILITIES
from tests.support.deleted import copy_tests, delete


@pytest.fixture(scope="session")
def core_alone(tmp_path_factory):
    """Return a folder with the package, every capability deleted, and the tests of the core."""
    folder = tmp_path_factory.mktemp("core")
    copy_tests(folder, delete(folder, [name for name, _ in CAPABILITIES]))
    return folder
