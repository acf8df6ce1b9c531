"""Settings of this process that the C library takes at run time."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def keep_freed_memory() -> None:
    """Let glibc keep what is freed instead of giving it back to the kernel.

    A forward and backward pass allocates the same large tensors again and again; fetched anew each time, their pages
    are filled with zeros by the kernel every time. Elsewhere than on Linux nothing happens.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
            libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
