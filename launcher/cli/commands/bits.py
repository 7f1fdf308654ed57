"""Command `elastrain doctor --bits`: find the first module whose bits differ on two members, and the likely cause."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from elastrain.base.doctor_wishes import BitsWish
from elastrain.base.held_folder import held_folder
from elastrain.base.processes import die_with_parent
from elastrain.errors import ConfigError, ElastrainError
from elastrain.integrity.bit_causes import Finding, finding
from elastrain.integrity.bit_traces import Trace
from elastrain.launcher.agent.worker_start import Script
from elastrain.launcher.shared.process_environment import inherited, without

_CHANGED = {
    "order": {"is_reversed": True},
    "member": {"rank": 1},
    "memory": {"fill": 1},
}
"""Factor -> what the request says instead. The factor "hash" is a variable."""


def bits(named: str, script: Script, *, as_json: bool) -> int:
    """Run the script as two members, print the first difference, and return 1 if there is one, else 0.

    Raises ConfigError if the script never gets to its loop, ElastrainError if it fails.
    """
    with held_folder("elastrain-doctor-") as folder:
        first, *factors = (), "order", "member", "hash", "memory"
        one = _recorded(named, script, folder, first)
        found = finding(
            one, _recorded(named, script, folder, factors), lambda f: _recorded(named, script, folder, (f,))
        )
    if as_json:
        print(json.dumps({"differs": found is not None} | ({} if found is None else asdict(found))))
    else:
        print(_sentence(found, one))
    return 0 if found is None else 1


def _recorded(named: str, script: Script, folder: Path, factors: Sequence[str]) -> Trace:
    """Run the script, with these factors changed, and return the trace that its loop writes."""
    file = folder / "bits.json"
    file.unlink(missing_ok=True)
    wish = BitsWish(file=str(file), initial=str(folder / "initial"))
    for factor in factors:
        wish = replace(wish, **_CHANGED.get(factor, {}))  # type: ignore[arg-type]
    environment = {
        **without("ELASTRAIN_"),
        "OMP_NUM_THREADS": inherited("OMP_NUM_THREADS", "1"),
        "PYTHONHASHSEED": inherited("PYTHONHASHSEED", "1" if "hash" in factors else "0"),
        "TORCHDYNAMO_DISABLE": "1",  # compiled code would hide the modules
        **wish.environment(),
    }
    done = subprocess.run(
        [script.command, *script.args],
        env=environment,
        stdout=sys.stderr.fileno(),
        preexec_fn=partial(die_with_parent, signal.SIGKILL),
        check=False,
    )
    if file.is_file():
        return Trace.from_json(file.read_text())
    if done.returncode:
        how = f"code {done.returncode}" if done.returncode > 0 else f"signal {-done.returncode}"
        raise ElastrainError(f"{named} ended with {how} in its first step: put right what it says above, and ask again")
    raise ConfigError(
        f"{named} ended without a micro-batch of job.steps, so there is nothing to compare: name the script that trains"
    )


def _sentence(found: Finding | None, one: Trace) -> str:
    if found is None:
        computed = len({each.number for each in one.micro_batches})
        return f"nothing differs: two members got the same bits from {computed} micro-batches, in another order"
    changed = f" It changes {', '.join(map(repr, found.changed[:3]))}." if found.changed else ""
    return (
        f"micro-batch {found.micro_batch} differs, first in the {found.way} of {found.module!r}, at {found.operator}. "
        f"Likely cause: {found.advice}.{changed}"
    )
