"""The layer contracts of docs/index.md, read from the sources' import statements."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.imports import imports, within
from tests.support.sources import ROOMS, ROOT, files, module_of

# What decides over values may use of the standard library: all else has a clock, does I/O, or draws numbers.
PURE_STANDARD = frozenset(
    {
        "__future__",
        "bisect",
        "collections",
        "copy",
        "dataclasses",
        "enum",
        "fractions",
        "functools",
        "hashlib",
        "heapq",
        "itertools",
        "json",
        "math",
        "operator",
        "re",
        "statistics",
        "struct",
        "typing",
    }
)
# Bytes to typed values and back, without I/O: what travels is named in pure parts.
PURE_LIBRARIES = frozenset({"msgspec"})
# What every room may import, and of it what is plain arithmetic, which pure parts may import too.
BASE = frozenset({"elastrain.base"})
PURE_BASE = frozenset(f"elastrain.base.{name}" for name in ("arithmetic", "resume", "thread_status", "told_devices"))
# What rooms with tensors may import besides: the port to devices.
PORT = frozenset({"elastrain.device"})
# Torch-free parts, and the port, to count devices: of comm, what finds peers and proves the secret; of offload, what
# `elastrain offload` reads and prints, and what --offload-dir must be. The durable tier imports torch only where
# tensors are read.
LAUNCHER_MAY_IMPORT = frozenset(
    {
        "elastrain.launcher",
        "elastrain.base",
        "elastrain.device",
        "elastrain.errors",
        "elastrain.version",
        "elastrain.decisions.blame",
        "elastrain.decisions.membership",
        "elastrain.integrity.bit_causes",
        "elastrain.integrity.bit_traces",
        "elastrain.job.world",
        "elastrain.protocol.agent_messages",
        "elastrain.protocol.codec",
        "elastrain.protocol.handlers",
        "elastrain.comm.errors",
        *(f"elastrain.comm.shm.{name}" for name in ("group_trails", "heartbeat_page", "liveness")),
        *(
            f"elastrain.comm.wire.{name}"
            for name in ("acceptor", "addresses", "handshake", "ports", "sealing", "secure")
        ),
        "elastrain.offload.errors",
        "elastrain.offload.drives.directories",
        "elastrain.offload.planning",
        "elastrain.offload.report",
        "elastrain.snapshot.durable",
    }
)
# The wings of the communicator: what each may import besides itself and `comm.errors`.
WINGS = {
    "shm": set[str](),
    "wire": {"shm"},
    "collectives": set[str](),
    "groups": {"shm", "wire", "collectives"},
    "torch_backend": {"shm", "wire", "collectives", "groups", "autoload"},
}
RUNTIME_MAY_IMPORT_OF_COMM = frozenset({"elastrain.comm.errors", "elastrain.comm.shm", "elastrain.comm.wire"})


# Folders of the package that do I/O, keep time or compute with tensors. Every other folder in it is pure.
NOT_PURE = {"runtime", "base", "device", "stubs", "integrations", *ROOMS}


def _imports(path: Path) -> frozenset[str]:
    """Every module and name that the file imports, at any depth, also for type checkers only."""
    return imports(path.read_text(), module_of(path))


def _is_pure(path: Path) -> bool:
    return not NOT_PURE & set(path.parts[len(ROOT.parts) :]) and path != ROOT / "elastrain/__init__.py"


PURE = [path for path in files(ROOT / "elastrain") if _is_pure(path)]
AGENT_VALUES = frozenset(
    {"elastrain.launcher.core", "elastrain.launcher.faults"}
    | {
        f"elastrain.launcher.shared.{name}"
        for name in ("checkpoint_inventory", "job_values", "notices", "places", "times")
    }
)
"""What the agent's core may import besides: its own parts, and values that it shares with the agent around it."""
PURE_MODULES = frozenset(module_of(path).removesuffix(".__init__") for path in PURE)
PRODUCT = [path for room in ("elastrain", *ROOMS) for path in files(ROOT / room)]


def not_pure(source: str, module: str) -> set[str]:
    """What a pure part may not import: it may values of the standard library, and other pure parts."""
    allowed = PURE_STANDARD | PURE_LIBRARIES | PURE_BASE | PURE_MODULES
    return {name for name in imports(source, module) if not within(name, allowed)}


def beyond_room(source: str, module: str, room: str) -> set[str]:
    """Imports that a room that stands alone may not have: any of ours but itself, the base and the port to devices."""
    ours = {name for name in imports(source, module) if within(name, {"elastrain"})}
    return {name for name in ours if not within(name, BASE | PORT | {f"elastrain.{room}"})}


def beyond_torch(source: str, module: str) -> set[str]:
    """Imports that the port to devices may not have: any but torch, the standard library and itself."""
    allowed = PORT | {"torch", *sys.stdlib_module_names}
    return {name for name in imports(source, module) if not within(name, allowed)}


