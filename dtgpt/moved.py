"""Old names of modules that stand in another place now. They can be imported for one version, with a warning."""

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# (old folder, new folder): names of modules in it, "old>new" where the name is another one.
FOLDERS = {
    ("dtgpt.run", "dtgpt.run.stops"): "signals",
    ("dtgpt.util", "dtgpt.util.machine"): "threads",
}


def _moved() -> dict[str, str]:
    found = {}
    for (old, new), names in FOLDERS.items():
        for name in names.split():
            before, _, after = name.partition(">")
            found[f"{old}.{before}"] = f"{new}.{after or before}"
    return found


MOVED = _moved()


class _Old(MetaPathFinder, Loader):
    """Answers an import of an old name with the module of today, so that both are one."""

    def __init__(self) -> None:
        self._specs: dict[str, ModuleSpec | None] = {}

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = MOVED[spec.name]
        warnings.warn(f"{spec.name} is {new} now; the old name ends with the next version", FutureWarning, stacklevel=2)
        module = importlib.import_module(new)
        # From now on before the search on disk, which would find a module of a moved folder again, by its old name.
        sys.meta_path.remove(self)
        sys.meta_path.insert(0, self)
        self._specs[spec.name] = module.__spec__  # which the import replaces by that of the old name
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = self._specs.pop(module.__spec__.name)


def serve_old_names() -> None:
    """Let the old names be imported."""
    sys.meta_path.append(_Old())  # after the search on disk, so that an import of today's names does not come here
