"""Modules that stand in another place are found under their old names, with a warning."""

import importlib

import pytest

from dtgpt.moved import MOVED
from tests.support.fresh import run_fresh

RECIPE = """
import sys, warnings
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    from dtgpt.run.signals import Signals as old
    import dtgpt.util.threads
from dtgpt.run.stops.signals import Signals as new
assert old is new and dtgpt.util.threads is sys.modules["dtgpt.util.machine.threads"]
assert dtgpt.util.threads.__spec__.name == "dtgpt.util.machine.threads"
print(*(str(one.message) for one in told), sep="\\n")
"""


def test_every_old_name_has_a_module_of_today():
    for old, new in MOVED.items():
        assert importlib.util.find_spec(new), (old, new)


@pytest.mark.slow(2)
def test_an_old_name_is_the_module_of_today_and_warns(tmp_path):
    told = run_fresh(["-c", RECIPE], tmp_path)
    assert told.returncode == 0, told.stderr
    assert told.stdout.splitlines() == [
        f"{old} is {MOVED[old]} now; the old name ends with the next version"
        for old in ("dtgpt.run.signals", "dtgpt.util.threads")
    ]
