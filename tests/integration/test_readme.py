"""README's snippets run as they stand, but for the number of steps; its commands have only flags that exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.free_ports import free_ports
from tests.support.training import ROOT, environment

pytestmark = pytest.mark.slow

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)
GIVEN = """
import copy
import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR
torch.set_num_threads(1)
dataset = [torch.full((8,), float(i) / 64) for i in range(128)]

class Model(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 8))

def loss_fn(*given):
    return sum((one(given[-1]) if isinstance(one, nn.Module) else one).square().mean() for one in given[:-1])
"""


def _right_hand(block: str) -> str:
    """The second of two columns."""
    first = block.splitlines()[0]
    return "\n".join(line[first.index("# elastrain") :] for line in block.splitlines()) + "\n"


def _run(script: str, folder: Path, **inherited: str) -> subprocess.CompletedProcess[str]:
    path = folder / "snippet.py"
    path.write_text(script.replace("1000", "3"))
    return warm.run(
        [sys.executable, str(path)],
        env=environment(**inherited),
        capture_output=True,
        text=True,
        timeout=200,
        cwd=folder,
    )


def _snippet(start: str) -> str:
    return next(block for block in BLOCKS if start in block)


def test_every_snippet_is_run_by_a_test() -> None:
    assert len(BLOCKS) == 3


def test_the_loop_runs_beside_the_plain_one(tmp_path: Path) -> None:
    right = _right_hand(_snippet("# plain PyTorch"))
    assert "grouped" not in right
    done = _run(f"{GIVEN}{right}\nprint(step.number, job.digest())", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 ")


@pytest.mark.parametrize("tied", ["", "model[2].weight = model[0].weight\n"])
def test_the_mean_teacher_moves(tmp_path: Path, tied: str) -> None:
    before = f"import elastrain\njob = elastrain.init(seed=0)\nmodel, optimizer = Model(), None\n{tied}"
    loader = "loader = elastrain.DataLoader(dataset, global_batch_size=64, micro_batch_size=4)\n"
    after = "\nassert not torch.equal(teacher[0].weight, start) and not torch.equal(teacher[0].weight, model[0].weight)"
    snippet = _snippet("job.register").replace("job.register", "start = teacher[0].weight.clone()\njob.register", 1)
    done = _run(f"{GIVEN}{before}{loader}{snippet}{after}", tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_ddp_script_runs_on_the_communicator(tmp_path: Path) -> None:
    given = "from torch.nn.parallel import DistributedDataParallel\nmodel = Model()\nbatch = dataset[0]\n"
    given += "optimizer = AdamW(model.parameters(), lr=3e-4)\n"
    given += "loss_fn = lambda out: out.square().mean()\n"
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports()[0])}
    done = _run(f"{GIVEN}{given}{_snippet('init_process_group')}\nprint('done', step)", tmp_path, **alone)
    assert done.returncode == 0, done.stderr
    assert "done 2" in done.stdout


def test_the_one_line_of_offload_works_after_import_elastrain_alone(tmp_path: Path) -> None:
    line = re.search(r"`(with elastrain\.offload\.save_on_disk\(.*?\): loss = model\(batch\))`", README, re.DOTALL)
    assert line is not None
    code = " ".join(line[1].split()).replace('"/ssd"', repr(str(tmp_path)))
    done = _run(f"{GIVEN}import elastrain\nmodel, batch = Model(), dataset[0]\n{code}\nloss.sum().backward()", tmp_path)
    assert done.returncode == 0, done.stderr


def _flags_of(command: str) -> set[str]:
    """As its help shows them; those of the classes of faults as their list does."""
    more = _flags_shown("inject", "--list") if command == "inject" else set()
    return more | _flags_shown(*command.split(), "--help")


def _flags_shown(*words: str) -> set[str]:
    shown = warm.run(
        [sys.executable, "-m", "elastrain.launcher", *words],
        env={**environment(), "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    return set(re.findall(r"--[a-z-]+", shown.stdout))


def test_the_commands_have_only_flags_that_exist() -> None:
    used: dict[str, set[str]] = {}
    for command, rest in re.findall(
        r"^elastrain (run|inject|offload show|status)\b([^#\n]*)", README, flags=re.MULTILINE
    ):
        ours = rest.split(".py")[0]  # what follows is the script's
        used.setdefault(command, set()).update(re.findall(r"--[a-z-]+", ours))
    assert len(used["run"]) > 6
    for command, flags in used.items():
        assert flags <= _flags_of(command), command
