"""The options of `elastrain run`: torchrun's flags and ours are frozen, and what they make is checked."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import get_args

import pytest

from elastrain.errors import ConfigError
from elastrain.launcher.agent.worker_start import (
    HOST_MEMORY_LIMIT,
    HOST_TIER,
    MEMORY_LIMIT,
    OFFLOAD_DIRS,
    Script,
    WorkerWish,
)
from elastrain.launcher.cli.commands.run import run
from elastrain.launcher.cli.options.job_options import MemoryFlags, WaitFlags
from elastrain.launcher.cli.options.node_options import RendezvousFlags, SizeFlags, stages_in
from elastrain.launcher.cli.options.output_options import OutputFlags, ScriptFlags
from elastrain.launcher.faults import grammar
from elastrain.launcher.start.run_options import KEY_TTL_S, RunOptions

FROZEN = Path(__file__).with_name("run_options.txt")
"""A line per argument and option: its names, type, limits, default. What users type today must go on working."""


def told() -> list[str]:
    lines = []
    for parameter in inspect.signature(run).parameters.values():
        kind, declared = get_args(parameter.annotation)
        names = [declared.default, *(declared.param_decls or ())]
        names = [name for name in names if isinstance(name, str)] or [parameter.name.upper()]
        limits = "" if declared.min is None and declared.max is None else f", from {declared.min} to {declared.max}"
        default = "required" if parameter.default is inspect.Parameter.empty else repr(parameter.default)
        lines.append(f"{' '.join(names)}: {getattr(kind, '__name__', kind)}{limits}, {default}")
    return lines


def test_options_and_their_defaults_are_frozen_in_the_order_of_the_help() -> None:
    assert told() == FROZEN.read_text().splitlines()


def test_a_limit_of_memory_reaches_workers_by_their_environment_and_not_by_the_launchers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (MEMORY_LIMIT, OFFLOAD_DIRS, HOST_MEMORY_LIMIT, HOST_TIER):
        monkeypatch.delenv(name, raising=False)
    limit = MemoryFlags(memory_limit="512M", offload_dir=[tmp_path]).limit()
    assert limit == WorkerWish(bytes_per_worker=512 << 20, offload_dirs=(tmp_path,))
    assert limit.environment() == {MEMORY_LIMIT: str(512 << 20), OFFLOAD_DIRS: str(tmp_path)}
    assert MEMORY_LIMIT not in os.environ
    both = MemoryFlags(memory_limit="512M", host_memory_limit="2G", host_tier="1G").limit().environment()
    assert both == {MEMORY_LIMIT: str(512 << 20), HOST_MEMORY_LIMIT: str(2 << 30), HOST_TIER: str(1 << 30)}
    with pytest.raises(ConfigError, match="--host-tier is host memory for what a limit of device memory leaves no"):
        MemoryFlags(host_tier="1G").limit()


def test_an_interface_names_this_nodes_address() -> None:
    assert RendezvousFlags(interface="lo").address() == "127.0.0.1"
    assert (RendezvousFlags().address(), RendezvousFlags(local_addr="::1").address()) == (None, "::1")
    with pytest.raises(ConfigError, match=r"--interface nothing: there is no such interface here; there are .*lo"):
        RendezvousFlags(interface="nothing").address()
    with pytest.raises(ConfigError, match="give one"):
        RendezvousFlags(interface="lo", local_addr="10.0.0.1").address()


def test_what_the_launcher_has_inherited_is_left_to_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MEMORY_LIMIT, "1000")
    assert MemoryFlags().limit().environment() == {}


def test_directories_without_a_limit_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MEMORY_LIMIT, raising=False)
    with pytest.raises(ConfigError, match="give --memory-limit too"):
        MemoryFlags(offload_dir=[tmp_path]).limit()


def test_keys_live_longer_than_anybody_waits() -> None:
    assert WaitFlags().waits().key_ttl_s == KEY_TTL_S
    assert WaitFlags(park_timeout=50_000.0).waits().key_ttl_s == 100_000.0
    with pytest.raises(ConfigError, match="--key-ttl 60: it must be more than --park-timeout"):
        WaitFlags(key_ttl=60.0).waits()


def test_simulated_nodes_are_as_many_at_least_as_at_most() -> None:
    size = SizeFlags(local_nodes=3, nproc_per_node="2").size(RendezvousFlags())
    assert (size.nodes_min, size.nodes_max, size.workers) == (3, 3, 2)


def test_a_worker_that_is_not_shown_writes_into_files() -> None:
    output = OutputFlags(tee="1:3").output(3, ScriptFlags(local_ranks_filter="0"))
    assert output.redirects == {0: 0, 1: 3, 2: 3}
    assert output.tee == {0: 0, 1: 0, 2: 0}


@pytest.mark.parametrize(
    ("flags", "members"), [(SizeFlags(stages="3", nproc_per_node="2"), 2), (SizeFlags(stages="7", local_nodes=3), 3)]
)
def test_more_stages_than_there_can_be_members_are_refused(flags: SizeFlags, members: int) -> None:
    with pytest.raises(ConfigError, match=f"pipelines of {flags.stages} members, and this job has {members}"):
        flags.stages_of(flags.size(RendezvousFlags()))


def test_as_many_stages_as_members_are_taken() -> None:
    flags = SizeFlags(stages="2", nproc_per_node="2")
    assert flags.stages_of(flags.size(RendezvousFlags())) == 2


def test_a_node_that_is_started_again_is_not_struck_by_the_phase_that_it_died_in() -> None:
    lines = [
        "kill --target node:node1 --at phase=commit",
        "kill --target node:node1 --at step=9,phase=commit",
        "kill --target member:m7 --at phase=commit",
        "stop --target node:node1 --at t=9 --for 1",
    ]
    options = RunOptions(
        job="j", script=Script(command="s.py"), target="s.py", faults=tuple(map(grammar.parse, lines))
    ).started_again()
    assert [str(fault) for fault in options.faults] == lines[1:]


def test_auto_stages_are_taken_with_any_number_of_members_and_reach_the_workers() -> None:
    flags = SizeFlags(stages="auto", nproc_per_node="1")
    wish = WorkerWish(stages=flags.stages_of(flags.size(RendezvousFlags())))
    assert (wish.environment(), wish.least_members) == ({"ELASTRAIN_STAGES": "auto"}, 1)
    assert WorkerWish(stages=3).least_members == 3


@pytest.mark.parametrize("words", ["0", "-1", "many", "2.5", ""])
def test_stages_that_are_no_number_are_refused_with_one_sentence(words: str) -> None:
    with pytest.raises(ConfigError, match=f"--stages '{words}': write a number from 1 on, or auto"):
        stages_in(words)