def beyond_launcher(source: str, module: str) -> set[str]:
    """What the launcher may not import of ours."""
    ours = {name for name in imports(source, module) if within(name, {"elastrain"})}
    return {name for name in ours if not within(name, LAUNCHER_MAY_IMPORT)}


def beyond_wing(source: str, module: str, wing: str) -> set[str]:
    """What a wing of the communicator may not import of it: a wing behind its own, or the names that users get."""
    allowed = {f"elastrain.comm.{name}" for name in (wing, "errors", *WINGS[wing])}
    return {name for name in imports(source, module) if within(name, {"elastrain.comm"}) and not within(name, allowed)}


def beyond_wire(source: str, module: str) -> set[str]:
    """What the runtime may not import of the communicator: it needs links and shared memory, no collectives."""
    found = {name for name in imports(source, module) if within(name, {"elastrain.comm"})}
    return {name for name in found if not within(name, RUNTIME_MAY_IMPORT_OF_COMM)}


@pytest.mark.parametrize("path", files(ROOT / "elastrain/base"), ids=lambda p: p.name)
def test_the_base_imports_nothing_of_ours_and_no_torch(path: Path) -> None:
    assert not {name for name in _imports(path) if within(name, {"elastrain", "torch"}) and not within(name, BASE)}
    if within(module_of(path), PURE_BASE):
        assert not_pure(path.read_text(), module_of(path)) == set()


@pytest.mark.parametrize("path", files(ROOT / "elastrain/device"), ids=lambda p: p.name)
def test_the_port_to_devices_imports_torch_only(path: Path) -> None:
    assert beyond_torch(path.read_text(), module_of(path)) == set()


@pytest.mark.parametrize("path", files(ROOT / "launcher/core"), ids=lambda p: p.name)
def test_what_the_agent_decides_uses_only_values(path: Path) -> None:
    beyond = not_pure(path.read_text(), module_of(path))
    assert {name for name in beyond if not within(name, AGENT_VALUES)} == set()


PLAN_FILES = {"profile": frozenset({"pathlib", "elastrain.base.line_files"})}
"""Profiles are read from files and written to them."""
PLANS_MAY_IMPORT = frozenset({"numpy", "elastrain.offload.planning", "elastrain.offload.errors"})


@pytest.mark.parametrize("path", files(ROOT / "offload/planning"), ids=lambda p: p.name)
def test_plans_are_made_of_values(path: Path) -> None:
    allowed = PURE_STANDARD | PURE_LIBRARIES | PLANS_MAY_IMPORT | PLAN_FILES.get(path.stem, frozenset())
    assert {each for each in _imports(path) if not within(each, allowed)} == set()


@pytest.mark.parametrize("path", PURE, ids=lambda p: p.name)
def test_pure_part_uses_only_values(path: Path) -> None:
    assert not_pure(path.read_text(), module_of(path)) == set()


@pytest.mark.parametrize("room", ["comm", "snapshot", "offload"])
def test_room_stands_alone(room: str) -> None:
    for path in files(ROOT / room):
        assert beyond_room(path.read_text(), module_of(path), room) == set(), path


@pytest.mark.parametrize("wing", WINGS)
def test_a_wing_of_the_communicator_imports_those_before_it(wing: str) -> None:
    for path in files(ROOT / "comm" / wing):
        assert beyond_wing(path.read_text(), module_of(path), wing) == set(), path


def test_every_file_of_the_communicator_lies_in_a_wing_or_at_its_door() -> None:
    places = {path.relative_to(ROOT / "comm").parts[0] for path in files(ROOT / "comm")}
    assert places == {*WINGS, "__init__.py", "autoload.py", "errors.py"}


@pytest.mark.parametrize("path", files(ROOT / "elastrain/pipeline/stubs"), ids=lambda p: p.name)
def test_stubs_know_torch_and_the_pure_parts_of_pipelines(path: Path) -> None:
    ours = {name for name in _imports(path) if within(name, {"elastrain"})}
    assert {name for name in ours if not within(name, {"elastrain.pipeline", "elastrain.errors"})} == set()


def test_the_runtime_uses_links_and_shared_memory_of_the_communicator() -> None:
    for path in files(ROOT / "elastrain" / "runtime"):
        assert beyond_wire(path.read_text(), module_of(path)) == set(), path


def test_launcher_knows_only_the_pure_parts_and_the_handshake() -> None:
    for path in files(ROOT / "launcher"):
        assert beyond_launcher(path.read_text(), module_of(path)) == set(), path


def test_launcher_imports_torch_late() -> None:
    for path in files(ROOT / "launcher"):
        found = imports(path.read_text(), module_of(path), typing_too=False, top_only=True)
        assert not any(within(name, {"torch"}) for name in found), path


