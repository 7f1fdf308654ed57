"""`elastrain run --resume` beside a script of a library that resumes from a checkpoint of its own: the newer is taken.

The models have no dropout, because random streams follow the job's numbers of steps, which go on from its checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.integration.runtime.test_adapters import ACCELERATOR, TRAINER
from tests.integration.runtime.test_lightning import SCRIPT as LIGHTNING
from tests.integration.runtime.test_lightning import folder_alone
from tests.support.training import run_job, undisturbed

pytestmark = pytest.mark.slow
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install 'elastrain[integrations]'")
pytest.importorskip("transformers", reason="transformers is not installed")

CHECKPOINT = (
    "the job's checkpoint, not from the optimizer state that the script loaded: the checkpoint's has made {} steps"
)
OWN = "that the script loaded, which have made {1} steps, not from the job's checkpoint, which has made {0}"


class Library(NamedTuple):
    script: Path
    arguments: tuple[str, ...]
    folder: str
    """Option for the folder of what the script writes."""
    resume: str
    """Option for a checkpoint of the script's own."""
    own: Callable[[Path], tuple[Path, int]]
    """Returns such a checkpoint, and its number of steps."""


def kept_by_lightning(_: Path) -> tuple[Path, int]:
    file = min((folder_alone("--epochs", "2") / "kept").glob("epoch=*"))
    return file, int(re.findall(r"step=(\d+)", file.name)[0])


def kept(script: Path, name: str, made: int, *arguments: str) -> Callable[[Path], tuple[Path, int]]:
    def own(folder: Path) -> tuple[Path, int]:
        assert undisturbed("--out", str(folder / "own"), *arguments, script=script).exit_code == 0
        return folder / "own" / name, made

    return own


PLAIN, STILL, IN_ORDER = ("--plain",), ("--still",), ("--more", "order=sequential")
LIBRARIES = {
    "accelerate": Library(ACCELERATOR, PLAIN, "--out", "--resume", kept(ACCELERATOR, "step_24", 6, *PLAIN)),
    "accelerate-AdamW": Library(ACCELERATOR, STILL, "--out", "--resume", kept(ACCELERATOR, "step_48", 12, *STILL)),
    "trainer": Library(TRAINER, IN_ORDER, "--out", "--resume", kept(TRAINER, "checkpoint-8", 8, *IN_ORDER)),
    "lightning": Library(LIGHTNING, (), "--folder", "--go-on", kept_by_lightning),
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_of_a_checkpoint_of_the_job_and_one_of_the_scripts_own_the_newer_is_taken(tmp_path: Path, name: str) -> None:
    library, place = LIBRARIES[name], tmp_path / "checkpoints"

    def life(called: str, *options: str, arguments: tuple[str, ...] = (), faults: tuple[str, ...] = ()) -> str:
        folder = tmp_path / called
        folder.mkdir()
        told = (*library.arguments, library.folder, str(folder), *arguments)
        done = run_job(folder, workers=2, arguments=told, options=options, faults=faults, script=library.script)
        assert done.exit_code == 0, done.output
        assert len(done.phases_struck()) == len(faults)
        (digest,) = set(done.digests.values())
        return f"{digest} {done.output}"

    own, made = library.own(tmp_path)
    every = str(2 * made // 3)
    wanted, *_ = life("first", "--checkpoint-dir", str(place), "--checkpoint-every", every, "--keep", "9").split()
    steps = {int(path.name.rpartition("-")[2]): path for path in place.glob("life-*")}
    newer, older = min(step for step in steps if step >= made), min(steps)
    assert older + 1 < made
    for called, step, sentence in (("newer", newer, CHECKPOINT), ("older", older, OWN)):
        writing = ("--checkpoint-dir", str(tmp_path / called / "next"), "--checkpoint-every", "1", "--keep", "30")
        faults = (f"kill --target member:m1 --at step={step + 2},phase=backward",)
        options = ("--resume", str(steps[step]), *writing)
        digest, _, output = life(called, *options, arguments=(library.resume, str(own)), faults=faults).partition(" ")
        assert output.count(sentence.format(step + 1, made)) == 1, output
        assert digest == wanted
    first = min((tmp_path / "older" / "next").glob("life-*"))
    assert life("last", "--resume", str(first)).startswith(wanted), "a life that has no file of the script's own"


@pytest.mark.parametrize("script", [ACCELERATOR, TRAINER], ids=["accelerate", "trainer"])
def test_a_new_life_of_a_job_that_has_lost_all_members_goes_on_with_the_bits(tmp_path: Path, script: Path) -> None:
    alone = undisturbed("--out", str(tmp_path / "one"), script=script)
    options = ("--max-restarts", "0", "--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-every", "2")
    kills = tuple(f"kill --target member:m{number} --at step=9,phase=forward" for number in range(2))
    arguments = ("--out", str(tmp_path / "job"))
    done = run_job(tmp_path, workers=2, arguments=arguments, options=options, faults=kills, script=script)
    assert done.exit_code == 0, done.output
    assert set(done.digests) == {"m2", "m3"}, "members of a new life"
    assert set(done.digests.values()) == set(alone.digests.values())
