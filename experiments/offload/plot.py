"""`python -m experiments.offload.plot`: the kept figures as pictures in `results/`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from experiments.plots import bars, lines

RESULTS = Path(__file__).parent / "results"


def newest(part: str) -> Any:
    """The newest kept figure of that name, of full runs if there are any; None if it was never measured.

    What a run tells per model is put together, since full runs take one model at a time.
    """
    for name in ("full.jsonl", "quick.jsonl"):
        path = RESULTS / name
        runs = [json.loads(line)["figures"] for line in path.read_text().splitlines()] if path.exists() else []
        found = [run[part] for run in runs if part in run]
        if found:
            each_model = isinstance(found[-1], dict)
            return {kind: told for figure in found for kind, told in figure.items()} if each_model else found[-1]
    return None


def main() -> None:
    curve, models = newest("curve"), newest("models")
    if curve is not None:
        series = {
            f"{limit} limit: {name}": (
                [point["gb_per_s"] for point in curve if point["limit"] == limit],
                [point[name] for point in curve if point["limit"] == limit],
            )
            for limit in ("fixed", "adaptive")
            for name in ("time_ratio", "peak_ratio")
        }
        print(lines(RESULTS / "curve.png", series, labels=("drive, GB/s", "ours / keep"), title="A slower drive"))
    for kind, found in (models or {}).items():
        keep_s = found["wall_s"]["keep"]
        shares = {
            name: [a / b for a, b in zip(seconds, keep_s, strict=True)] for name, seconds in found["wall_s"].items()
        }
        print(bars(RESULTS / f"times-{kind}.png", shares, label="step time / keep", title=f"{kind}: time of a step"))


if __name__ == "__main__":
    main()