PURE_PLANTS = {
    "a room by name": "from elastrain import comm",
    "a room, relative": "from ..comm import mesh",
    "a room, relative and whole": "from .. import comm",
    "a room under another name": "import elastrain.comm as x",
    "a room by a call": "import importlib\nmesh = importlib.import_module('elastrain.comm.wire.mesh')",
    "a room by a call, in a function": "def late():\n    return import_module('..comm', 'elastrain.job')",
    "the runtime": "from elastrain.runtime import job",
    "what knows the machine": "import ctypes, pathlib, multiprocessing",
    "part of what knows the machine": "from os.path import join",
    "another library": "import numpy.random",
    "the whole package": "import elastrain\ncomm = elastrain.comm",
    "the whole package, by a star": "from elastrain import *",
    "a part of the runtime from a folder below": "from ..runtime.job import Job",
    "a way to import what no text names": "from importlib import import_module as load",
    "for type checkers only": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch import Tensor",
}


@pytest.mark.parametrize("source", PURE_PLANTS.values(), ids=PURE_PLANTS)
def test_what_is_planted_in_a_pure_part_is_found(source: str) -> None:
    """Alone, and below what a real one holds."""
    assert not_pure(source, "elastrain.job.run_plan")
    assert not_pure(PURE[0].read_text() + source, module_of(PURE[0]))


def test_an_import_by_a_call_is_found_by_the_name_of_its_module() -> None:
    found = imports(PURE_PLANTS["a room by a call"], "elastrain.job.run_plan")
    assert "elastrain.comm.wire.mesh" in found
    assert "elastrain.comm" in imports(PURE_PLANTS["a room by a call, in a function"], "elastrain.job.run_plan")


def test_what_pure_parts_may_import_is_let_pass() -> None:
    standard = "from collections.abc import Sequence\nimport json\n"
    source = standard + "from elastrain.job import fold\nfrom .run_plan import Plan\nfrom . import batch"
    assert not_pure(source, "elastrain.job.layout") == set()


@pytest.mark.parametrize(
    "source",
    ["from ..offload import manager", "from elastrain import offload", "from .. import fold", "import elastrain"],
)
def test_what_is_planted_in_a_room_is_found(source: str) -> None:
    assert beyond_room(source, "elastrain.comm.errors", "comm")
    assert beyond_room("from . import wire\nfrom .wire.mesh import Mesh", "elastrain.comm.errors", "comm") == set()


@pytest.mark.parametrize(
    "source", ["from elastrain.base import thread_status", "import numpy", "from .. import errors"]
)
def test_what_is_planted_in_the_port_to_devices_is_found(source: str) -> None:
    assert beyond_torch(source, "elastrain.device.port")
    assert (
        beyond_torch("import threading\nfrom torch import Tensor\nfrom . import landing", "elastrain.device.port")
        == set()
    )


@pytest.mark.parametrize("source", ["from ..groups import group", "from elastrain.comm import groups, shm"])
def test_what_is_planted_in_a_wing_or_in_the_runtime_is_found(source: str) -> None:
    assert beyond_wing(source, "elastrain.comm.wire.addresses", "wire")
    assert beyond_wire(source.replace("..groups", "..comm.groups"), "elastrain.runtime.job")
    assert beyond_wing("from ..shm import memory\nfrom . import mesh", "elastrain.comm.wire.addresses", "wire") == set()
    assert beyond_wire("from ..comm.wire.mesh import Mesh", "elastrain.runtime.job") == set()


@pytest.mark.parametrize(
    "source",
    [
        "from elastrain.offload import manager",
        "from ...comm import mesh",
        "import elastrain.job.fold",
        "from elastrain import comm",
        "import elastrain.offload",
    ],
)
def test_what_is_planted_in_the_launcher_is_found(source: str) -> None:
    assert beyond_launcher(source, "elastrain.launcher.shared.console")
    assert beyond_launcher("from elastrain.comm.wire import handshake", "elastrain.launcher.shared.console") == set()


def test_torch_in_the_launcher_is_found_at_the_top_and_let_pass_in_functions_and_for_type_checkers() -> None:
    def found(source: str) -> set[str]:
        return imports(source, "elastrain.launcher.shared.console", typing_too=False, top_only=True)

    assert "torch" in found("try:\n    import torch\nexcept ImportError:\n    pass")
    assert "torch" not in found("def late():\n    import torch")
    assert "torch.Tensor" not in found("import typing\nif typing.TYPE_CHECKING:\n    from torch import Tensor")


def test_nothing_imports_experiments_or_tests() -> None:
    for path in PRODUCT:
        assert not {name.split(".")[0] for name in _imports(path)} & {"experiments", "tests"}, path


def test_rooms_are_imported_under_elastrain_only() -> None:
    """`import comm.mesh` from the repository root would make a second module object."""
    for path in [*PRODUCT, *files(ROOT / "tests"), *files(ROOT / "experiments")]:
        assert not {name.split(".")[0] for name in _imports(path)} & set(ROOMS), path


def test_import_and_command_line_start_without_torch() -> None:
    code = "import sys, elastrain, elastrain.launcher.cli.command_line; sys.exit('torch' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], env=env, timeout=180).returncode == 0
