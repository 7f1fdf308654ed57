"""The classes of faults as one table: possible targets, options, and the process that carries each one out.

`as_text` prints it for `elastrain inject --list`, and `as_data` for programs. `grammar` checks against it, and
`random_faults` draws from it. Values only.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from elastrain.job.world import PHASES
from elastrain.launcher.faults.fault import Fault, Scheme, Value

LOOP_PHASES = ("forward", "backward", "shutdown")
"""Phases that the training loop's thread passes. Faults in user code can strike only there."""
MICRO_BATCH_PHASES = ("forward", "backward")
MEMBERS = (Scheme.MEMBER,)
NODES_OR_LINKS = (Scheme.NODE, Scheme.LINK)
MEMBERS_OR_NODES = (Scheme.MEMBER, Scheme.NODE)
WRONG = ("config", "threads", "torch", "secret")
"""Properties of a replacement worker that may be wrong."""
NOT_ARMED = "this run is not armed: start it with --inject (or --faults FILE)"
"""Answer of a job that accepts no faults."""
DAY = 86_400.0
"""Seconds of a day: the longest duration of a fault."""


class Carrier(StrEnum):
    """The process that carries a fault out."""

    WORKER = "worker"
    """The struck worker itself."""
    AGENT = "agent"
    LAUNCHER = "launcher"
    """The parent of simulated nodes (`--local-nodes`), which owns the network and etcd."""


class Lasting(StrEnum):
    """A fault's kind of duration: it decides if `--for` may be given."""

    NO = "no"
    MAY = "may"
    """Without `--for`, the fault never ends."""
    MUST = "must"
    """The duration has a default. A fault without an end would be another class."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option of a class: a text, one of `choices`, or a number from `least` to `most`."""

    name: str
    help: str
    default: Value
    choices: tuple[str, ...] = ()
    least: float = 0.0
    most: float = 0.0

    @property
    def is_whole(self) -> bool:
        """True if the value is a whole number."""
        return isinstance(self.default, int)


@dataclass(frozen=True, kw_only=True)
class FaultClass:
    """One row of the table.

    `phases` are those in which it can strike. A fault that strikes from outside the process can name any phase.
    """

    name: str
    help: str
    by: Carrier = Carrier.WORKER
    targets: tuple[Scheme, ...] = MEMBERS
    phases: tuple[str, ...] = PHASES
    lasting: Lasting = Lasting.NO
    for_s: float | None = None
    """Default duration in seconds; None if there is no default."""
    loses: bool = True
    """True if the fault may cost the members that it strikes."""
    heals: bool = False
    """True for faults without an end: a member that survives the first moments survives the fault."""
    options: tuple[Option, ...] = ()

    def option(self, name: str) -> Option | None:
        """Return the option of this name, or None."""
        return next((each for each in self.options if each.name == name), None)


def _number(name: str, default: float, least: float, most: float, meaning: str) -> Option:
    return Option(name=name, help=meaning, default=default, least=least, most=most)


def _word(name: str, *choices: str, meaning: str) -> Option:
    return Option(name=name, help=meaning, default=choices[0], choices=choices)


def _of_links(name: str, meaning: str, *options: Option, loses: bool = True) -> FaultClass:
    by, targets, lasting = Carrier.LAUNCHER, NODES_OR_LINKS, Lasting.MAY
    return FaultClass(name=name, loses=loses, by=by, targets=targets, lasting=lasting, options=options, help=meaning)


def _of_etcd(what: str, meaning: str, for_s: float | None = None) -> FaultClass:
    lasting = Lasting.NO if for_s is None else Lasting.MUST
    by, targets = Carrier.LAUNCHER, (Scheme.ETCD,)
    return FaultClass(
        name=f"etcd-{what}", loses=False, by=by, targets=targets, lasting=lasting, for_s=for_s, help=meaning
    )


