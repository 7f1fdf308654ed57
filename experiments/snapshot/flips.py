"""Bits that flip in a job's memory and in sums on their way: `flips`, and how many of them were `caught`.

    python -m experiments.snapshot.flips [--only KIND …] [--seed N]

Every kind strikes in a job of its own. It counts as caught where a member said what was wrong, and the job ended with
the digest of the undisturbed job: seen and not put right, or put right by chance, is not enough.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from experiments.harness import ROOT
from experiments.jobs import Script, alone, elastic, finish, unwind_on_sigterm
from experiments.journals import read_member, read_run

MEMBERS, STEP, STEPS = 3, 6, 14
TIMEOUT_S = 300.0
SCRIPT = ROOT / "experiments" / "faults" / "train.py"
EVERY, FLIPPED_AT, STOPPED_AT = 4, 10, 11
"""Of the job with a flipped file: a checkpoint every so many steps, and none after the flip."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One bit of `where` (a word of `elastrain inject flip --where`) in a job of its own."""

    name: str
    where: str
    phase: str = "forward"
    step: int = STEP
    nodes: int | None = None
    script: tuple[str, ...] = ()
    """What the script is told besides."""
    member: str = "m1"
    bit: int = 20
    """Counted from the lowest of the number, round and round."""

    def drawn(self, seed: int) -> Kind:
        """Of another member, in another bit and, unless it is the first one, in another step."""
        rng = random.Random(f"{seed} {self.name}")
        member, bit, step = f"m{rng.randrange(MEMBERS)}", rng.randrange(64), rng.randrange(2, STEPS - 4)
        return replace(self, member=member, bit=bit, step=step if self.step else 0)


KINDS = (
    Kind(name="partial", where="partial"),
    # A finished gradient is kept from the commit on, until the update is verified.
    Kind(name="gradient", where="gradient", phase="commit"),
    Kind(name="parameters", where="parameters"),
    Kind(name="taken", where="taken"),
    Kind(name="moments", where="moments"),
    Kind(name="backup", where="backup"),
    Kind(name="masters", where="masters", script=("half",)),
    Kind(name="frame between nodes", where="frame", phase="reduce", nodes=MEMBERS),
    Kind(name="frame on one host", where="frame", phase="reduce"),
    Kind(name="initial parameters", where="parameters", step=0),
    Kind(name="initial parameters taken", where="taken", step=0),
    Kind(name="initial backup", where="backup", step=0),
)
FILE = Kind(name="file", where="file", step=FLIPPED_AT)
AUDITED_KINDS = (
    Kind(name="micro-batch", where="micro-batch", phase="backward", script=("audit",)),
    Kind(name="working parameters", where="parameters", phase="backward", script=("audit",)),
    Kind(name="working parameters taken", where="taken", phase="backward", script=("audit",)),
)
"""A micro-batch's own gradient, and working parameters of both kinds: with every micro-batch audited."""
SAYS = {"frame": "broke|altered|new links|made anew"}
"""What shows that a bit was noticed; for all others that the step begins anew."""


@dataclass(frozen=True, kw_only=True)
class Flip:
    """What became of one bit."""

    name: str
    noticed: bool
    """A member said what was wrong."""
    equal: bool
    """Every member ended with the digest of the undisturbed job."""
    says: str = ""

    @property
    def is_caught(self) -> bool:
        return self.noticed and self.equal


def undisturbed(folder: Path, *arguments: str) -> str:
    """The digest of a job of one."""
    with alone(folder, Script(path=SCRIPT, args=(str(STEPS), *arguments))) as process:
        finish(process, folder, timeout_s=TIMEOUT_S)
    return str(read_member(folder).digest)


def flip(folder: Path, kind: Kind, wanted: str) -> Flip:
    """Strike once, in the middle of a job or at its beginning; `wanted`: the digest of the undisturbed one."""
    line = _line(kind)
    try:
        output = _run(folder, line, kind.script, nodes=kind.nodes)
    except RuntimeError as ended:  # with a sentence: seen, and not put right
        return Flip(name=kind.name, noticed=True, equal=False, says=str(ended)[-500:])
    heard = [*output.splitlines(), *_journal_lines(folder)]
    says = [each for each in heard if re.search(SAYS.get(kind.where, "begins anew"), each)]
    return Flip(name=kind.name, noticed=bool(says), equal=_digests(folder) == {wanted}, says=(says or [""])[0][:300])


