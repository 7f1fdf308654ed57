"""Does `elastrain doctor --bits` find what makes members' bits differ, and name it, without a false alarm?

python -m experiments.bits.run [--quick] [--only PLANT …] [--record]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from experiments.bits.planted import PLANTS
from experiments.harness import ROOT, Reach, add_record_flag, record, report

PLANTED = Path(__file__).with_name("planted.py")
MODULE = "planted"
HEALTHY = {
    "healthy": [str(PLANTED)],
    "GPT": [str(ROOT / "experiments/strangers/train.py"), "gpt2", "1"],
}
REACHES = {
    "found": Reach(limit=len(PLANTS), at_least=True),
    "named_right": Reach(limit=len(PLANTS) - 1, at_least=True),
    "false_alarms": Reach(limit=0),
}


def asked(script: str, *arguments: str) -> dict[str, Any]:
    """Return the answer of `elastrain doctor --bits` about a script. Raises RuntimeError if it gives none."""
    command = [sys.executable, "-m", "elastrain.launcher", "doctor", "--bits", script, "--json", "--", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode not in (0, 1) or not done.stdout:
        raise RuntimeError(f"{command} ended with {done.returncode}: {done.stderr}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def judged(plant: str) -> dict[str, Any]:
    """Return the answer about one plant, and whether module and cause are those that were planted."""
    answer = asked(str(PLANTED), "--plant", plant)
    is_right = answer.get("cause") == PLANTS[plant][1] and answer["module"].split(".")[0] == MODULE
    return {"plant": plant, "found": answer["differs"], "named_right": is_right, "answer": answer}


def figures(plants: list[str], healthy: list[str]) -> dict[str, Any]:
    """Ask about all plants and all healthy scripts, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        rows = list(pool.map(judged, plants))
        answers = list(pool.map(lambda name: asked(*HEALTHY[name]), healthy))
    alarms = [(name, answer) for name, answer in zip(healthy, answers, strict=True) if answer["differs"]]
    for alarm in alarms:
        sys.stderr.write(f"{alarm}\n")
    for row in rows:
        if not row["named_right"]:
            sys.stderr.write(f"{row['plant']}: {row['answer']}\n")
    return {
        "planted": len(rows),
        "found": sum(row["found"] for row in rows),
        "named_right": sum(row["named_right"] for row in rows),
        "healthy": len(healthy),
        "false_alarms": len(alarms),
        "causes": {row["plant"]: row["answer"].get("cause") for row in rows},
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.bits.run", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the same, for its name in the list of figures")
    parser.add_argument("--only", nargs="+", default=list(PLANTS), choices=PLANTS)
    add_record_flag(parser)
    options = parser.parse_args()
    found = figures(options.only, list(HEALTHY))
    if options.record:
        record("bits", found, quick=options.quick, settings={"plants": options.only})
    sys.exit(0 if report(found, REACHES) else 1)


if __name__ == "__main__":
    main()
