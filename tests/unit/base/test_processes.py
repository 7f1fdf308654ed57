"""Programs that are tied to the process that starts them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from elastrain.base.processes import tied


def test_a_tied_program_is_the_program_and_ends_as_it_does() -> None:
    body = "import sys; print(sys.argv[1:]); sys.exit(3)"
    done = subprocess.run(tied([sys.executable, "-c", body, "a b", ""]), capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (3, "['a b', '']\n", "")


def test_what_is_no_program_ends_in_a_sentence(tmp_path: Path) -> None:
    (file := tmp_path / "file").write_text("words")
    file.chmod(0o700)
    done = subprocess.run(tied([str(file)]), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, f"{file} cannot be executed: Exec format error\n")
