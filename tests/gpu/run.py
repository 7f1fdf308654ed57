"""`make test-gpu`: run test parts on the device of this machine, unattended. This process imports no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from experiments.accelerator import commands
from tests.gpu import shown, wheels
from tests.gpu.claims import CLAIMS, PARTS, REHEARSED

NO_DEVICE, LACKING, MISSED = 2, 3, 1
"""Exit codes: there is no device; libraries are missing; a line does not reach its bound."""
PART_S, RUN_S, PROBE_S, REHEARSAL_S = 240.0, 540.0, 90.0, 5400.0
"""Limits in seconds for a part, a run, the process that looks for a device, and a rehearsal."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The settings of a run, from environment variables."""

    parts: tuple[int, ...]
    wheels: Path | None
    device: str
    keys: tuple[str, ...]
    limit_s: float
    lines: Path | None
    commit: str

    @classmethod
    def read(cls, given: Mapping[str, str]) -> Options:
        """Return the options of a process environment. Raises SystemExit with a sentence for values that are wrong."""
        parts = given.get("PART", "").replace(",", " ").split() or ["1", "2", "3", "4"]
        if wrong := [each for each in parts if each not in map(str, PARTS)]:
            raise SystemExit(f"PART has numbers of test parts from 1 to {max(PARTS)}; got {' '.join(wrong)}.")
        keys = tuple(given.get("KEYS", "").replace(",", " ").split())
        if wrong := sorted(set(keys) - set(CLAIMS)):
            raise SystemExit(f"KEYS has keys of tests/gpu/README.md; got {', '.join(wrong)}.")
        folder = Path(given["WHEELS"]).resolve() if given.get("WHEELS") else None
        if folder is not None and not folder.is_dir():
            raise SystemExit(f"WHEELS is a folder of wheels; there is none at {folder}.")
        return cls(
            parts=tuple(map(int, parts)),
            wheels=folder,
            device=given.get("DEVICE", ""),
            keys=keys,
            limit_s=float(given.get("LIMIT_S") or (REHEARSAL_S if given.get("DEVICE") in REHEARSED else RUN_S)),
            lines=Path(given["LINES"]).resolve() if given.get("LINES") else None,
            commit=given.get("COMMIT") or _commit(),
        )


def _commit() -> str:
    """Return the commit of the checkout, with `+` if tracked files but the lines and their pages differ from it."""
    git, written = ["git", "-C", str(wheels.ROOT)], (":!docs/shown-on.md", ":!tests/gpu/*.md", ":!tests/gpu/*.jsonl")
    named, differs = [*git, "rev-parse", "--short=12", "HEAD"], [*git, "diff", "--quiet", "HEAD", "--", ".", *written]
    try:
        found = subprocess.run(named, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
        dirty = subprocess.run(differs, capture_output=True, timeout=20).returncode
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return found + ("+" if dirty else "")


class Telling:
    """Prints lines, and appends them to a file as soon as they are there: a run may be cut off at any time."""

    def __init__(self, about: Mapping[str, Any], options: Options) -> None:
        self.kind, self.name, self.uuid = about["kind"], about["name"], about["uuid"] or ""
        self.real = self.kind not in REHEARSED
        self.path = options.lines or (shown.LINES if self.real else None)
        self.missed = 0
        self._about = {"device": about["name"], "driver": about["driver"], "versions": about["versions"]}
        self._commit = options.commit

    def line(self, part: int, key: str, case: str, value: object, note: str, not_run: bool) -> None:
        """Tell one line."""
        claim = CLAIMS[key]
        measured = self.real or claim.bound == "true"  # prices and seconds of a rehearsal mean nothing
        reached = claim.reached(value) and value is not None
        self.missed += (not reached) if measured else value is None
        found = {"part": part, "key": key, "case": case, "value": value, "note": note, **self._about}
        found |= {"commit": self._commit, "date": datetime.now(UTC).isoformat(timespec="seconds")}
        if not_run:
            found["not_run"] = True
        if not self.real:
            found["rehearsal"] = True
        if self.path is not None:
            shown.append([found], self.path)
        said = f"{value:.4g}" if isinstance(value, float) else json.dumps(value)
        verdict = "" if reached else "  MISSED"
        if not measured:
            verdict = "  (not measured: a rehearsal)"
        print(
            f"{part}  {key:<26}{case:<28}{said:>12}   {claim.bound:<8}{verdict}  {said_of(note)}".rstrip(), flush=True
        )


def said_of(note: str) -> str:
    """Return a note as the screen shows it: its beginning and its end."""
    return note if len(note) < 300 else f"{note[:80]} … {note[-200:]}"


def probe(options: Options, folder: Path) -> dict[str, Any]:
    """Return the device's kind, name, driver and versions; kind None: there is none. Raises EndedError."""
    command = ["-m", "tests.gpu.probe", options.device]
    output = commands.run("the look for a device", command, folder / "probe.txt", deadline_s=PROBE_S)
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


def set_environment(unpacked: Path) -> None:
    """Set the environment of all processes: this checkout first, then unpacked wheels."""
    paths = [str(wheels.ROOT), str(unpacked), *filter(None, [os.environ.get("PYTHONPATH")])]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ELASTRAIN_")}
    kept |= {"PYTHONPATH": os.pathsep.join(paths), "PATH": f"{unpacked / 'bin'}:{os.environ.get('PATH', '')}"}
    kept.pop("PYTHONDONTWRITEBYTECODE", None)  # a fresh checkout would be compiled by each process
    os.environ.clear()
    os.environ.update({**kept, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"})


def main() -> int:
    """Run everything that the environment asks for; return the exit code."""
    options = Options.read(os.environ)
    until_s = time.monotonic() + options.limit_s
    with tempfile.TemporaryDirectory(prefix="elastrain-gpu-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        commands.end_on_sigterm()
        unpacked = folder / "wheels"
        unpacked.mkdir()
        if options.wheels is not None:
            print(
                f"From {options.wheels}: {', '.join(wheels.unpack(options.wheels, unpacked)) or 'nothing is needed'}."
            )
        set_environment(unpacked)
        missing = wheels.lacking(wheels.requirements(), [str(unpacked), *sys.path])
        print(wheels.sentence(missing), flush=True)
        try:
            about = probe(options, folder)
        except commands.EndedError as error:
            print(f"The device cannot be used. {error}")
            return NO_DEVICE
        if about["kind"] is None:
            print("There is no device that torch can use on this machine, so nothing was run.")
            return NO_DEVICE
        if about["broken"] or any(each.only_for is None for each in missing):
            print(f"Nothing was run. {about['broken']}".strip())
            return LACKING
        sys.path.insert(1, str(unpacked))
        from tests.gpu.parts import Setting, run_part  # they import torch and elastrain

        nodes = not any(each.only_for == "simulated nodes" for each in missing)
        telling = Telling(about, options)
        for part in options.parts:
            began_s = time.monotonic()
            setting = Setting(
                device=telling.kind,
                folder=folder / f"part{part}",
                until_s=min(until_s, began_s + (PART_S if telling.real else until_s)),
                tell_line=partial(telling.line, part),
                name=telling.name,
                uuid=telling.uuid,
                nodes=nodes,
            )
            run_part(part, setting, options.keys)
            print(f"Test part {part} took {time.monotonic() - began_s:.0f} s.", flush=True)
        if telling.path == shown.LINES:
            shown.write()
        return MISSED if telling.missed else 0


if __name__ == "__main__":
    sys.exit(main())
