"""What faults on request do inside a worker: when they strike, and that they really do."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from elastrain.job.world import PHASES
from elastrain.launcher.faults import grammar
from elastrain.launcher.faults.table import CLASSES, MICRO_BATCH_PHASES, Carrier, lasts_s, settings
from elastrain.offload.drives.posix import PosixEngine
from elastrain.protocol.agent_messages import ArmFault
from elastrain.runtime.faults.armed import LOOP_PHASES, ArmedFaults
from elastrain.runtime.faults.broken_parts import FailingDevice, FailingDrives, Slowness, altered
from elastrain.runtime.faults.fault_actions import ACTIONS
from elastrain.runtime.faults.flips import FrameFlip, MemberMemory, PartialFlip, WrittenFiles, flip
from elastrain.runtime.io.journal import Journal
from elastrain.snapshot.durable.places.local import LocalPlace
from elastrain.snapshot.durable.reading import Checkpoint
from tests.support.checkpoints import save
from tests.support.waiting import until


def message(line: str, *, number: int | None = None) -> ArmFault:
    """What an agent tells a worker of a fault."""
    fault = grammar.parse(line)
    return ArmFault(
        kind=fault.kind,
        step=fault.place.step,
        phase=fault.place.phase,
        for_s=lasts_s(fault),
        options=settings(fault),
        number=number,
    )


def empty() -> ArmedFaults:
    return ArmedFaults(Journal(None, "m1"), lambda number: None)


def armed(line: str, **how: Any) -> ArmedFaults:
    faults = empty()
    faults.arm(message(line, **how))
    return faults


def end_of(act: Callable[[], None]) -> int:
    """The status of a process that does nothing else."""
    pid = os.fork()
    if pid == 0:
        try:
            act()
        finally:
            os._exit(0)
    return os.waitpid(pid, 0)[1]


def test_the_worker_has_an_action_for_each_class_that_it_carries_out() -> None:
    mine = {row.name for row in CLASSES.values() if row.by is Carrier.WORKER}
    # Beside its own, it stops itself exactly at the place of a fault that the agent undoes, and takes what it limits.
    assert set(ACTIONS) == mine | {"stop", "out-of-memory"}
    for name, action in ACTIONS.items():
        assert action.in_loop <= (set(CLASSES[name].phases) <= LOOP_PHASES), name


@pytest.mark.parametrize(
    ("at", "there"),
    [
        ("--at step=3,phase=backward", (3, "backward")),
        ("--at step=3", (3, "forward")),
        ("--at phase=backward", (1, "backward")),
        ("", (1, "forward")),
    ],
)
def test_a_fault_strikes_once_at_its_place_or_the_first_that_comes(at: str, there: tuple[int, str]) -> None:
    faults = armed(f"exception --target member:m1 {at}")
    struck = []
    for step in (1, 2, 3, 4):
        for phase in ("commit", "forward", "backward"):  # a commit is in another thread: nobody would see it raise
            try:
                faults.reach(step, phase)
            except RuntimeError as error:
                struck.append((step, phase, str(error)))
    assert struck == [(*there, "an injected fault")]


def test_what_the_agent_carries_out_is_told_by_its_number() -> None:
    told: list[int] = []
    faults = ArmedFaults(Journal(None, "m1"), told.append)
    faults.arm(message("preempt --target member:m1 --at phase=commit", number=7))
    faults.reach(2, "forward")
    assert told == []
    faults.reach(2, "commit")
    faults.reach(2, "commit")
    assert told == [7]


@pytest.mark.parametrize(
    ("kind", "number"),
    [("kill", signal.SIGKILL), ("segfault", signal.SIGSEGV), ("abort", signal.SIGABRT)],
)
def test_a_worker_ends_by_the_signal_of_its_fault(kind: str, number: int) -> None:
    status = end_of(lambda: armed(f"{kind} --target member:m1").reach(0, "commit"))
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == number


def test_stop_stops_the_whole_group_until_it_is_continued() -> None:
    def act() -> None:
        os.setpgid(0, 0)
        armed("stop --target member:m1", number=1).reach(0, "commit")

    pid = os.fork()
    if pid == 0:
        try:
            act()
        finally:
            os._exit(3)
    assert os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
    os.kill(pid, signal.SIGCONT)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3


def test_a_device_fails_at_the_operation_that_was_named_and_raises_as_torch_does() -> None:
    def act() -> None:
        faults = armed("device-error --target member:m1 --after 2")
        faults.reach(0, "forward")
        ones = torch.ones(3) + 1.0
        try:
            ones * 2
        except RuntimeError as error:
            os._exit(7 if "device error" in str(error) else 8)

    assert os.waitstatus_to_exitcode(end_of(act)) == 7


@pytest.mark.parametrize("armed_before", [True, False])
@pytest.mark.parametrize("after", [0, 1, 100])
def test_a_device_that_fails_from_a_hook_of_a_backward_on_fails_operations_after_it(
    after: int, armed_before: bool
) -> None:
    """Autograd gives a thread its state back when a hook returns; a mode entered there would be gone."""

    def act() -> None:
        fault, faults = f"device-error --target member:m1 --at phase=backward --after {after}", empty()
        first, last = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

        def reach(parameter: torch.Tensor) -> None:
            if not armed_before:
                faults.arm(message(fault))
            faults.reach(0, "backward")

        last.bias.register_post_accumulate_grad_hook(reach)
        if armed_before:
            faults.arm(message(fault))
        loss = last(first(torch.ones(2, 3))).sum()
        try:
            with faults.tools.device.around(nullcontext)():
                loss.backward()
            for _ in range(120):
                torch.ones(1)
            os._exit(9)
        except RuntimeError as error:
            os._exit((7 if first.weight.grad is None else 6) if "device error" in str(error) else 8)

    # A hundred operations are more than this backward has left, and what comes into force late strikes after it.
    assert os.waitstatus_to_exitcode(end_of(act)) == (7 if armed_before and after < 100 else 6)


def test_a_device_error_that_was_not_begun_leaves_no_mode_behind() -> None:
    device = FailingDevice()
    device.expect()
    with device.around(nullcontext)():
        torch.ones(1)
    assert _get_current_dispatch_mode() is None


def test_a_host_without_room_raises_as_torch_does() -> None:
    def act() -> None:
        armed("device-error --target member:m1 --how memory").reach(0, "forward")
        try:
            torch.ones(1)
        except RuntimeError as error:
            os._exit(7 if "can't allocate memory" in str(error) else 8)

    assert os.waitstatus_to_exitcode(end_of(act)) == 7


@pytest.mark.parametrize("how", ["loop", "lock", "forward", "device"])
def test_a_hang_lasts_as_long_as_was_asked_for(how: str) -> None:
    faults = armed(f"hang --target member:m1 --how {how} --for 0.05")
    began_s = time.monotonic()
    faults.reach(0, "backward")
    assert time.monotonic() >= began_s + 0.05


@pytest.mark.parametrize(("how", "stops_all"), [("lock", True), ("forward", False)])
def test_a_held_interpreter_lock_stops_every_other_thread(how: str, stops_all: bool) -> None:
    beats: list[float] = []
    over = threading.Event()

    def beat() -> None:
        while not over.wait(0.001):
            beats.append(time.monotonic())

    thread = threading.Thread(target=beat)
    thread.start()
    until(lambda: len(beats) > 2, 10, "a thread that runs")
    began_s = time.monotonic()
    armed(f"hang --target member:m1 --how {how} --for 0.5").reach(0, "forward")
    ended_s = time.monotonic()
    over.set()
    thread.join()
    # The two may change places at the very edges.
    inside = [at_s for at_s in beats if began_s + 0.05 < at_s < ended_s - 0.05]
    assert (inside == []) is stops_all


def test_a_slow_worker_takes_a_multiple_of_the_last_micro_batchs_time_and_recovers() -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    @contextmanager
    def computing() -> Iterator[None]:
        now[0] += 2.0
        yield

    slowness = Slowness(lambda: now[0], sleep)
    around = slowness.around(computing)
    took = []
    for number in range(5):
        if number == 1:
            slowness.begin(3.0, "sleep", 15.0)
        began_s = now[0]
        with around():
            pass
        took.append(now[0] - began_s)
    assert took == [2.0, 6.0, 6.0, 6.0, 2.0]


def test_micro_batches_that_are_slower_for_the_delay_do_not_lengthen_it() -> None:
    now, slept = [0.0], [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        slept[0] = seconds

    @contextmanager
    def computing() -> Iterator[None]:
        now[0] += 1.0 + slept[0]
        yield

    slowness = Slowness(lambda: now[0], sleep)
    around = slowness.around(computing)
    delays = []
    for number in range(6):
        if number == 1:
            slowness.begin(3.0, "sleep", None)
        with around():
            pass
        delays.append(slept[0])
    assert delays == [0.0, 2.0, 2.0, 2.0, 2.0, 2.0]


def test_a_busy_straggler_computes_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks at the clock until its time is over, and sleeps neither as it was told to nor otherwise."""
    looks, slept = itertools.count(), list[float]()
    monkeypatch.setattr(time, "sleep", slept.append)
    slowness = Slowness(lambda: float(next(looks)), slept.append)

    @contextmanager
    def computing() -> Iterator[None]:
        for _ in range(20):
            next(looks)
        yield

    around, took = slowness.around(computing), []
    for factor in (1.0, 4.0):
        slowness.begin(factor, "busy", None)
        began = next(looks)
        with around():
            pass
        took.append(next(looks) - began)
    assert 20 <= took[0] < 30
    assert 4 * 20 <= took[1] < 4 * 30
    assert not slept


