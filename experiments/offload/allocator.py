"""The C library's settings under which the resident set says something. No torch here: it is to be imported once."""

from __future__ import annotations

import os
import sys

# The same C library for every variant: what is freed goes back to the kernel, or the resident set says nothing about
# live tensors, and memory comes in huge pages, which makes getting it again cheap.
ALLOCATOR = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=262144"}


USUAL_ALLOCATOR = "--usual-allocator"
"""The argument that leaves the C library as it is."""


def with_that_allocator(module: str) -> None:
    """Start this process over as `python -m module` with that allocator, unless it runs with it already."""
    if any(os.environ.get(name) != value for name, value in ALLOCATOR.items()):
        os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], {**os.environ, **ALLOCATOR})
