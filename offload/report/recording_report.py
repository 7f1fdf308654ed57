"""Report of a recording: how much of the memory a step uses at a time, and its slowest operators. Pure."""

from __future__ import annotations

from collections import defaultdict
from itertools import accumulate

from elastrain.offload.planning.plan_values import Kind
from elastrain.offload.planning.profile import size
from elastrain.offload.planning.step_recording import HELD, Recording

SLOWEST = 5


def held_bytes(recording: Recording) -> list[int]:
    """Return the bytes of all existing storages, for each operator."""
    change = [0] * (len(recording.operators) + 1)
    for storage in recording.storages:
        change[storage.born or 0] += storage.size_bytes
        if storage.died is not None and storage.died < len(recording.operators):
            change[max(storage.died, storage.born or 0)] -= storage.size_bytes
    return list(accumulate(change))[:-1]


def used_bytes(recording: Recording) -> list[int]:
    """Return the bytes of the storages that each operator used."""
    found = [0] * len(recording.operators)
    for storage in recording.storages:
        for place in storage.uses:
            found[place] += storage.size_bytes
    return found


def active_fraction(recording: Recording) -> float:
    """Return the bytes in use divided by the bytes held, as the mean over operators."""
    pairs = [(used, held) for used, held in zip(used_bytes(recording), held_bytes(recording), strict=True) if held]
    return sum(used / held for used, held in pairs) / max(1, len(pairs))


def bytes_of(recording: Recording, kind: Kind) -> int:
    """Return the bytes of all storages of one kind, even if they did not exist at the same time."""
    return sum(storage.size_bytes for storage in recording.storages if storage.kind is kind)


def render(recording: Recording) -> str:
    """Return the text that `elastrain offload show` prints below the plan."""
    seconds, runs = defaultdict[str, float](float), defaultdict[str, int](int)
    for each in recording.operators:
        seconds[each.name] += each.seconds
        runs[each.name] += 1
    operators, most = len(recording.operators), size(max(held_bytes(recording), default=0))
    lines = [
        f"recorded  {operators} operators in {sum(seconds.values()):.3f} s, at most {most} held; "
        f"an operator uses {active_fraction(recording):.2%} of what is held, in the mean"
    ]
    for kind in HELD:
        count = sum(storage.kind is kind for storage in recording.storages)
        lines.append(f"  {kind.value:<38}{count:>8} storages{size(bytes_of(recording, kind)):>12}")
    for name in sorted(seconds, key=lambda each: -seconds[each])[:SLOWEST]:
        lines.append(f"  {name.removeprefix('aten.'):<38.38}{runs[name]:>8} runs    {seconds[name]:>10.3f} s")
    return "\n".join(lines)
