"""`python -m experiments.offload.run`: offload against the other ways to hold activations. See README.md."""

from __future__ import annotations

import sys

from experiments.offload.allocator import USUAL_ALLOCATOR, with_that_allocator


def main() -> None:
    if USUAL_ALLOCATOR not in sys.argv:
        with_that_allocator("experiments.offload.run")
    from experiments.offload.figures import main as measure  # imports torch, after this process has started over

    measure()


if __name__ == "__main__":
    main()