def test_a_flip_changes_one_bit_and_torch_does_not_know() -> None:
    values = torch.arange(9, dtype=torch.float32)
    before, version = values.clone(), values._version
    assert flip(values, 6) == ""
    changed = (values.view(torch.int32) ^ before.view(torch.int32)).tolist()
    assert changed == [0] * 8 + [64]  # in the largest
    assert values._version == version
    assert "no memory to change" in flip(torch.empty(0), 6)


def test_a_backup_is_flipped_when_a_state_of_its_stays() -> None:
    """The loop waits for it: at first every state is about to be replaced, and the bit would flip for nothing."""
    looks = itertools.count()
    states = {shard: SimpleNamespace(parameters=torch.ones(4)) for shard in range(3)}
    books = SimpleNamespace(is_settled=lambda shard: next(looks) > 20 and shard == 2)
    shards = [SimpleNamespace(index=shard, lanes=(0,)) for shard in range(3)]
    held: Any = type("States", (dict,), {"outside": ()})(states)
    executor: Any = SimpleNamespace(books=books, states=held, layout=SimpleNamespace(shards=shards))
    holders: Any = [SimpleNamespace(primary="m0", backups=("m1",))] * 3
    assert MemberMemory(me="m1", executor=executor, holders=lambda: holders).flip("backup", 30) == ""
    changed = [shard for shard, state in states.items() if not torch.equal(state.parameters, torch.ones(4))]
    assert changed == [2]


