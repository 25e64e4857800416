"""The folders of recipe files, from which they import modules of their own."""

import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType

_before: dict[Path, set[str]] = {}  # by folder of recipe files: the modules that were there before its own


def import_beside(folder: Path) -> None:
    """Let a recipe file, and what it calls later, import modules of its folder, as `python RECIPE.py` does. Those of
    another folder are forgotten: two recipes may have a `model.py` each."""
    for other in _before.keys() - {folder}:
        before = _before.pop(other)
        for root in {name.partition(".")[0] for name in sys.modules.keys() - before} - before:
            if _is_beside(other, sys.modules.get(root)):
                for name in [name for name in sys.modules if name.partition(".")[0] == root]:
                    del sys.modules[name]
        with suppress(ValueError):
            sys.path.remove(str(other))
    if folder not in _before:
        sys.path.insert(0, str(folder))
        _before[folder] = set(sys.modules)


def _is_beside(folder: Path, module: ModuleType | None) -> bool:
    places = getattr(module, "__path__", None) or [getattr(module, "__file__", None)]
    return any(Path(place).parent == folder for place in places if place)
