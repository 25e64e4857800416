"""docs/architecture.md reads the core aloud: each of its files once, in an order."""

import re

from tests.support.core import PACKAGE, ROOT, files, room_of

PAGE = ROOT / "docs" / "architecture.md"
SECTION = re.compile(r"^## The core, in the order in which to read it\n(.*?)^## ", re.DOTALL | re.MULTILINE)


def test_every_file_of_the_core_is_named_once_in_the_order_of_reading():
    (section,) = SECTION.findall(PAGE.read_text())
    named = re.findall(r"^\| `([\w/]+\.py)`", section, re.MULTILINE)
    core = {str(path.relative_to(PACKAGE)) for path in files().values() if room_of(path) is not None}
    assert sorted(named) == sorted(core)
