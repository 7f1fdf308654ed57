"""`python -m experiments.lifetimes.run`: training within a memory limit against plain training. See README.md."""

from __future__ import annotations

from experiments.offload.allocator import with_that_allocator


def main() -> None:
    with_that_allocator("experiments.lifetimes.run")
    from experiments.lifetimes.figures import main as measure  # imports torch, after this process has started over

    measure()


if __name__ == "__main__":
    main()
