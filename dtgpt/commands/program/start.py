"""What is done as the program begins, before torch is imported, and as it fails."""

import getpass
import json
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

from dtgpt.util.console import say_interrupted


def interrupt_imports() -> None:
    """Let Ctrl-C end the process at once while a module is imported, since C++ code that torch runs then cannot pass an
    exception on. At other times it still raises KeyboardInterrupt."""
    main = threading.current_thread() is threading.main_thread()
    if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            say_interrupted()
            os._exit(128 + number)
        frame = frame.f_back
    raise KeyboardInterrupt


def check_current_folder() -> str | None:
    """Return what to say where the current folder was removed. torch ends a process there at its import, with a
    sentence about a library that cannot be loaded."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return "the current folder was removed; go to one that exists (cd), and start again"
    return None


def name_user() -> None:
    """Set $USER in containers where the user has no name: torch.compile and others name folders by it."""
    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ["USER"] = f"uid{os.getuid()}"


def hand_to_torchrun(sentence: str) -> None:
    """Let torchrun's report of the process that failed first end with `sentence`, in place of advice on tracebacks."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        report = {"message": {"message": sentence, "extraInfo": {"timestamp": str(int(time.time()))}}}
        with suppress(OSError):
            Path(file).write_text(json.dumps(report))
