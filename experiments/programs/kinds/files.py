"""Programs whose loop hands a weight's memory to files, pipes and libraries, or reads into it."""

from __future__ import annotations

import io
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from experiments.programs.kinds.memory import _Deep


class _FilesInBetween(_Deep):
    """A weight that goes through a file behind each step; the job refuses none of that, since it only reads."""

    @property
    def weight(self) -> Tensor:
        return self.model[2].up.weight.detach()

    def written(self, path: Path) -> None:
        raise NotImplementedError

    def after(self, step: Any) -> bool | None:
        with tempfile.TemporaryDirectory() as folder:
            self.written(Path(folder) / "weight")
            found = (Path(folder) / "weight").read_bytes()
        again = torch.frombuffer(bytearray(found), dtype=torch.float32)
        self.told["whole"] = self.told.get("whole", True) and torch.equal(again, self.weight.flatten())
        return None


class WritesByNumpy(_FilesInBetween):
    """`tofile` of NumPy."""

    reported = True

    def written(self, path: Path) -> None:
        self.weight.numpy().tofile(path)


class WritesUnbuffered(_FilesInBetween):
    """A write without a buffer, of a weight's own memory."""

    reported = True

    def written(self, path: Path) -> None:
        with path.open("wb", buffering=0) as file:
            file.write(memoryview(self.weight.numpy().reshape(-1)).cast("B"))


class WritesToAPipe(_FilesInBetween):
    """A pipe that takes a weight's own memory."""

    reported = True

    def written(self, path: Path) -> None:
        reader, writer = socket.socketpair()
        with reader, writer, path.open("wb") as file:
            words = memoryview(self.weight.numpy().reshape(-1)).cast("B")
            for start in range(0, len(words), 4096):
                writer.sendall(words[start : start + 4096])
                left = len(words[start : start + 4096])
                while left:
                    left -= file.write(reader.recv(left))


class WritesSafetensors(_FilesInBetween):
    """The library safetensors, which reads memory by itself."""

    def written(self, path: Path) -> None:
        whole = path.with_name("whole")
        safetensors.torch.save_file(self.model.state_dict(), whole)
        path.write_bytes(safetensors.torch.load_file(whole)["2.up.weight"].numpy().tobytes())


class ReadsIntoAWeight(_Deep):
    """A file that is read into a weight's own memory in the loop: refused in a job."""

    reported = True
    refused: Mapping[str, str] = {"job": "outside of the optimizer"}

    def after(self, step: Any) -> bool | None:
        weight = self.model[2].up.weight.detach()
        drawn = torch.randn(weight.shape, generator=torch.Generator().manual_seed(step.number)) * 0.1
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "weight").write_bytes(drawn.numpy().tobytes())
            with open(f"{folder}/weight", "rb", buffering=0) as file:
                file.readinto(memoryview(weight.numpy().reshape(-1)).cast("B"))
        return None


class ReadsTheOptimizer(_Deep):
    """The optimizer's state is saved and looked at behind each step: refused in a job."""

    refused: Mapping[str, str] = {"job": "state_dict"}

    def after(self, step: Any) -> bool | None:
        file = io.BytesIO()
        torch.save(self.optimizer.state_dict(), file)
        self.told["steps seen"] = float(self.optimizer.state_dict()["state"][0]["step"])
        return None


class SavedBias(_Deep):
    """One small parameter is saved by itself behind each step, and its file is small."""

    reported = True

    def after(self, step: Any) -> bool | None:
        file = io.BytesIO()
        torch.save(self.model[2].norm.bias, file)
        self.told["small"] = file.tell() < 4096
        return None


class SavedWeightBehindTheLoop(_Deep):
    """As `saved_bias`, behind the loop."""

    reported = True

    def end(self) -> None:
        file = io.BytesIO()
        torch.save(self.model[2].norm.state_dict(), file)
        self.told["small"] = file.tell() < 4096
