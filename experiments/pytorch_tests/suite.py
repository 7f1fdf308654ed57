"""Runs PyTorch's own distributed_test.py, as it comes with the wheel, on the backend "elastrain"; prints JSON.

    python -m experiments.pytorch_tests.suite WAY [NAME...]

WAY: "own" (BACKEND=elastrain) or "gloo" (BACKEND=gloo, and torch's class for Gloo is ours in every process). Under its
own name most tests skip, because they ask for a backend that they know. Each test forks four processes. It has to be a
process of its own: torch's file reads the environment when it is imported.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import types
import unittest
from typing import Any

WAY, NAMES = sys.argv[1], sys.argv[2:]
os.environ.update(
    BACKEND="elastrain" if WAY == "own" else "gloo",
    WORLD_SIZE="4",
    MASTER_ADDR="127.0.0.1",
    TEMP_DIR=tempfile.mkdtemp(prefix="pytorch-own-"),
    DISTRIBUTED_TESTS_DEFAULT_TIMEOUT="40",
    GLOO_SOCKET_IFNAME="lo",
)
for _folder in ("barrier", "test_dir", "init_dir"):
    os.makedirs(os.path.join(os.environ["TEMP_DIR"], _folder), exist_ok=True)

import torch  # noqa: E402 - the environment comes first
import torch.distributed.distributed_c10d  # noqa: E402
import torch.testing._internal.distributed.distributed_test  # noqa: E402

from elastrain.comm.torch_backend import bootstrap  # noqa: E402
from elastrain.comm.torch_backend.process_group import ProcessGroup  # noqa: E402

c10d: Any = torch.distributed.distributed_c10d
theirs: Any = torch.testing._internal.distributed.distributed_test  # untyped
_asked: dict[str, Any] = {}  # what torch asks its helper for; Gloo's class is not told all of it
_helper = c10d._new_process_group_helper


def _remember(size: int, rank: int, ranks: list[int], backend: str, store: Any, name: str, **options: Any) -> Any:
    _asked.update(ranks=ranks, name=name)
    return _helper(size, rank, ranks, backend, store, name, **options)


class InPlaceOfGloo(ProcessGroup):
    """Ours, made with the arguments of Gloo's class."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        opts = types.SimpleNamespace(
            store=store,
            group_rank=rank,
            group_size=size,
            timeout=timeout,
            group_id=_asked["name"],
            global_ranks_in_group=_asked["ranks"],
        )
        made = bootstrap.create(opts, None)
        super().__init__(made.group, made._name, made._on_shutdown)
        self.options = types.SimpleNamespace()

    def _set_sequence_number_for_group(self) -> None:
        pass


# The profiler's events of a backend, with shapes, are made by torch's own backends in C++ only.
theirs.PROFILING_SUPPORTED_BACKENDS.clear()
theirs.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.clear()


class PyTorchsOwn(theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):  # type: ignore[misc] # the bases are Any
    def setUp(self) -> None:
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    @classmethod
    def _run(cls, *args: Any, **kwargs: Any) -> None:
        torch.set_num_threads(1)
        if WAY == "gloo":
            c10d._new_process_group_helper = _remember
            c10d.ProcessGroupGloo = InPlaceOfGloo
        super()._run(*args, **kwargs)


class _Result(unittest.TestResult):
    def __init__(self) -> None:
        super().__init__()
        self.passed: list[str] = []
        self.seconds: dict[str, float] = {}

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802 - unittest's name
        super().startTest(test)
        self._began_s = time.monotonic()

    def stopTest(self, test: unittest.TestCase) -> None:  # noqa: N802 - unittest's name
        self.seconds[test._testMethodName] = round(time.monotonic() - self._began_s, 2)

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802 - unittest's name
        self.passed.append(test._testMethodName)


def main() -> None:
    names = NAMES or unittest.defaultTestLoader.getTestCaseNames(PyTorchsOwn)
    result = _Result()
    for name in names:
        PyTorchsOwn(name).run(result)
    said = {
        "passed": result.passed,
        "skipped": {test._testMethodName: reason for test, reason in result.skipped},
        "failed": {test._testMethodName: text[-1500:] for test, text in [*result.failures, *result.errors]},
        "seconds": result.seconds,
    }
    print(json.dumps(said))


if __name__ == "__main__":
    main()