_ROWS = (
    FaultClass(
        name="kill",
        targets=MEMBERS_OR_NODES,
        help="SIGKILL to a worker and all that it started; of a node, to all its workers and its agent: node loss.",
    ),
    FaultClass(name="segfault", help="The worker reads from address 0 and dies by SIGSEGV."),
    FaultClass(name="abort", help="The worker calls abort() and dies by SIGABRT."),
    FaultClass(
        name="exception",
        phases=LOOP_PHASES,
        options=(_word("text", "an injected fault", meaning="the exception's text"),),
        help="The training loop raises: a RuntimeError in the thread that runs the script.",
    ),
    FaultClass(
        name="device-error",
        phases=MICRO_BATCH_PHASES,
        options=(
            _number("after", 0, 0, 1_000_000, meaning="operations of torch that still succeed"),
            _word(
                "how",
                *("error", "memory"),
                meaning="error: an accelerator stays broken for the worker, and fails again at each use; memory: the "
                "device has no room for an allocation",
            ),
        ),
        help="An operation of torch raises as it does when a device fails.",
    ),
    FaultClass(
        name="hang",
        phases=LOOP_PHASES,
        lasting=Lasting.MAY,
        options=(
            _word(
                "how",
                *("loop", "lock", "forward", "device"),
                meaning="loop: busy for ever in user code; lock: holds the interpreter lock, so that no thread of the "
                "worker runs; forward: a call that sleeps and does not return; device: a kernel that never ends "
                "(on the CPU: as forward)",
            ),
        ),
        help="The worker lives and its training loop does not go on.",
    ),
    FaultClass(
        name="slow",
        loses=False,
        phases=MICRO_BATCH_PHASES,
        lasting=Lasting.MAY,
        options=(
            _number("factor", 3.0, 1.0, 1000.0, meaning="how many times as long each micro-batch takes"),
            _word("how", "busy", "sleep", meaning="busy or sleep: what the worker does meanwhile"),
        ),
        help="A straggler: every micro-batch takes longer.",
    ),
    FaultClass(
        name="flip",
        heals=True,
        options=(
            _word(
                "where",
                *("parameters", "taken", "moments", "masters", "backup", "gradient", "partial", "micro-batch"),
                *("spill", "frame", "file"),
                meaning="parameters: what the member computes with and is the primary of; taken: what it computes with "
                "and has from another; moments, masters: the optimizer's state as a primary; backup: as a backup; "
                "gradient: a finished one that it keeps as a backup; partial: a sum on its way; "
                "micro-batch: what its backward has just computed "
                "(phase backward), which only audits show; spill: what a drive "
                "gives back; frame: what it sends next on a socket; file: what it has written of the newest checkpoint",
            ),
            _number("bit", 20, 0, 63, "which bit of the number, counted from the lowest, round and round"),
        ),
        help="One bit changes behind a worker's back: in its memory, on its way, or in a file.",
    ),
    FaultClass(
        name="memory-limit",
        phases=MICRO_BATCH_PHASES,
        help="The worker gets no more memory (RLIMIT_AS): its loop's next allocation fails, and all large ones later.",
    ),
    FaultClass(
        name="drive",
        lasting=Lasting.MAY,
        options=(
            _word(
                "how",
                *("full", "failing", "slow"),
                meaning="full: writes get ENOSPC; failing: every call gets EIO; slow: each call takes longer",
            ),
            _number("rate", 10.0, 0.001, 100_000.0, meaning="MB/s of a slow drive"),
        ),
        help="The drives that the worker offloads to fail; it must have some (--offload-dir).",
    ),
    FaultClass(
        name="stop",
        by=Carrier.AGENT,
        targets=MEMBERS_OR_NODES,
        lasting=Lasting.MAY,
        help="SIGSTOP; with --for, SIGCONT afterwards: longer than the lease, a zombie. Of a node, its agent too.",
    ),
    FaultClass(
        name="preempt",
        by=Carrier.AGENT,
        targets=MEMBERS_OR_NODES,
        options=(_number("grace", 30.0, 0.0, DAY, meaning="seconds until SIGKILL"),),
        help="A preemption notice: SIGTERM, and SIGKILL after a time. Of a node, to its agent.",
    ),
    FaultClass(
        name="throttle",
        loses=False,
        by=Carrier.AGENT,
        lasting=Lasting.MAY,
        options=(_number("share", 0.25, 0.01, 1.0, meaning="of one core"),),
        help="A straggler: the worker gets a share of a core (a CPU quota by cgroup, for root only).",
    ),
    FaultClass(
        name="out-of-memory",
        by=Carrier.AGENT,
        options=(_number("room", 1.0, 1.0, 1 << 20, meaning="MiB that it may still get"),),
        help="The kernel kills the worker when it wants more memory (a limit by cgroup, for root only).",
    ),
    FaultClass(
        name="wrong-replacement",
        by=Carrier.AGENT,
        options=(
            _word("what", *WRONG, meaning=f"what differs: {', '.join(WRONG)} (threads: none with deterministic=False)"),
        ),
        help="The worker is killed, and what is started in its place does not fit the job.",
    ),
    FaultClass(
        name="flap",
        by=Carrier.LAUNCHER,
        targets=(Scheme.NODE,),
        lasting=Lasting.MUST,
        for_s=0.5,
        help="A node's network interface goes down and up again (--netns).",
    ),
    _of_links(
        "partition",
        "A node is cut off, or two from one another: packets are dropped (--netns).",
        _word("way", "both", "in", "out", meaning="both, in, out: which packets are dropped"),
        _word("only", "all", "peers", "etcd", meaning="all, peers, etcd: from whom the node is cut off"),
    ),
    _of_links(
        "loss",
        "A node, or the link between two, loses packets at random (--netns).",
        _number("percent", 10.0, 0.01, 100.0, "of its packets, dropped at random"),
    ),
    _of_links(
        "slow-link",
        "A node's link, or that between two, becomes slow (--netns).",
        _number("rate", 1.0, 0.001, 100_000.0, "Mbit/s that are left to it"),
        loses=False,
    ),
    _of_etcd("kill", "etcd is killed, and started again afterwards with the data that it had.", for_s=5.0),
    _of_etcd("stop", "etcd is stopped (SIGSTOP), and continued afterwards.", for_s=5.0),
    _of_etcd("compact", "etcd forgets all older revisions: watches of them fail."),
    _of_etcd("wipe", "etcd is killed, and started again without its data.", for_s=2.0),
)
CLASSES: Mapping[str, FaultClass] = {row.name: row for row in _ROWS}


