"""The heap of the C library, from which tensors on a CPU have their memory."""

import ctypes
import functools
import os
import platform

TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3  # of glibc's `mallopt`
NEVER = -1
LARGEST = 1 << 30  # bytes of a tensor whose memory is kept
STEP = 1 << 26  # bytes by which the process grows


@functools.cache
def keep_freed_memory() -> None:
    """Let glibc keep what tensors of up to LARGEST bytes free, for the tensors that follow. By its defaults it gives
    their memory back to the system, and a training step has it mapped, cleared and faulted in again page by page. Does
    nothing where the environment sets glibc's `MALLOC_` variables, or where the library is another one."""
    if platform.libc_ver()[0] != "glibc" or any(name.startswith("MALLOC_") for name in os.environ):
        return
    set_option = ctypes.CDLL(None).mallopt
    for option, value in ((MMAP_THRESHOLD, LARGEST), (TRIM_THRESHOLD, NEVER), (TOP_PAD, STEP)):
        set_option(option, value)
