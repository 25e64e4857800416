"""Calls of a recipe's own methods for prompts and rewards, whose failures end the run and not more.

Such a method is any code: it may start processes, wait for ever, end the process as if all had been done, or return in
a fork, which would go on with the training of its parent.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dtgpt.run.stop_request import StopRequest
from dtgpt.train.objective import StepFailed
from dtgpt.util.errors import UserError


class RolloutsFailed(StepFailed):
    """Prompts or rewards could not be made."""


class _Late(BaseException):
    """A call takes too long. No Exception, which the method might catch."""


def call_method(method: Callable[..., Any], *arguments: Any, seconds: float) -> Any:
    """Return what a method of the recipe returns within `seconds`. Raise RolloutsFailed where it raises anything, ends
    the process or takes longer."""
    own, name = os.getpid(), f"grpo.{method.__name__}"
    try:
        with _exits_raised(), _alarm(seconds):
            return method(*arguments)
    except UserError as error:  # a sentence of the recipe's own
        raise RolloutsFailed(str(error)) from None
    except SystemExit:  # which would end this process alone, perhaps as if all had been done
        raise RolloutsFailed(f"{name} ended the process (SystemExit); raise an error there") from None
    except _Late:
        told = f"{name} took longer than --timeout {seconds:g} seconds; limit its time there, or use a larger --timeout"
        raise RolloutsFailed(told) from None
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and not _stops_at_steps():
            raise  # of a user
        raise RolloutsFailed(f"{name} failed with {type(error).__name__}: {error}") from error
    finally:
        if os.getpid() != own:
            os._exit(1)


def _stops_at_steps() -> bool:
    """Return whether Ctrl-C is met by the end of a step, and raises nothing here."""
    return isinstance(getattr(signal.getsignal(signal.SIGINT), "__self__", None), StopRequest)


@contextmanager
def _exits_raised() -> Iterator[None]:
    """Let `os._exit` raise SystemExit where the recipe calls it in this thread of this process."""
    real, here = os._exit, (os.getpid(), threading.get_ident())

    def told(code: int) -> None:
        # What ends a process at a second signal is not the recipe's.
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if (os.getpid(), threading.get_ident()) != here or caller.startswith("dtgpt."):
            real(code)
        raise SystemExit(code)

    os._exit = told  # type: ignore[assignment]
    try:
        yield
    finally:
        os._exit = real


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raise _Late after so many seconds; not where the recipe, or another library, uses the alarm itself, and not in
    a thread."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL:
        yield
        return

    def ring(*_: Any) -> None:
        raise _Late

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, min(seconds, threading.TIMEOUT_MAX))
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGALRM) is ring:
            signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
