"""Decisions about exceptions: the script, a machine or a device is at fault. Each has a reason.

Pure, as `membership`: all agents know all failures and decide alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from elastrain.decisions.membership import Ruling

DEVICE_FAILURES_MAX = 2
"""Failures of a device after which no worker is started on it."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An exception in a member. If two members have the same `place` and `signature`, the script is at fault.

    An error of a device counts as the script's only if two devices have it.
    """

    member: str
    step: int
    micro_batch: int | None
    signature: str
    device: str = ""
    """Name and UUID of the device that failed; "" for any other exception."""
    # Tracebacks name folders, which differ between machines, so they are not compared.
    traceback: str = field(default="", compare=False)

    @property
    def place(self) -> str:
        """Step and micro-batch, in words."""
        return f"step {self.step}" + ("" if self.micro_batch is None else f", micro-batch {self.micro_batch}")

    def __str__(self) -> str:
        what = f"{self.device} failed" if self.device else "the script raised"
        return f"{what} on {self.member} at {self.place}"

    def repeats(self, other: Failure) -> bool:
        """Return True if this is the other failure again, where only the script is the same."""
        if (self.signature, self.place) != (other.signature, other.place):
            return False
        return self.device != other.device if self.device else self.member != other.member


def ends_job(failure: Failure, earlier: Sequence[Failure], *, committed: bool) -> Ruling:
    """Decide whether an exception ends the job: before the first commit, or the same on two members or devices.

    earlier: failures reported before, from all nodes.
    """
    member, device = failure.member, failure.device
    # Before the first commit the script has never worked: a try on another member would only delay the traceback.
    if not committed and device:
        reason = f"{device} failed on {member} before the first commit: the script or the device is at fault"
        return Ruling(yes=True, reason=reason)
    if not committed:
        return Ruling(yes=True, reason=f"the script raised on {member} before the first commit")
    # One member may raise because its machine is broken. Two that raise alike at one place share only the script.
    other = next((each for each in earlier if failure.repeats(each)), None)
    if other is not None:
        where = f", on {other.device} and on {device}" if device else ""
        reason = (
            f"{other.member} and {member} raised the same exception at {failure.place}{where}: it is a fault in the "
            f"script, not in a {'device' if device else 'machine'}"
        )
        return Ruling(yes=True, reason=reason)
    if device in left_out([*earlier, failure]):
        times = times_failed([*earlier, failure])[device]
        return Ruling(yes=False, reason=f"{failure}, for the {_nth(times)} time: {_NOT_AGAIN}")
    return Ruling(yes=False, reason=f"{failure}; another member tries")


_NOT_AGAIN = "no worker is started on it any more"


def left_out(failures: Sequence[Failure]) -> tuple[str, ...]:
    """Return the devices that have failed so often that no worker is started on them."""
    return tuple(device for device, times in times_failed(failures).items() if times >= DEVICE_FAILURES_MAX)


def times_failed(failures: Sequence[Failure]) -> dict[str, int]:
    """Return how often each device has failed. Several threads of one member may report the same failure."""
    return dict(
        Counter(device for device, _ in dict.fromkeys((each.device, each.member) for each in failures) if device)
    )


def objection(device: str, failures: Sequence[Failure]) -> str:
    """Return why no worker may compute on this device, or ""."""
    if device not in left_out(failures):
        return ""
    return f"its device, {device}, has failed {DEVICE_FAILURES_MAX} times or more, and {_NOT_AGAIN}; {_BOTH_CAUSES}"


_BOTH_CAUSES = (
    "either the script makes it fail, or the device is broken: look at the traceback, and try the script on another "
    "device"
)


def nothing_left(seen: Collection[str], failures: Sequence[Failure]) -> str:
    """Return a sentence if all devices that a worker sees are left out, else "". A worker on the CPU sees none."""
    if not seen or not set(seen) <= set(left_out(failures)):
        return ""
    last = next(each for each in reversed(failures) if each.device in seen)
    return (
        f"no device is left after failures of {', '.join(sorted(seen))}, the last one on {last.member} at "
        f"{last.place} ({last.signature}): {_BOTH_CAUSES}"
    )


def _nth(number: int) -> str:
    return {2: "second", 3: "third"}.get(number, f"{number}th")
