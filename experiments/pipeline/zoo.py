"""Architectures of `transformers` that small sizes build, trained in many ways, with losses: are the bits the same?

    python -m experiments.pipeline.zoo [--cases N] [--seed N] [--kinds KIND …] [--names NAME …] [--record]

A case is a model, ways to train it, a size of the job and its faults, drawn from the seed: alone under `python`, then
under `elastrain run`. What does not end with the digest of the job of one is kept; the same seed and models repeat it.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from experiments.harness import Reach, add_record_flag, record, report
from experiments.jobs import Script, alone, elastic, finish, unwind_on_sigterm
from experiments.journals import read_member, read_run
from experiments.pipeline import zoo_train

TIMEOUT_S = 300.0
PARAMETERS_MAX = 6_000_000
PHASES = ("forward", "backward", "reduce", "commit", "apply", "publish")
LAST_LINES = 4
REACHES = {"wrong": Reach(limit=0), "stood_still": Reach(limit=0), "tracebacks": Reach(limit=0)}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model, how it is trained, and what happens to the job."""

    kind: str
    name: str
    ways: tuple[str, ...]
    members: int
    nodes: int | None
    stages: int
    faults: tuple[str, ...]

    @property
    def script(self) -> Script:
        arguments = (self.kind, self.name, *(("--ways", ",".join(self.ways)) if self.ways else ()))
        return Script(path=Path(zoo_train.__file__), args=arguments)


def draw(seed: int, models: Sequence[tuple[str, str]]) -> Case:
    """Of these models, `(kind, name)`."""
    drawn = random.Random(seed)
    kind, name = drawn.choice(models)
    ways = drawn.sample(zoo_train.WAYS, drawn.choice((0, 1, 2, 3)))
    stages = drawn.choice((1, 2, 2, 2, 3))
    nodes = drawn.choice((None, None, 2))
    members = drawn.choice((2, 4)) if nodes else drawn.choice((2, 3, 4))
    faults = []
    for _ in range(drawn.choice((0, 1, 1, 2))):
        at = f"step={drawn.randrange(zoo_train.STEPS)},phase={drawn.choice(PHASES)}"
        who = f"--target member:m{drawn.randrange(members)} --at {at}"
        faults.append(drawn.choice((f"kill {who}", f"kill {who}", f"stop {who} --for 2")))
    return Case(
        kind=kind,
        name=name,
        ways=tuple(ways),
        members=max(members, stages + stages % 2 if nodes else stages),
        nodes=nodes,
        stages=stages,
        faults=tuple(faults),
    )


def models(kinds: Sequence[str], names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Those that can be built and are small."""
    for kind in kinds:
        for name in names or zoo_train.architectures(kind):
            try:
                with torch.device("meta"):
                    parameters = sum(q.numel() for q in zoo_train.build(kind, name).parameters())
            except Exception as error:  # noqa: BLE001  the library's own, of any kind
                if names:
                    print(f"{kind} {name}: cannot be built so small: {error}", file=sys.stderr)
                continue
            if parameters <= PARAMETERS_MAX:
                yield kind, name


def play(case: Case, folder: Path) -> str:
    """How it ended: `equal`, `wrong`, `stood still`, `untrainable` alone already, or the job's last words."""
    try:
        with alone(folder / "alone", case.script) as process:
            finish(process, folder / "alone", timeout_s=TIMEOUT_S)
    except RuntimeError:
        return "untrainable"
    faults = folder / "faults.txt"
    faults.write_text("".join(f"{line}\n" for line in case.faults))
    options = ["--faults", str(faults)] if case.faults else []
    options += ["--stages", str(case.stages)] if case.stages > 1 else []
    job = folder / "job"
    with elastic(job, case.script, members=case.members, nodes=case.nodes, options=options) as process:
        try:
            finish(process, job, timeout_s=TIMEOUT_S)
        except RuntimeError:
            if process.poll() is None:
                return "stood still"
            return (job / "output.log").read_text(errors="replace")
    wanted = read_member(folder / "alone").digest
    found = {member.digest for member in read_run(job).members.values()} - {None}  # of those that came so far
    return "equal" if wanted is not None and found == {wanted} else "wrong"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the first case; each has its own")
    parser.add_argument("--kinds", nargs="*", choices=zoo_train.MODELS, default=list(zoo_train.MODELS))
    parser.add_argument("--names", nargs="*", default=[], help="architectures; default: all")
    add_record_flag(parser)
    args = parser.parse_args()
    unwind_on_sigterm()
    found = list(models(args.kinds, args.names))
    ends: Counter[str] = Counter()
    refused: list[str] = []
    for seed in range(args.seed, args.seed + args.cases):
        case, began_s = draw(seed, found), time.monotonic()
        folder = Path(tempfile.mkdtemp(prefix=f"zoo-{seed}-"))
        ended = play(case, folder)
        is_traceback = "Traceback" in ended
        end = ended if ended in ("equal", "wrong", "stood still", "untrainable") else "refused"
        ends["tracebacks" if is_traceback else end] += 1
        print(f"seed {seed}: {end} in {time.monotonic() - began_s:.0f} s: {asdict(case)}", flush=True)
        if end in ("equal", "untrainable"):
            shutil.rmtree(folder)
            continue
        last = "\n".join(ended.strip().splitlines()[-LAST_LINES:])
        refused += [] if end != "refused" or is_traceback else [f"{case.kind} {case.name}: {last}"]
        print(f"  kept in {folder}\n{last}", flush=True)
    figures = {name: ends[name.replace("_", " ")] for name in ("equal", "wrong", "stood_still", "tracebacks")}
    figures |= {"untrainable": ends["untrainable"], "architectures": len(found)}
    if args.record:
        settings = {"cases": args.cases, "seed": args.seed, "kinds": args.kinds}
        record("pipeline", {**figures, "refused": refused}, quick=False, settings={"zoo": settings})
    report({**figures, "refused": len(refused)}, REACHES)


if __name__ == "__main__":
    main()
