"""GPT-2's vocabulary for tests, from the repository."""

import gzip
from pathlib import Path

DATA = Path(__file__).parent / "data"


def gpt2_files(folder: Path) -> tuple[Path, Path]:
    """vocab.json and merges.txt, unpacked into `folder`."""
    paths = folder / "vocab.json", folder / "merges.txt"
    for path in paths:
        path.write_bytes(gzip.decompress((DATA / "gpt2" / f"{path.name}.gz").read_bytes()))
    return paths
