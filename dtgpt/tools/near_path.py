"""What somebody may have meant by a path that does not exist."""

import difflib
import os
from itertools import islice
from pathlib import Path

MOST_NAMES = 10_000  # of a folder in which a name like another one is looked for


def near_path(path: Path) -> Path | None:
    """Return the existing path whose name is most like that of a `path` that does not exist; None where none is like
    it. A wrong folder on the way is looked for, too."""
    found = Path(path.anchor)
    try:
        for part in path.parts[len(found.parts) :]:
            if part != ".." and not os.path.lexists(found / part):
                names = [entry.name for entry in islice(os.scandir(found), MOST_NAMES)]
                part = next(iter(difflib.get_close_matches(part, names, n=1, cutoff=0.7)), "")
                if not part:
                    return None
            found /= part
    except (OSError, ValueError):  # a folder that cannot be read, or a path that cannot exist
        return None
    return found if found != path and found.name.isprintable() else None
