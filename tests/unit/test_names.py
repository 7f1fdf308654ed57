"""After `import elastrain` every name that README uses is there, and torch comes when it is used."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import pytest

import elastrain
from elastrain import errors
from tests.support.sources import ROOT


def _alone(code: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=360)


NAMES = ("offload.save_on_disk", "offload.SpillWriteError", "comm.surviving", "comm.reconfigure", "comm.handle")


@functools.cache
def _reached() -> list[str]:
    """The names as one process finds them, each by its room alone."""
    shown = "".join(f"print(elastrain.{name}.__name__)\n" for name in NAMES)
    done = _alone(f"import elastrain\n{shown}")
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_rooms_are_there_after_import_elastrain_alone(name: str) -> None:
    assert name.split(".")[1] in _reached()


def test_errors_are_caught_by_their_names_without_torch() -> None:
    done = _alone(
        "import sys, elastrain\nassert issubclass(elastrain.ConfigError, ValueError) and 'torch' not in sys.modules"
    )
    assert done.returncode == 0, done.stderr
    told = {name for name in vars(errors) if name.endswith("Error")}
    assert told <= set(elastrain.__all__), "each error that users meet has a name there"
    assert all(getattr(elastrain, name) is getattr(errors, name) for name in told)


def test_a_name_that_is_none_is_still_an_attribute_error() -> None:
    assert not hasattr(elastrain, "nonsense")
    assert set(elastrain.__all__) <= set(dir(elastrain))
