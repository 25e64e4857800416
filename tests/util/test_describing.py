"""What describes capabilities: it may ask for the others, and its fields come into sections of the core."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Annotated, Any

import pytest

from dtgpt.capabilities import CAPABILITIES
from dtgpt.config.sections import CoreSection
from dtgpt.util import seams
from dtgpt.util.errors import UserError
from dtgpt.util.field_types import Bounds, check_fields

ASKS = """
from dtgpt.util import seams
found = [each.parts["versions"] for each in seams.capabilities()]
CAPABILITY = seams.Capability(versions=("asks:versions",))
def versions(): return {"asks": "1"}
"""
OTHER = """
from dtgpt.util.seams import Capability
CAPABILITY = Capability(versions=("other:versions",))
def versions(): return {"other": "1"}
"""


@pytest.fixture
def use(tmp_path, monkeypatch) -> Iterator[Any]:
    """Let the core have the capabilities that modules in a folder describe, until the test ends."""

    def write_and_use(**modules: str) -> None:
        for name, text in modules.items():
            (tmp_path / f"{name}.py").write_text(text)
        seams.use(modules)

    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield write_and_use
    seams.use(module for module, _ in CAPABILITIES)
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


def versions() -> list[Any]:
    return [part for each in seams.capabilities() for part in each.parts["versions"]]


@pytest.mark.parametrize("first", ["asks", "other"])
def test_a_module_that_asks_while_it_is_imported_finds_the_others(use, first):
    texts = {"asks": ASKS, "other": OTHER}
    use(**{name: texts[name] for name in sorted(texts, key=lambda name: name != first)})
    assert sorted(versions()) == ["asks:versions", "other:versions"]
    assert sys.modules["asks"].found == [("other:versions",)]


def test_a_module_that_is_imported_before_anybody_asks_describes_its_capability_then(use):
    use(asks=ASKS, other=OTHER)
    import asks

    assert asks.found == [("other:versions",)] and sorted(versions()) == ["asks:versions", "other:versions"]
    assert sorted(name for of in seams.listed("versions") for name in of()) == ["asks", "other"]


def test_a_module_that_describes_nothing_is_an_error_each_time(use):
    use(empty="")
    for _ in range(2):
        with pytest.raises(AttributeError, match="CAPABILITY"):
            seams.capabilities()


def test_fields_of_a_capability_come_behind_those_of_a_section_with_their_checks(use):
    use(
        fielded="""
from typing import Annotated
from dtgpt.util.field_types import Bounds
from dtgpt.util.seams import Capability

class LogFields:
    loudness: Annotated[int, "how loud", Bounds(0, 11)] = 3

CAPABILITY = Capability(log_fields=("fielded:LogFields",))
"""
    )

    @dataclass(frozen=True, kw_only=True)
    class Own(CoreSection, seam="log_fields"):
        interval: Annotated[int, "steps", Bounds(1)] = 10

    @dataclass(frozen=True, kw_only=True)
    class Derived(Own):
        more: int = 1

    assert [field.name for field in fields(Own)] == ["interval", "loudness"] and Own().loudness == 3
    assert [field.name for field in fields(Derived)] == ["interval", "loudness", "more"]
    with pytest.raises(UserError, match="loudness=12 is out of range"):
        check_fields(Own(loudness=12))


def test_a_section_without_a_seam_has_its_own_fields_alone():
    @dataclass(frozen=True, kw_only=True)
    class Own(CoreSection):
        interval: int = 10

    assert [field.name for field in fields(Own)] == ["interval"]
