"""The layer contracts of ARCHITECTURE.md, read from the sources' import statements."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("comm", "snapshot", "offload", "launcher")
FORBIDDEN_IN_PURE = {
    "time",
    "random",
    "os",
    "socket",
    "threading",
    "logging",
    "torch",
    "numpy",
    "subprocess",
    "asyncio",
}
UNSAFE_CALLS = {("torch", "load"), ("yaml", "load"), ("marshal", "loads")}
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}
FROM_OUR_OWN_FORKS = {ROOT / "elastrain/runtime/packing.py": {"pickle"}}  # the user's data, as his dataset made it


def _sources(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if not any(part.is_symlink() for part in path.parents))


def _imports(path: Path) -> set[str]:
    """Every module that the file imports, at any depth, except under `if TYPE_CHECKING`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
    return found


def _module_level_imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


PURE = [p for p in (ROOT / "elastrain").glob("*.py") if p.name != "__init__.py"]
RUNTIME_TRAFFIC = [p for room in ("elastrain", *ROOMS) for p in _sources(ROOT / room)]


@pytest.mark.parametrize("path", PURE, ids=lambda p: p.name)
def test_pure_part_uses_only_values(path: Path) -> None:
    tops = {name.split(".")[0] for name in _imports(path)}
    assert not tops & FORBIDDEN_IN_PURE
    ours = {name for name in _imports(path) if name.startswith("elastrain.")}
    assert all(name.count(".") == 1 and name.split(".")[1] not in (*ROOMS, "runtime") for name in ours)


@pytest.mark.parametrize("room", ["comm", "snapshot", "offload"])
def test_room_stands_alone(room: str) -> None:
    for path in _sources(ROOT / room):
        for name in _imports(path):
            parts = name.split(".")
            if parts[0] == "elastrain":
                assert parts[1:2] == [room], f"{path} imports {name}"


def test_launcher_knows_only_the_pure_parts_and_the_handshake() -> None:
    # comm.handshake, its errors and comm.liveness are torch-free: one handshake and one death detector for all.
    allowed = {"launcher", "world", "errors", "membership", "placement", "batch"}
    allowed_comm = {"elastrain.comm.handshake", "elastrain.comm.errors", "elastrain.comm.liveness"}
    # What `elastrain offload show` reads and prints, values and text, and what --offload-dir must be: torch-free too.
    allowed_offload = {f"elastrain.offload{part}" for part in ("", ".profile", ".directories", ".errors")}
    for path in _sources(ROOT / "launcher"):
        for name in _imports(path):
            parts = name.split(".")
            if parts[0] == "elastrain" and len(parts) > 1 and name not in allowed_comm | allowed_offload:
                assert parts[1] in allowed, f"{path} imports {name}"


def test_launcher_imports_torch_late() -> None:
    for path in _sources(ROOT / "launcher"):
        assert not any(name.split(".")[0] == "torch" for name in _module_level_imports(path)), path


@pytest.mark.parametrize("path", RUNTIME_TRAFFIC, ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_imports_experiments_or_tests(path: Path) -> None:
    assert not {name.split(".")[0] for name in _imports(path)} & {"experiments", "tests"}


@pytest.mark.parametrize("path", RUNTIME_TRAFFIC, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_unsafe_deserialization(path: Path) -> None:
    tree = ast.parse(path.read_text())
    unsafe = {name.split(".")[0] for name in _imports(path)} & UNSAFE_MODULES
    assert unsafe == FROM_OUR_OWN_FORKS.get(path, set())
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
        ):
            assert (node.func.value.id, node.func.attr) not in UNSAFE_CALLS, f"{path}:{node.lineno}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"eval", "exec"}, f"{path}:{node.lineno}"


def test_rooms_are_imported_under_elastrain_only() -> None:
    """`import comm.mesh` from the repository root would make a second module object."""
    for path in [*RUNTIME_TRAFFIC, *_sources(ROOT / "tests"), *_sources(ROOT / "experiments")]:
        assert not {name.split(".")[0] for name in _imports(path)} & set(ROOMS), path


def test_import_and_command_line_start_without_torch() -> None:
    code = "import sys, elastrain, elastrain.launcher.cli; sys.exit('torch' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], env=env, timeout=60).returncode == 0
