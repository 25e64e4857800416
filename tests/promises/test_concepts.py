"""The files that docs/concepts.md names."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/concepts.md").read_text()


def test_the_files_are_there():
    named = re.findall(r"dtgpt/[\w/]+(?:\.py)?", PAGE)
    assert len(named) == 8 and all((ROOT / name).exists() for name in named)
