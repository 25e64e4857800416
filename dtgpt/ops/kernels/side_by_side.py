"""Triton kernels that are compiled side by side, each in a thread of its own, in place of being launched.

Threads do, since what takes long, LLVM, ptxas and the C compiler of the launchers, does not hold Python's lock. Triton
has this (`AsyncCompileMode`) for kernels whose arguments one knows; here a pass says what it would launch.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from dtgpt.util.shared.environment import usable_cores

MOST_THREADS = 16


@contextmanager
def compiling(device: torch.device) -> Iterator[None]:
    """Compile what is launched while the context lasts, and launch nothing; at its end all is compiled. Where this
    version of Triton cannot, raise AttributeError."""
    try:
        from triton.runtime._async_compile import AsyncCompileMode, active_mode
    except ImportError:
        raise AttributeError("Triton compiles in one thread alone") from None

    class Mode(AsyncCompileMode):
        def submit(self, key: Any, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]) -> Any:
            return super().submit(key, lambda: loaded(compile_fn(), device), finalize_fn)

    launch = JITFunction.run

    def run(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        # Set here, since backward passes run in threads of their own.
        before = active_mode.set(mode)
        try:
            return launch(function, *args, grid=grid, warmup=True, **kwargs)
        finally:
            active_mode.reset(before)

    threads = min(MOST_THREADS, usable_cores())
    with ThreadPoolExecutor(threads) as executor:
        mode = Mode(executor, ignore_errors=True)
        with mode:
            active_mode.set(None)  # `run` sets it; what else this thread does is not to be put off
            JITFunction.run = run
            try:
                yield
            finally:
                JITFunction.run = launch


def loaded(kernel: Any, device: torch.device) -> Any:
    """Return a compiled kernel with its launcher, on the device."""
    torch.cuda.set_device(device)
    kernel._init_handles()
    return kernel