def test_a_partial_is_flipped_once_when_it_leaves() -> None:
    partial, checksums, values = PartialFlip(), torch.ones(1), torch.zeros(4)
    partial.strike([checksums, values])
    assert values.count_nonzero() == 0
    partial.ask(6)
    partial.strike([])
    partial.strike([checksums, values])
    partial.strike([checksums, values])
    assert values.count_nonzero() == 1


def test_one_bit_of_what_leaves_next_is_flipped_and_the_sender_keeps_its_own() -> None:
    frame, leaving = FrameFlip(), memoryview(b"abcd")
    assert frame.tamper(leaving) is leaving
    frame.ask(1)
    assert bytes(frame.tamper(leaving)) == b"abad"
    assert bytes(leaving) == b"abcd"
    assert frame.tamper(leaving) is leaving


def test_one_bit_of_what_a_member_has_written_is_flipped_in_the_newest_checkpoint(tmp_path: Path) -> None:
    place = LocalPlace(tmp_path)
    names = [save(place, step).name for step in (10, 20)]
    assert "has written no file" in WrittenFiles(me="m7", place=str(tmp_path)).flip(0)
    assert WrittenFiles(me="m0", place=str(tmp_path)).flip(3) == ""
    problems = [Checkpoint.open([place], name).verify() for name in names]
    assert [len(each) for each in problems] == [0, 1]
    assert "has written no file" in WrittenFiles(me="m0", place="memory://nothing").flip(0)


