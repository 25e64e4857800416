"""The exception whose message a user reads, how foreign values look in it, and remedies of system errors.

Whatever goes wrong by what a user gave is one sentence: the value, the rule, the remedy. The value may be of a file
that somebody else wrote, so it is shown short and printable, whatever it is."""

import builtins
import errno
import reprlib
from typing import Any

MOST_SHOWN = 120  # characters of a value in a message
LONGEST_PATH = 4096  # characters of any path that can exist
LARGEST_SHOWN = 10**40  # integers above it are shown by their size: printing takes time that grows with its square
NO_TEMPORARY = "No usable temporary directory"  # begins the error of Python's tempfile, which is like a missing file
REMEDIES = {
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free space there",
    errno.EFBIG: "raise the limit on the size of a file (ulimit -f), or choose another file system",
    errno.EACCES: "choose a place that can be read and written",
    errno.EPERM: "choose a place that can be read and written",
    errno.EROFS: "choose a place that can be written",
    errno.ENAMETOOLONG: "use a shorter path",
    errno.ENOTDIR: "choose another path",
    errno.EISDIR: "choose another path",
    errno.ELOOP: "remove the link, or choose another path",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: "close files of other programs",
    errno.EIO: "check the disk",
    errno.ESTALE: "mount the file system anew",
}


class UserError(Exception):
    """Bad input: one sentence that names the value, the rule and the remedy. Shown without a traceback, exit code 2."""


def remedy(error: BaseException, otherwise: str = "") -> str:
    """Return what a user can do about an error of the system, `otherwise` where no remedy is known for it."""
    return REMEDIES.get(getattr(error, "errno", 0), otherwise)


def sentence_of(error: OSError) -> str | None:
    """Return an error of the system as a sentence with the file and a remedy; None where no remedy is known for it."""
    if str(error.strerror).startswith(NO_TEMPORARY):
        return f"{error.strerror}; free space there, or set TMPDIR to a folder that can be written"
    if not remedy(error):
        return None
    name = str(error.filename or "")
    place = f"{name if len(name) <= LONGEST_PATH else shown(name)}: " if name else ""
    return f"{place}{error.strerror}; {remedy(error)}"


class _Short(reprlib.Repr):
    """Looks at a few elements of a few levels, so that neither size nor nesting of a value matters."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring = 3, 100

    def repr_int(self, x: int, level: int) -> str:
        return builtins.repr(x) if abs(x) < LARGEST_SHOWN else f"<integer of {x.bit_length()} bits>"

    def repr_bytes(self, x: Any, level: int) -> str:
        return self.repr_str(x, level)

    repr_bytearray = repr_bytes

    def repr_instance(self, x: Any, level: int) -> str:
        """Show other types by their own text only where that is short by nature: a foreign object's may be endless."""
        ours = type(x).__module__.partition(".")[0] in ("torch", "dtgpt") and not hasattr(x, "numel")  # no tensor
        short = ours or x is None or isinstance(x, bool | float | complex | type)
        return builtins.repr(x) if short else f"<{type(x).__name__}>"


def shown(value: Any) -> str:
    """Return `value` as Python writes it, shortened to fit into a sentence. Takes the same short time for any value
    that a foreign file or a command line may hold: nested, shared, huge."""
    text = _Short().repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 3]}..."


def shown_name(value: Any) -> str:
    """Return a foreign name, or another text, without quotes where it is short and printable; else
    shortened, as Python writes it."""
    plain = isinstance(value, str) and len(value) <= MOST_SHOWN and value.isprintable()
    return value if plain else shown(value)
