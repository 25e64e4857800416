"""Files of vocabularies, of any format."""

from pathlib import Path

from dtgpt.data.tokenizers.open import LARGEST
from dtgpt.util.errors import UserError
from dtgpt.util.storage import read_regular


def read_content(path: Path) -> bytes:
    """Return the bytes of a file. Raise UserError where it cannot be read, is not a regular one or is larger than any
    vocabulary."""
    try:
        return read_regular(path, LARGEST)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; give the file of a vocabulary") from None