def test_what_cannot_be_struck_is_said(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "m1")
    faults = ArmedFaults(journal, lambda number: None)
    for line in ("flip --where spill", "flip", "flip --where file", "drive"):
        faults.arm(message(f"{line} --target member:m1"))
    faults.reach(0, "commit")
    text = next(tmp_path.rglob("*.jsonl")).read_text()
    assert text.count('"fault_refused"') == 4
    assert text.count("this job writes no checkpoints") == 1
    assert text.count("this worker has no drive") == 2


# ---- drives


@pytest.fixture
def drives() -> FailingDrives:
    return FailingDrives()


@pytest.fixture
def engine(tmp_path: Path, drives: FailingDrives) -> Iterator[PosixEngine]:
    engine = PosixEngine(tmp_path, calls=drives.take_over())
    engine.reserve(8192)
    yield engine
    engine.close()


def page(value: int) -> memoryview:
    """Aligned, as direct I/O wants it."""
    import mmap

    whole = memoryview(mmap.mmap(-1, 4096))
    whole[:] = bytes([value]) * 4096
    return whole


def test_a_drive_that_nothing_was_asked_of_works(engine: PosixEngine) -> None:
    engine.write(0, [page(5)])
    got = page(0)
    engine.read(0, [got])
    assert bytes(got) == bytes(page(5))


def test_a_full_drive_takes_nothing_and_still_gives_back(engine: PosixEngine, drives: FailingDrives) -> None:
    engine.write(0, [page(5)])
    assert drives.begin("full", 1.0, None) == ""
    for write in (lambda: engine.write(0, [page(6)]), lambda: engine.reserve(1 << 20)):
        with pytest.raises(OSError, match="No space left"):
            write()
    got = page(0)
    engine.read(0, [got])
    assert got[0] == 5


def test_a_failing_drive_fails_until_its_time_is_over(engine: PosixEngine, drives: FailingDrives) -> None:
    drives.begin("failing", 1.0, 0.05)
    with pytest.raises(OSError, match="Input/output error"):
        engine.write(0, [page(5)])
    time.sleep(0.05)
    engine.write(0, [page(5)])


def test_a_slow_drive_takes_as_long_as_its_rate_says(engine: PosixEngine, drives: FailingDrives) -> None:
    drives.begin("slow", 4096 / 0.05, None)
    began_s = time.monotonic()
    engine.write(0, [page(5)])
    assert time.monotonic() - began_s >= 0.05


def test_one_bit_of_what_is_read_next_is_another(engine: PosixEngine, drives: FailingDrives) -> None:
    engine.write(0, [page(5)])
    assert drives.flip_next() == ""
    first, second = page(0), page(0)
    engine.read(0, [first])
    engine.read(0, [second])
    assert sum(a != b for a, b in zip(first, page(5), strict=True)) == 1
    assert bytes(second) == bytes(page(5))


# ---- replacements


def test_a_wrong_replacement_says_something_else_of_itself_in_one_setting() -> None:
    journal = Journal(None, "m1")
    spec = {"seed": 3, "torch": "2.9.0", "intra-op threads": 1, "model": "x"}
    assert altered(spec, "", journal) == spec
    whats = ("config", "threads", "torch")
    changed = {what: {k for k in spec if altered(spec, what, journal)[k] != spec[k]} for what in whats}
    assert changed == {"config": {"seed"}, "threads": {"intra-op threads"}, "torch": {"torch"}}


@pytest.mark.parametrize(("wrong", "refused"), [("", 0), ("config", 0), ("secret", 0), ("threads", 1)])
def test_a_job_that_compares_no_such_setting_says_that_the_replacement_fits(
    tmp_path: Path, wrong: str, refused: int
) -> None:
    altered({"seed": 3}, wrong, Journal(tmp_path, "m1"))
    text = "".join(path.read_text() for path in tmp_path.rglob("*.jsonl"))
    assert text.count('"fault_refused"') == text.count("this job does not compare intra-op threads") == refused


def test_phases_of_the_loop_are_phases() -> None:
    assert set(PHASES) >= LOOP_PHASES
    assert set(MICRO_BATCH_PHASES) <= LOOP_PHASES
