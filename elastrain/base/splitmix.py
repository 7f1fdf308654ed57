"""splitmix64 (Steele, Lea and Flood, 2014): a bijection of 64-bit numbers. Pure arithmetic."""

from __future__ import annotations

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def scramble(value: int) -> int:
    """The generator's output function, of a number taken modulo 2**64."""
    z = value & MASK
    z = ((z ^ (z >> 30)) * FACTORS[0]) & MASK
    z = ((z ^ (z >> 27)) * FACTORS[1]) & MASK
    return z ^ (z >> 31)


def mix(state: int) -> int:
    """The generator's next output from this state."""
    return scramble(state + GOLDEN)
