"""Archives of fixtures."""

import tarfile
from pathlib import Path


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a tar file of ours into a folder."""
    with tarfile.open(archive) as opened:
        if hasattr(tarfile, "data_filter"):  # Python 3.11.4 and later
            opened.extraction_filter = tarfile.data_filter
        opened.extractall(folder)
