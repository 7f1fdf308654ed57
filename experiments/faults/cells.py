"""Which faults there are to try, and what a job must answer to each: a table of values.

Classes and the phases in which they can strike come from the product's own table; here stands what follows. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from elastrain.launcher.faults.table import CLASSES, FaultClass

START = "start"
"""No phase of the product: the fault stands in a file and strikes before the first commit."""


class Ground(StrEnum):
    """What the job runs on."""

    HOST = "host"
    """Four workers on one node."""
    NODES = "nodes"
    """Three simulated nodes of one worker, with an etcd."""
    NETNS = "netns"
    """The same, each node in a network namespace of its own. Root only."""
    HALF = "half"
    """Three workers on one node; parameters in bfloat16, with float32 masters."""
    DRIVES = "drives"
    """Three workers on one node that keep their shards on a drive."""
    CHECKPOINTS = "checkpoints"
    """Three workers on one node that write durable checkpoints."""


class Answer(StrEnum):
    """What a job must do."""

    GOES_ON = "goes on"
    """All members are back, and every committed step is that of the undisturbed job."""
    SHRINKS = "goes on without it"
    """The place of the one struck stays empty, for a reason that is said; everything else as above."""
    ENDS = "ends"
    """It ends by itself with a sentence and a code other than 0."""
    EITHER = "goes on or ends"
    GOES_BACK = "goes back"
    """All its members are killed after the strike: it goes on from a checkpoint before the newest one, saying so."""


class Aim(StrEnum):
    """Whom a way strikes; the driver puts names to it."""

    MEMBER = "member"
    NODE = "node"
    LINK = "link"
    ETCD = "etcd"
    TWO = "two members"
    ALL = "all members"


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to strike with a class, and the promised answer."""

    kind: str
    aim: Aim = Aim.MEMBER
    words: str = ""
    """Options of the class, as on the command line."""
    ground: Ground = Ground.HOST
    answer: Answer = Answer.GOES_ON
    within_s: float = 20.0
    """Until all members train again, or the job has ended, on a quiet machine."""
    loses: bool | None = True
    """Whether the one struck has to be replaced, may not be, or (None) either."""
    says: str = ""
    """What must be on the screen of a job that does not just go on: a regular expression."""
    phases: tuple[str, ...] = ()
    """Empty: all that the class can strike in."""

    @property
    def name(self) -> str:
        whom = "" if self.aim in (Aim.MEMBER, Aim.ETCD) else self.aim
        return " ".join(word for word in (self.kind, self.words, whom) if word)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One way in one phase."""

    way: Way
    phase: str

    def __str__(self) -> str:
        return f"{self.way.name} in {self.phase}"


_STEP_PHASES = ("forward", "backward", "reduce", "commit", "apply", "publish")
_COMPUTING = ("forward", "backward")
_REFUSED = "is refused|not started again"
_GONE = r"holder|state|gone|lost"

WAYS: tuple[Way, ...] = (
    # ---- a process ends
    Way(kind="kill"),
    Way(kind="kill", phases=(START,)),
    Way(kind="kill", aim=Aim.TWO, phases=_STEP_PHASES),
    Way(kind="kill", aim=Aim.ALL, answer=Answer.ENDS, says=_GONE, phases=_STEP_PHASES),
    Way(kind="segfault"),
    Way(kind="abort"),
    Way(kind="exception"),
    # At two places, as no script's own fault would be: both are replaced.
    Way(kind="exception", aim=Aim.TWO, phases=_COMPUTING),
    Way(kind="device-error"),
    Way(kind="memory-limit"),
    Way(kind="out-of-memory"),
    # ---- it lives and does not go on
    Way(kind="hang"),
    Way(kind="hang", words="--how lock"),
    Way(kind="hang", words="--how forward"),
    Way(kind="hang", words="--for 0.5", loses=False),
    Way(kind="stop", words="--for 0.5", loses=False),
    Way(kind="stop", words="--for 8"),
    Way(kind="stop"),
    # ---- it is slow
    Way(kind="slow", words="--factor 3 --how busy --for 3", loses=False),
    Way(kind="slow", words="--factor 3 --how sleep --for 3", loses=False),
    Way(kind="throttle", words="--share 0.25 --for 3", loses=False),
    # ---- it is told to go, or what comes in its place does not fit
    Way(kind="preempt", words="--grace 5"),
    Way(kind="wrong-replacement", words="--what config", answer=Answer.SHRINKS, says=_REFUSED),
    Way(kind="wrong-replacement", words="--what threads", answer=Answer.SHRINKS, says=_REFUSED),
    Way(kind="wrong-replacement", words="--what torch", answer=Answer.SHRINKS, says=_REFUSED),
    # Nobody is told anything by what has another secret: it ends, and one with the right secret takes its place.
    Way(kind="wrong-replacement", words="--what secret"),
    # ---- a bit flips: it is put right, and costs nobody
    Way(kind="flip", words="--where taken", loses=None),
    Way(kind="flip", words="--where backup", loses=None),
    Way(kind="flip", words="--where parameters", loses=None),
    Way(kind="flip", words="--where moments", loses=None),
    Way(kind="flip", words="--where gradient", loses=None),
    Way(kind="flip", words="--where partial", loses=None),
    Way(kind="flip", words="--where frame --bit 3", loses=None),
    Way(kind="flip", words="--where frame", ground=Ground.NETNS, loses=None, phases=_STEP_PHASES),
    Way(kind="flip", words="--where masters", ground=Ground.HALF, loses=None),
    # ---- drives: what they lose is computed again, and whose fail for good is replaced
    Way(kind="flip", words="--where spill", ground=Ground.DRIVES, loses=None, phases=_STEP_PHASES),
    Way(kind="drive", words="--how full --for 1", ground=Ground.DRIVES, loses=None, phases=_STEP_PHASES),
    Way(kind="drive", words="--how slow --rate 5 --for 1", ground=Ground.DRIVES, loses=None, phases=_STEP_PHASES),
    Way(kind="drive", words="--how failing --for 1", ground=Ground.DRIVES, loses=None, phases=_STEP_PHASES),
    # ---- a durable checkpoint changes after it was read back, and is needed
    Way(
        kind="flip",
        words="--where file",
        ground=Ground.CHECKPOINTS,
        answer=Answer.GOES_BACK,
        says="is passed over: .* is damaged",
        within_s=30,
        phases=_STEP_PHASES,
    ),
    # ---- whole nodes
    Way(kind="kill", aim=Aim.NODE, ground=Ground.NODES),
    Way(kind="kill", aim=Aim.NODE, ground=Ground.NODES, phases=(START,)),
    Way(kind="stop", aim=Aim.NODE, words="--for 8", ground=Ground.NODES, within_s=30),
    Way(
        kind="preempt",
        aim=Aim.NODE,
        words="--grace 5",
        ground=Ground.NODES,
        answer=Answer.SHRINKS,
        says="stopped by SIGTERM",
        within_s=30,
    ),
    # ---- etcd: no step waits for it
    Way(kind="etcd-kill", aim=Aim.ETCD, words="--for 3", ground=Ground.NODES, loses=False),
    Way(kind="etcd-stop", aim=Aim.ETCD, words="--for 3", ground=Ground.NODES, loses=False),
    Way(kind="etcd-compact", aim=Aim.ETCD, ground=Ground.NODES, loses=False),
    Way(kind="etcd-wipe", aim=Aim.ETCD, ground=Ground.NODES, loses=False),
    # ---- the network
    Way(kind="flap", aim=Aim.NODE, words="--for 0.5", ground=Ground.NETNS, loses=False),
    Way(kind="partition", aim=Aim.NODE, words="--for 8", ground=Ground.NETNS, within_s=40),
    Way(kind="partition", aim=Aim.NODE, words="--way in --for 8", ground=Ground.NETNS, within_s=40, loses=None),
    Way(kind="partition", aim=Aim.NODE, words="--way out --for 8", ground=Ground.NETNS, within_s=40, loses=None),
    Way(kind="partition", aim=Aim.NODE, words="--only peers --for 8", ground=Ground.NETNS, within_s=40, loses=None),
    Way(kind="partition", aim=Aim.NODE, words="--only etcd --for 8", ground=Ground.NETNS, within_s=40, loses=None),
    Way(kind="partition", aim=Aim.LINK, words="--for 8", ground=Ground.NETNS, within_s=40, loses=None),
    Way(kind="loss", aim=Aim.NODE, words="--percent 5 --for 4", ground=Ground.NETNS, loses=None),
    Way(kind="slow-link", aim=Aim.NODE, words="--rate 10 --for 4", ground=Ground.NETNS, loses=None),
)
WITHOUT: dict[str, str] = {}
"""Classes of the product for which there is no way here, and where they are tried instead."""

QUICK: tuple[tuple[str, str], ...] = (
    ("kill", "backward"),
    ("kill", "commit"),
    ("kill", "decide"),
    ("kill", "join"),
    ("kill two members", "reduce"),
    ("segfault", "forward"),
    ("abort", "apply"),
    ("exception", "backward"),
    ("device-error", "forward"),
    ("stop --for 0.5", "reduce"),
    ("hang", "forward"),
    ("flip --where taken", "forward"),
    ("flip --where masters", "forward"),
    ("flip --where file", "commit"),
    ("drive --how full --for 1", "backward"),
    ("kill all members", "backward"),
    ("kill node", "publish"),
    ("kill node", "commit"),
    ("etcd-stop --for 3", "backward"),
    ("etcd-compact", "forward"),
    ("etcd-kill --for 3", "commit"),
    ("flap --for 0.5 node", "backward"),
    ("partition --for 8 node", "forward"),
    ("loss --percent 5 --for 4 node", "reduce"),
)
"""Names of ways and phases: of every kind one, in at most 90 s."""


def legal_cells(classes: Mapping[str, FaultClass] = CLASSES, ways: Iterable[Way] = WAYS) -> list[Cell]:
    """Every way in every phase in which its class can strike, those of one ground beside each other."""
    cells = [
        Cell(way=way, phase=phase)
        for way in ways
        if way.kind in classes
        for phase in way.phases or classes[way.kind].phases
    ]
    return sorted(cells, key=lambda cell: list(Ground).index(cell.way.ground))


def chosen(cells: Sequence[Cell], names: Iterable[tuple[str, str]]) -> list[Cell]:
    """The cells with these names. Raises KeyError for a name that no legal cell has."""
    known = {(cell.way.name, cell.phase): cell for cell in cells}
    return [known[name] for name in names]


def untried(classes: Mapping[str, FaultClass] = CLASSES) -> list[str]:
    """Classes of the product that neither have a way nor a reason."""
    return sorted(set(classes) - {way.kind for way in WAYS} - set(WITHOUT))


# ------------------------------------------------------------------------------------------------- which share a job

CELLS_PER_JOB = 10


def ordered(cells: Sequence[Cell]) -> list[Cell]:
    """Those that need a job from its start, then those that share one, then those after which it is not whole."""
    kinds = {"start": 0, "shared": 1, "last": 2}
    return sorted(cells, key=lambda cell: kinds[_kind(cell)])


def next_job(left: Sequence[Cell]) -> int:
    """How many of the ordered cells the next job takes: one from its start, some that share it, and a last one."""
    count = 1 if _kind(left[0]) == "start" else 0
    while count < min(len(left), CELLS_PER_JOB) and _kind(left[count]) == "shared":
        count += 1
    return count + (count < len(left) and _kind(left[count]) == "last")


def _kind(cell: Cell) -> str:
    if cell.phase == START:
        return "start"
    return "last" if cell.phase == "shutdown" or cell.way.answer is not Answer.GOES_ON else "shared"