def flip_file(folder: Path, wanted: str, seed: int | None = None) -> Flip:
    """Flip a bit in the newest checkpoint of a job that ends soon after, and go on from what is good."""
    kind = FILE if seed is None else replace(FILE.drawn(seed), step=FILE.step)
    line = _line(kind)
    options = ("--checkpoint-dir", str(folder / "checkpoints"))
    before = (*options, "--checkpoint-every", str(EVERY))
    (folder / "flipped").mkdir(parents=True)
    (folder / "flipped" / "brake").touch()  # the newest one has to be complete when the fault looks for it
    try:
        _run(folder / "flipped", line, (), steps=STOPPED_AT, options=before)
        output = _run(folder / "resumed", "", (), options=options)
    except RuntimeError as ended:
        return Flip(name=FILE.name, noticed=True, equal=False, says=str(ended)[-500:])
    goes_on = [each for each in output.splitlines() if "the job goes on after step" in each]
    # The look before a start reads no shard: what is damaged inside is found by who reads it, in a life that ends so.
    took_older = bool(goes_on) and f"after step {EVERY - 1}," in goes_on[-1]
    equal = _digests(folder / "resumed") == {wanted}
    return Flip(name=FILE.name, noticed=took_older, equal=equal, says=" | ".join(goes_on)[-500:])


def figures(
    folder: Path, kinds: Sequence[Kind] = KINDS, *, file: bool = True, seed: int | None = None
) -> dict[str, object]:
    """`flips` and `caught`, and what was said of each. `seed`: of members, bits and steps; None: the usual ones."""
    found = _strike(folder, kinds if seed is None else [kind.drawn(seed) for kind in kinds])
    if file:
        found.append(flip_file(folder / "file", undisturbed(folder / "alone for file"), seed))
    return {"flips": len(found), "caught": sum(each.is_caught for each in found), "each": [asdict(f) for f in found]}


def audited(folder: Path, kinds: Sequence[Kind] = AUDITED_KINDS) -> dict[str, object]:
    """`audit_flips` and `audit_caught`: the same with every micro-batch audited."""
    found = _strike(folder, kinds)
    caught = sum(each.is_caught for each in found)
    return {"audit_flips": len(found), "audit_caught": caught, "audit_each": [asdict(each) for each in found]}


def _line(kind: Kind) -> str:
    """Of a file of faults."""
    where = f"--where {kind.where} --bit {kind.bit}"
    return f"flip --target member:{kind.member} --at step={kind.step},phase={kind.phase} {where}"


def _strike(folder: Path, kinds: Sequence[Kind]) -> list[Flip]:
    scripts = {kind.script for kind in kinds}
    wanted = {script: undisturbed(folder / " ".join(("alone", *script)), *script) for script in scripts}
    found = []
    for kind in kinds:
        found.append(flip(folder / kind.name.replace(" ", "-"), kind, wanted[kind.script]))
        print(kind, found[-1], file=sys.stderr, flush=True)
    return found


def _run(
    folder: Path,
    fault: str,
    arguments: Sequence[str],
    *,
    nodes: int | None = None,
    steps: int = STEPS,
    options: Sequence[str] = (),
) -> str:
    """A job with this fault; its output. Raises RuntimeError where it does not end well."""
    folder.mkdir(parents=True, exist_ok=True)
    faults = folder / "faults.txt"
    faults.write_text(f"{fault}\n")
    script = Script(path=SCRIPT, args=(str(steps), *arguments))
    started = elastic(folder, script, members=MEMBERS, nodes=nodes, options=("--faults", str(faults), *options))
    with started as process:
        return finish(process, folder, timeout_s=TIMEOUT_S)


def _journal_lines(folder: Path) -> list[str]:
    return [line for path in sorted(folder.rglob("*.jsonl")) for line in path.read_text().splitlines()]


def _digests(folder: Path) -> set[str]:
    """What members have at their end."""
    return {member.digest for member in read_run(folder).members.values() if member.digest}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [kind.name for kind in KINDS]
    parser.add_argument("--only", nargs="+", choices=[*names, "file"], metavar="KIND", default=[*names, "file"])
    parser.add_argument("--seed", type=int, help="of members, bits and steps; default: the usual ones")
    args = parser.parse_args()
    wanted = args.only
    unwind_on_sigterm()
    with TemporaryDirectory(prefix="elastrain-flips-") as folder:
        kinds = [kind for kind in KINDS if kind.name in wanted]
        found = figures(Path(folder), kinds, file="file" in wanted, seed=args.seed)
    sys.stdout.write(json.dumps(found) + "\n")
    return 0 if found["caught"] == found["flips"] else 1


if __name__ == "__main__":
    sys.exit(main())
