"""Real processes that save on a real file system, killed at random moments, and on one that is full."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from elastrain.snapshot.durable.errors import CheckpointError
from elastrain.snapshot.durable.places.local import LocalPlace
from elastrain.snapshot.durable.retention import choose, thorough
from tests.support.checkpoints import save, state
from tests.support.sources import ROOT

KILLS = 25
SAVES = """
import os, random, signal, sys, time
import torch
from elastrain.snapshot.durable.retention import choose, thorough
from elastrain.snapshot.durable.places.local import LocalPlace
from elastrain.snapshot.durable.retention import kept, prune, remove
from elastrain.snapshot.durable.publishing import mark_verified
from tests.support.checkpoints import save

place, kills = LocalPlace(sys.argv[1]), int(sys.argv[2])
chance = random.Random(7)
for life in range(kills):
    told, says = os.pipe()
    child = os.fork()
    if not child:
        for step in range(1, 10_000):
            name = save(place, step, life=life).name
            os.write(says, b"%d\\n" % step)  # complete
            mark_verified(place, name)
            for removal in prune(kept(place), keep=2, now_s=0.0):
                remove(place, removal.name)
    first = os.read(told, 64)
    time.sleep(chance.random() * 0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(says)
    lines = first
    while more := os.read(told, 65536):
        lines += more
    os.close(told)
    newest = max(map(int, lines.split()))
    found = choose([place], thorough).checkpoint
    assert found and (found.manifest.life, found.manifest.step) >= (life, newest), (life, newest, found)
    print(life, newest, flush=True)
"""


@pytest.mark.slow
def test_after_sigkill_at_any_moment_the_newest_complete_checkpoint_is_there(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SAVES, str(tmp_path / "checkpoints"), str(KILLS)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    told, _ = process.communicate(timeout=240)
    assert process.returncode == 0
    life, step = map(int, told.splitlines()[-1].split())
    assert life == KILLS - 1
    choice = choose([LocalPlace(tmp_path / "checkpoints")], thorough)
    assert choice.checkpoint is not None
    manifest = choice.checkpoint.manifest
    assert (manifest.life, manifest.step) >= (life, step)
    assert [s.digest() for s in choice.checkpoint.read_shards(range(2))] == [
        state(index, manifest.step).digest() for index in range(2)
    ]


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system, which root may")
def test_a_full_disk_ends_in_a_sentence_and_the_checkpoint_before_stays(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "elastrain-test", str(folder)], check=False)
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        place = LocalPlace(folder)
        with pytest.raises(CheckpointError, match=r"there is no room: free some, or keep fewer"):
            _fill(place)
        choice = choose([place], thorough)
        assert choice.checkpoint is not None
        left = [name for name in place.names() if name > choice.checkpoint.manifest.name]
        assert all(not place.names(name) for name in left), "what was begun has gone"
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def _fill(place: LocalPlace) -> None:
    for step in range(1, 100):
        save(place, step)
