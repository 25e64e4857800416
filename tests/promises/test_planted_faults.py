"""The faults that `benchmarks/planted_faults.py` plants can still be planted."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_line_of_each_planted_fault_is_there_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from faults import FAULTS
    from located_faults import LOCATED

    for faults in (FAULTS, [located.fault for located in LOCATED]):
        counts = {fault.name: (ROOT / fault.path).read_text().count(fault.old) for fault in faults}
        assert counts == dict.fromkeys(counts, 1) and len(counts) == len(faults) >= 20
