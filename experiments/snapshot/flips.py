"""Bits that flip in a job's memory and in sums on their way: `flips`, and how many of them were `caught`.

    python -m experiments.snapshot.flips

Every kind strikes in a job of its own. It counts as caught where a member said what was wrong, and the job ended with
the digest of the undisturbed job: seen and not put right, or put right by chance, is not enough.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from experiments.harness import ROOT
from experiments.jobs import Script, alone, elastic, finish, unwind_on_sigterm
from experiments.journals import read_member, read_run

KINDS = ("partial", "gradient", "parameters", "taken", "moments", "backup")
"""Words of `elastrain inject flip --where`."""
AUDITED_KINDS = ("micro-batch", "parameters", "taken")
"""A micro-batch's own gradient, and working parameters of both kinds: with every micro-batch audited."""
MEMBERS, STEP, STEPS = 3, 6, 14
TIMEOUT_S = 300.0
SCRIPT = ROOT / "experiments" / "faults" / "train.py"


@dataclass(frozen=True, kw_only=True)
class Flip:
    """What became of one bit."""

    where: str
    noticed: bool
    """A member said what was wrong, and that the step begins anew."""
    equal: bool
    """Every member ended with the digest of the undisturbed job."""
    says: str = ""

    @property
    def is_caught(self) -> bool:
        return self.noticed and self.equal


def undisturbed(folder: Path) -> str:
    """The digest of a job of one."""
    with alone(folder, Script(path=SCRIPT, args=(str(STEPS),))) as process:
        finish(process, folder, timeout_s=TIMEOUT_S)
    return str(read_member(folder).digest)


def flip(folder: Path, where: str, wanted: str, *, audit: bool = False) -> Flip:
    """Strike once, in the middle of a job; `wanted`: the digest of the undisturbed one."""
    folder.mkdir(parents=True)
    faults = folder / "faults.txt"
    # A finished gradient is kept from the commit on, until the update is verified; its own is there after a backward.
    phase = {"gradient": "commit", "micro-batch": "backward"}.get(where, "backward" if audit else "forward")
    faults.write_text(f"flip --target member:m1 --at step={STEP},phase={phase} --where {where}\n")
    options = ("--faults", str(faults))
    script = Script(path=SCRIPT, args=(str(STEPS), *(["audit"] if audit else [])))
    with elastic(folder, script, members=MEMBERS, options=options) as process:
        try:
            output = finish(process, folder, timeout_s=TIMEOUT_S)
        except RuntimeError as ended:  # with a sentence: seen, and not put right
            return Flip(where=where, noticed=True, equal=False, says=str(ended)[-500:])
    says = [line for line in output.splitlines() if "begins anew" in line]
    equal = set(_digests(folder).values()) == {wanted}
    return Flip(where=where, noticed=bool(says), equal=equal, says=says[0] if says else "")


def figures(folder: Path, kinds: Sequence[str] = KINDS) -> dict[str, object]:
    """`flips` and `caught`, and what was said of each."""
    wanted = undisturbed(folder / "alone")
    found = [flip(folder / where, where, wanted) for where in kinds]
    return {"flips": len(found), "caught": sum(each.is_caught for each in found), "each": [asdict(f) for f in found]}


def audited(folder: Path, kinds: Sequence[str] = AUDITED_KINDS) -> dict[str, object]:
    """`audit_flips` and `audit_caught`: the same with every micro-batch audited."""
    wanted = undisturbed(folder / "alone")
    found = [flip(folder / where, where, wanted, audit=True) for where in kinds]
    caught = sum(each.is_caught for each in found)
    return {"audit_flips": len(found), "audit_caught": caught, "audit_each": [asdict(each) for each in found]}


def _digests(folder: Path) -> Mapping[str, str]:
    """Member -> digest at its end."""
    return {name: member.digest for name, member in read_run(folder).members.items() if member.digest}


def main() -> int:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    unwind_on_sigterm()
    with TemporaryDirectory(prefix="elastrain-flips-") as folder:
        found = figures(Path(folder))
    sys.stdout.write(json.dumps(found) + "\n")
    return 0 if found["caught"] == found["flips"] else 1


if __name__ == "__main__":
    sys.exit(main())
