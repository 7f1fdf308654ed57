"""Settings for every test: the property tests' profile, whole lines on standard error; figures, seconds per folder."""

from __future__ import annotations

import gc
import os
import signal
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

# As the Makefile has it, for who runs pytest by hand: a forked child waits for ever for threads that it does not have.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import HealthCheck, settings

from tests.support import shared
from tests.support.huge_pages import collapse

# The same examples in every run: a failure is a fault of the code, never of the day. No deadline: machines are shared.
settings.register_profile(
    "house", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("house")
# Of `make check`, by --hypothesis-profile: a quarter of the examples. `make test` and `make test-all` look at all.
settings.register_profile("quarter", settings.get_profile("house"), max_examples=25)

# Unbuffered, Python writes a line of standard error in pieces, and what other processes write comes between.
os.environ.pop("PYTHONUNBUFFERED", None)

# What is forked leaves its parent's connections to etcd alone. One that is closed in a child, as garbage, ends that
# child with a signal or never. And gRPC's own handlers start its threads again in every child, where they end it
# likewise; it reads the setting while it is imported, and programs that tests start run without it, as users' do.
os.register_at_fork(after_in_child=gc.freeze)
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
import grpc  # noqa: E402, F401

del os.environ["GRPC_ENABLE_FORK_SUPPORT"]

# Behind `nohup make test &` they are ignored, in all that is started from here too, and tests send them.
for ignored, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(ignored) is signal.SIG_IGN:
        signal.signal(ignored, handler)

BUDGETS_S = {"unit": 60, "property": 30, "sim": 115, "contract": 45, "integration": 350}
"""Seconds that each folder may take on two quiet cores, ten minutes together."""

_seconds: dict[str, float] = defaultdict(float)
_figures: list[str] = []


def pytest_configure(config: pytest.Config) -> None:
    """Processes of tests have one folder for what they share."""
    if not hasattr(config, "workerinput"):
        shared.open_folder()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-transcripts", action="store_true", help="write tests/sim/transcripts anew")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Of `-n auto`: two processes more than there are cores, since jobs of real processes often wait.

    Of `-n logical`: as many as cores, for tests that compute; each process more imports and collects all over again.
    """
    cores = len(os.sched_getaffinity(0))
    return cores if config.option.numprocesses == "logical" else cores + 2


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imports and collected tests leave hardly any garbage: looking for it took an eighth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """What is imported by now stays: no later collection of garbage need look at it, and tests fork it."""
    gc.collect()
    gc.freeze()
    collapse()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    folder = Path(report.nodeid.partition("::")[0]).parts[1:2]
    _seconds["/".join(folder)] += report.duration
    if report.when == "call":
        _figures.extend(str(value) for name, value in report.user_properties if name == "figures")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What tests have measured, and what each folder took beside its budget.

    Nothing fails for it: a busy machine says nothing about the tests.
    """
    if _figures:
        terminalreporter.section("figures")
        for line in _figures:
            terminalreporter.write_line(line)
    beside = max(1, len(terminalreporter.config.getoption("tx", None) or ()))
    told = [
        (folder, _seconds[folder] / beside, budget_s) for folder, budget_s in BUDGETS_S.items() if folder in _seconds
    ]
    if sum(seconds for _, seconds, _ in told) < 10:
        return
    terminalreporter.section(f"seconds per folder, of its budget ({beside} at a time)")
    for folder, seconds, budget_s in told:
        over = "" if seconds <= budget_s else "  over"
        terminalreporter.write_line(f"{folder:<12}{seconds:>7.0f} of {budget_s:>4}{over}")
    whole = sum(seconds for _, seconds, _ in told), sum(budget_s for _, _, budget_s in told)
    terminalreporter.write_line(f"{'together':<12}{whole[0]:>7.0f} of {whole[1]:>4}")
