"""The claims that only a device can show, as `claims.md` lists them, and the test parts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PARTS = {
    1: "the training script: bits",
    2: "recovery, errors, hangs",
    3: "prices",
    4: "pipelines",
    5: "memory limits and drives",
    6: "compiled models, captured graphs, the `torch.distributed` backend",
    7: "device memory that peers read in place",
}
REHEARSED = ("late", "cpu")
"""Devices that show nothing."""


@dataclass(frozen=True)
class Claim:
    """A row of the table. `part`: None if no line can be about it."""

    part: int | None
    key: str
    cases: tuple[str, ...]
    bound: str
    text: str

    def reached(self, value: object) -> bool:
        """Return True if a value shows one case of the claim."""
        if self.bound == "true" or isinstance(value, bool) or not isinstance(value, int | float):
            return value is True
        if self.bound == "report":
            return True
        sign, limit = self.bound.split()
        return value <= float(limit) if sign == "≤" else value >= float(limit)


def _read() -> dict[str, Claim]:
    text = (Path(__file__).parent / "claims.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    claims = [
        Claim(int(part) if part else None, key.strip("`"), tuple(map(str.strip, cases.split(";"))), bound, said)
        for part, key, cases, bound, said in rows[2:]
    ]
    return {claim.key: claim for claim in claims}


CLAIMS = _read()
"""Claims by their keys."""
