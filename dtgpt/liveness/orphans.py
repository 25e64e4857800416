"""A process whose launcher is gone: without torchrun nobody would end it, and its device would stay in use."""

import os
import signal
import threading
import time
from contextlib import suppress

from dtgpt.run.stops import signals
from dtgpt.util.console import say_error

POLL = 1.0  # seconds between two looks at whether the launcher still runs
ORPHAN = 120.0  # seconds that a process without its launcher has for the step and the checkpoint
_followed = threading.Semaphore(0)  # 1 while the launcher is followed and nobody has noticed its loss


def follow_torchrun() -> None:
    """Watch from now on whether torchrun still runs. If it is gone without having ended this process, send SIGTERM, as
    torchrun would have, and end the process 120 s later, even if it is blocked."""
    _followed.release()
    signals.when_stopped.append(_notice_loss)  # another rank may have noticed it first and asked all to end
    with suppress(RuntimeError):  # there can be no more threads
        threading.Thread(target=_end_after_launcher, name="launcher", daemon=True).start()


def _end_after_launcher() -> None:
    while os.getppid() == signals.LAUNCHER:
        time.sleep(POLL)
    if _notice_loss():
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN)
    os._exit(128 + signal.SIGTERM)


def _notice_loss() -> bool:
    """Return whether the launcher that this process follows is gone and no earlier call has found this. The first
    process of a node says so."""
    if os.getppid() == signals.LAUNCHER or not _followed.acquire(blocking=False):
        return False
    if os.environ.get("LOCAL_RANK", "0") == "0":
        name = "dtgpt" if os.environ["TORCHELASTIC_RUN_ID"] == "dtgpt" else "torchrun"  # `dtgpt train --nproc`
        say_error(f"dtgpt: {name} (process {signals.LAUNCHER}) is gone, and the processes that it started end too")
    return True
