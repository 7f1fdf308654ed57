"""Random histories of one storage: memory and slots are given back once, and never while I/O is in flight."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from elastrain.offload.drives import residency as r
from elastrain.offload.drives.residency import State

HAS_SLOT = frozenset(
    {State.WRITING, State.FORWARDED, State.SPILLED, State.READING, State.RELOADED, State.FAILED, State.LEAVING}
)


@dataclass
class World:
    """A shell that keeps the books: what is held, what is in flight, and whether it was asked to end."""

    state: State = State.RESIDENT
    memory: bool = True
    valid: bool = True  # the memory holds the right bytes
    on_disk: bool = False  # the slot holds the right bytes
    slot: bool = False
    in_flight: str = ""
    released: bool = False
    handed_back: int = 0
    log: list[str] = field(default_factory=list)

    def step(self, event: r.Event) -> tuple[r.Command, ...]:
        self.log.append(type(event).__name__)
        self.state, commands = r.advance(self.state, event)
        for command in commands:
            self.perform(command)
        assert self.memory == (self.state in r.MEMORY), self.log
        assert self.slot <= (self.state in HAS_SLOT), self.log
        assert bool(self.in_flight) == (self.state in r.IN_FLIGHT), self.log
        return commands

    def perform(self, command: r.Command) -> None:
        match command:
            case r.StartWrite():
                assert not self.in_flight and self.memory and not self.slot
                self.in_flight, self.slot = "write", True
            case r.StartRead():
                assert not self.in_flight and self.on_disk and not self.memory
                self.in_flight, self.memory, self.valid = "read", True, False
            case r.CancelWrite():
                assert self.in_flight == "write"
            case r.CancelRead() | r.HastenRead():
                assert self.in_flight == "read"
            case r.HandBack():
                assert self.memory and self.valid, self.log
                self.handed_back += 1
            case r.FreeMemory():
                assert self.memory and not self.in_flight, self.log
                self.memory = self.valid = False
            case r.FreeSlot():
                assert not self.in_flight, self.log
                self.slot = self.on_disk = False

    def out_of_memory(self) -> None:
        """The shell could not do what `StartRead` told it."""
        self.in_flight, self.memory = "", False
        self.step(r.NoMemory())

    def end_io(self, how: str) -> None:
        kind, self.in_flight = self.in_flight, ""
        if kind == "write":
            self.on_disk = how == "Done"
            self.slot = how in ("Done", "Outdated")  # a device gives the slot of an unfinished write back itself
        elif how == "Done":
            self.valid = True
        self.step({"write": WRITE_ENDS, "read": READ_ENDS}[kind][how])


WRITE_ENDS = {
    "Done": r.WriteDone(),
    "Failed": r.WriteFailed(),
    "Cancelled": r.WriteCancelled(),
    "Outdated": r.Outdated(),
}
READ_ENDS = {"Done": r.ReadDone(), "Failed": r.ReadFailed(), "Cancelled": r.ReadCancelled()}
MOVES = st.lists(
    st.sampled_from(["spill", "need", "prefetch", "Done", "Failed", "Cancelled", "no memory", "release"]), max_size=40
)


def play(world: World, move: str) -> None:
    if world.state is State.DROPPED:
        return
    if move in ("Done", "Failed", "Cancelled"):
        cancellable = world.state in (State.FORWARDED, State.LEAVING)
        if world.in_flight and (move != "Cancelled" or cancellable):
            world.end_io(move)
    elif move == "no memory":
        if world.in_flight == "read" and world.state is State.READING and not world.valid:
            world.out_of_memory()
    elif move == "release":
        if not world.released:
            world.released = True
            world.step(r.Release())
    elif not world.released:
        world.step({"spill": r.Spill(), "need": r.Need(), "prefetch": r.Prefetch()}[move])


@given(MOVES)
def test_everything_is_given_back_whatever_happens(moves: list[str]) -> None:
    world = World()
    for move in moves:
        play(world, move)
    play(world, "release")
    play(world, "Done")
    assert world.state is State.DROPPED
    assert not world.memory
    assert not world.slot


@given(MOVES)
def test_a_need_is_answered_once_io_has_ended(moves: list[str]) -> None:
    world = World()
    for move in moves:
        if move != "release":
            play(world, move)
    answers: set[r.Command] = set()
    for _ in range(3):  # ask, let the I/O end, ask again: at most one read lies between
        answers |= set(world.step(r.Need()))
        if world.in_flight:
            world.end_io("Done")
    assert answers & {r.HandBack(), r.RaiseFault()}
