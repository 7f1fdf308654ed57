"""A replacement that does not fit the job: what it says of itself differs in one thing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastrain.runtime.journal import Journal

_SETTINGS = {"config": "seed", "threads": "intra-op threads", "torch": "torch"}
"""What is wrong -> the setting that shows it. A wrong secret shows before anything is said."""


def altered(spec: Mapping[str, Any], wrong: str, journal: Journal) -> dict[str, Any]:
    """The spec with another value in the setting; as it is where nothing is to be wrong, or the job has no such one.

    The last is written down: who asked for it waits for a refusal that will not come.
    """
    name = _SETTINGS.get(wrong)
    if name is None:
        return dict(spec)
    if name not in spec:
        why = f"this job does not compare {name} (deterministic=False): the replacement fits and is admitted"
        journal.write("fault_refused", kind="wrong-replacement", reason=why)
        return dict(spec)
    value = spec[name]
    return {**spec, name: f"{value}+altered" if isinstance(value, str) else value + 1}
