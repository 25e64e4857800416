"""The one exception that is meant for the user's eyes, and what to do about errors of the system."""

import errno

REMEDIES = {
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free space there",
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
    return REMEDIES.get(getattr(error, "errno", None), otherwise)