def settings(fault: Fault) -> dict[str, Value]:
    """Return all options of the fault's class, with the given values or the defaults."""
    given = dict(fault.options)
    return {each.name: given.get(each.name, each.default) for each in CLASSES[fault.kind].options}


def lasts_s(fault: Fault) -> float | None:
    """Return the duration in seconds, or None if the fault has none (it is instantaneous, or it never ends)."""
    return fault.for_s if fault.for_s is not None else CLASSES[fault.kind].for_s


def as_data() -> list[dict[str, Any]]:
    """Return the table for programs."""
    return [
        {
            "name": row.name,
            "by": str(row.by),
            "targets": [str(scheme) for scheme in row.targets],
            "phases": list(row.phases),
            "for": str(row.lasting),
            "for_s": row.for_s,
            "options": [_option_data(each) for each in row.options],
            "help": row.help,
        }
        for row in CLASSES.values()
    ]


def _option_data(option: Option) -> dict[str, Any]:
    bounds: dict[str, Any] = {"least": option.least, "most": option.most}
    words: dict[str, Any] = {"choices": list(option.choices)}
    is_word = isinstance(option.default, str)
    return {"name": option.name, "default": option.default, "help": option.help, **(words if is_word else bounds)}


def as_text() -> str:
    """Return the table for people: each class, with its options on the lines below."""
    return "\n".join(_line(left, right) for row in CLASSES.values() for left, right in _columns(row))


_SHAPES = {
    Scheme.MEMBER: "member:ID, member:random",
    Scheme.NODE: "node:NAME, node:random",
    Scheme.LINK: "link:A-B",
    Scheme.ETCD: "etcd",
}
_LEFT, _WIDTH = 34, 118


def _columns(row: FaultClass) -> list[tuple[str, str]]:
    found = [
        (row.name, f"{row.help} (By the {row.by}.)"),
        ("  --target", ", ".join(_SHAPES[each] for each in row.targets)),
    ]
    if row.phases != PHASES:
        found.append(("  --at phase=", ", ".join(row.phases)))
    if row.lasting is not Lasting.NO:
        found.append(("  --for SECONDS", f"default: {'for ever' if row.for_s is None else f'{row.for_s:g}'}"))
    return found + [
        (f"  --{each.name} {_values(each)}", f"{each.help}; default: {each.default}") for each in row.options
    ]


def _values(option: Option) -> str:
    if isinstance(option.default, str):
        return "WORD" if len(option.choices) > 1 else "TEXT"
    return f"{option.least:g}..{option.most:g}"


def _line(left: str, right: str) -> str:
    return textwrap.fill(f"{left:<{_LEFT - 2}}  {right}", _WIDTH, subsequent_indent=" " * _LEFT, break_on_hyphens=False)
