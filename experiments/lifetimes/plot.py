"""`python -m experiments.lifetimes.plot`: the kept curve over the drive's rate as a picture in `results/`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.plots import lines

RESULTS = Path(__file__).parent / "results"
NAMES = {"ours 0.5": "ours, 50 %", "ours 0.25": "ours, 25 %", "zero": "ZeRO-Infinity's policy", "demand": "on demand"}


def newest_curve(results: Path) -> Mapping[str, Sequence[float]] | None:
    """Speed of ideal by way, beside `rate_bytes_per_s`: as last kept, of full runs if there are any."""
    for name in ("full.jsonl", "quick.jsonl"):
        path = results / name
        kept = [json.loads(line)["figures"] for line in path.read_text().splitlines()] if path.exists() else []
        found: list[Mapping[str, Sequence[float]]] = [each["curve"] for each in kept if "curve" in each]
        if found:
            return found[-1]
    return None


def draw(curve: Mapping[str, Sequence[float]], path: Path) -> Path:
    """One line per way."""
    rates = [each / 1e9 for each in curve["rate_bytes_per_s"]]
    series = {label: (rates, list(curve[way])) for way, label in NAMES.items() if way in curve}
    return lines(path, series, labels=("drive, GB/s", "speed of ideal"), title="A slower drive")


def main() -> None:
    curve = newest_curve(RESULTS)
    if curve is None:
        raise SystemExit("no curve was kept yet: python -m experiments.lifetimes.run --curve --record measures one")
    print(draw(curve, RESULTS / "curve.png"))


if __name__ == "__main__":
    main()
