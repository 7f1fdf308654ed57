"""Versions, and digests of fixed kernels: members whose facts differ do not compute the same bits."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from elastrain.launcher.shared.process_environment import without
from elastrain.launcher.watch.preflight.check import StartCheck, judged

Facts = dict[str, str]
_MODULE = "elastrain.runtime.bits.kernel_facts"
_TIMEOUT_S = 120.0


def facts() -> Facts:
    """Return this machine's facts. An error is a fact named "error"."""
    return {str(name): str(value) for name, value in told_by(_MODULE).items()}


def told_by(module: str, *arguments: str, timeout_s: float = _TIMEOUT_S) -> dict[str, Any]:
    """Return the JSON object that a module prints in a process of its own, which imports torch.

    If that fails, the object has the reason under "error", and nothing else.
    """
    environment = {"OMP_NUM_THREADS": "1", **without("ELASTRAIN_")}
    try:
        command = [sys.executable, "-m", module, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment, check=False)
        told = json.loads(done.stdout) if done.returncode == 0 else {"error": _last_line(done.stderr)}
    except (subprocess.TimeoutExpired, ValueError) as error:
        told = {"error": str(error)}
    return dict(told)


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it ended without a word"])[-1]


def of_this_machine(told: Mapping[str, str]) -> list[StartCheck]:
    """Judge the facts of this machine."""
    if "error" in told:
        return [judged("versions", told["error"], stops=True, advice="torch must be installed, and must be importable")]
    digests = [value for name, value in told.items() if name.startswith("kernel ")]
    versions = ", ".join(f"{name} {value}" for name, value in told.items() if not name.startswith("kernel "))
    combined = f"{sum(int(value, 16) for value in digests if value != 'missing') % (1 << 64):016x}"
    return [judged("versions", versions), judged("fixed kernels", f"{len(digests)} digests, together {combined}")]


def compared(who: str, mine: Mapping[str, str], theirs: Mapping[str, str]) -> StartCheck:
    """Judge the facts of a peer beside this machine's."""
    differing = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
    shown = "; ".join(f"{name}: {mine.get(name, '-')} here, {theirs.get(name, '-')} there" for name in differing[:3])
    more = f"; and {len(differing) - 3} more" if len(differing) > 3 else ""
    return judged(
        f"versions of {who}",
        shown + more if differing else "equal, and so are the digests of the fixed kernels",
        stops=bool(differing),
        advice="install the same versions: members with these differences refuse each other",
    )
