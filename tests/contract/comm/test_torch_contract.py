"""The same checks for our backend of torch.distributed, on one host and between nodes, and for Gloo."""

from __future__ import annotations

import datetime
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import elastrain.comm
from elastrain.comm.wire.addresses import MeshConfig
from tests.support.comm_processes import Child, Wire
from tests.support.torch_checks import CHECKS

WORLD = 3
BACKENDS = ("one-node", "nodes", "gloo")
GLOO_LACKS = {  # of torch 2.13
    "half_precision_is_accumulated_in_float32": "it rounds after each addition",
    "tensors_that_are_not_contiguous": "it reduces the memory between the elements",
    "all_gather_into_lists_and_tensors": "it joins, but does not stack",
    "all_gather_of_uneven_sizes": "all sizes are equal there",
    "all_to_all_of_lists": "all sizes are equal there",
    "operations_begun_together_run_in_their_order": "two threads run them side by side",
}


def _member(backend: str, rank: int, path: Path) -> Callable[[Wire], None]:
    def act(wire: Wire) -> None:
        torch.set_num_threads(1)
        node = f"node{rank}" if backend == "nodes" else None
        dist.init_process_group(
            "gloo" if backend == "gloo" else "elastrain",
            store=torch._C._distributed_c10d.FileStore(str(path), WORLD),
            rank=rank,
            world_size=WORLD,
            timeout=datetime.timedelta(seconds=10),
            pg_options=None if backend == "gloo" else elastrain.comm.Options(node=node, mesh=_CONFIG),
        )
        while True:
            try:
                CHECKS[wire.hear()](rank, WORLD)
            except EOFError:
                raise
            except Exception as error:  # noqa: BLE001 - the edge of the process: the test shows it
                wire.say(f"rank {rank}: {error!r}\n{traceback.format_exc()[-3000:]}")
            else:
                wire.say("")

    return act


_CONFIG = MeshConfig(transport="tcp", segment_bytes=8 << 20)


class Trio:
    """Three processes that are one group, started anew after a failure: nobody knows what it left behind."""

    def __init__(self, backend: str, folder: Path) -> None:
        self._backend, self._folder = backend, folder
        self._stack = ExitStack()
        self._children: list[Child] = []
        self._starts = 0

    def run(self, name: str) -> list[str]:
        if not self._children:
            self._starts += 1
            path = self._folder / f"store{self._starts}"
            self._children = [
                self._stack.enter_context(Child(_member(self._backend, rank, path))) for rank in range(WORLD)
            ]
        for child in self._children:
            child.wire.say(name)
        said = [child.wire.hear() for child in self._children]
        if any(said):
            self.close()
        return [words for words in said if words]

    def close(self) -> None:
        self._children = []
        self._stack.close()


@pytest.fixture(scope="module", params=BACKENDS)
def trio(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Trio]]:
    made = Trio(request.param, tmp_path_factory.mktemp(request.param))
    yield request.param, made
    made.close()


@pytest.mark.parametrize("name", CHECKS)
def test_a_backend_of_torch_distributed(trio: tuple[str, Trio], name: str) -> None:
    backend, processes = trio
    if backend == "gloo" and name in GLOO_LACKS:
        pytest.skip(f"Gloo: {GLOO_LACKS[name]}")
    errors = processes.run(name)
    assert not errors, "\n".join(errors)
