"""A waiting worker imports libraries alone, and then runs its script as Python does."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

from elastrain.launcher.agent import standby_worker
from elastrain.launcher.agent.standby_worker import imported, is_library, told

SAYS = """\
import json, os, pickle, sys
import mine

class Point:
    pass

assert pickle.loads(pickle.dumps(Point())).__class__ is Point
print(json.dumps([sys.argv, __name__, __file__, sys.path[0], os.environ["RANK"], mine.IMPORTED_WITH]))
"""
MINE = 'import os\nIMPORTED_WITH = os.environ["RANK"]\nopen("imported", "a").write("once ")\n'


def test_modules_at_the_top_level_are_found_in_order() -> None:
    text = "import a.b, c\nfrom d.e import f\nfrom . import g\nif True:\n    import h\ndef run():\n    import i\n"
    assert imported(text) == ["a.b", "c", "d.e"]
    assert imported("this is no python (") == imported("\0") == []


def test_installed_modules_are_libraries_and_the_scripts_own_are_not() -> None:
    assert all(is_library(name) for name in ("sys", "json.decoder", "torch", "elastrain.data"))
    assert not any(is_library(name) for name in ("tests.support", "experiments", "there.is.none"))


def test_an_agent_that_has_gone_wants_no_worker() -> None:
    ours, theirs = socket.socketpair()
    ours.sendall(b'{"RANK": "3"')
    ours.close()
    assert told(theirs) is None
    theirs.close()


def waiting(folder: Path, *command: str) -> tuple[subprocess.Popen[str], socket.socket]:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-u", standby_worker.__file__, str(theirs.fileno()), *command],
            pass_fds=[theirs.fileno()],
            cwd=folder,
            stdout=subprocess.PIPE,
            text=True,
        )
    return process, ours


def test_a_script_runs_as_under_python_with_the_variables_of_the_agent(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "train.py").write_text(SAYS)
    for kind, target in (("file", "train.py"), ("module", "train")):
        process, sock = waiting(tmp_path, kind, target, "--lr", "1 2")
        with sock:
            sock.sendall(json.dumps({"RANK": "3"}).encode() + b"\n")
        said, _ = process.communicate(timeout=360)
        argv, name, file, path, rank, imported_with = json.loads(said)
        assert (argv[1:], name, rank) == (["--lr", "1 2"], "__main__", "3")
        assert Path(argv[0]).name == Path(file).name == "train.py"
        assert (tmp_path / path).resolve() == tmp_path.resolve()
        assert imported_with == "3", "the script's own modules are imported with the worker's variables"
    assert (tmp_path / "imported").read_text() == "once once "


def test_the_exit_code_is_the_scripts_and_an_unused_process_ends_well(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import missing_module\n")
    for message, code in ((b"{}\n", 1), (b"", 0)):
        process, sock = waiting(tmp_path, "file", "train.py")
        with sock:
            sock.sendall(message)
        process.communicate(timeout=360)
        assert process.returncode == code
