"""The handle that torch gets of a call: several works of this package as one of torch's."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from elastrain.comm.groups.group import Group
from elastrain.comm.groups.work import Work


class TorchWork(dist.Work):
    """`group`: whose rank an awaited message came from."""

    def __init__(self, works: Sequence[Work], tensors: Sequence[Tensor], group: Group) -> None:
        super().__init__()
        self.works, self._tensors, self._group = list(works), list(tensors), group
        self._future: torch.futures.Future[list[Tensor]] | None = None

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Raises MemberLost, Aborted, Timeout. The deadline is that of the call: `timeout` cannot prolong it."""
        for work in self.works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        return all(work.done for work in self.works)

    def is_success(self) -> bool:
        return self.exception() is None and self.is_completed()

    def exception(self) -> BaseException | None:
        return next((work.error for work in self.works if work.error is not None), None)

    def result(self) -> list[Tensor]:
        return self._tensors

    def synchronize(self) -> None:
        self.wait()

    def _source_rank(self) -> int:
        (work,) = self.works
        return self._group.members.index(work.source)

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        if self._future is None:
            far = sorted({t.device.index for t in self._tensors if t.is_cuda})
            devices = [torch.device("cuda", index) for index in far]
            ended: torch.futures.Future[None] = torch.futures.Future(devices=devices or None)  # type: ignore[arg-type]
            # An error has to be raised inside `then`: set_exception on a future that DDP holds ends the run silently.
            self._future = ended.then(self._outcome)
            _after(self.works, lambda: ended.set_result(None))
        return self._future

    def _outcome(self, _ended: torch.futures.Future[None]) -> list[Tensor]:
        self.wait()
        return self._tensors


def _after(works: list[Work], callback: Any) -> None:
    if works:
        works[0].then(lambda: _after(works[1:], callback))
    else:
        callback()
