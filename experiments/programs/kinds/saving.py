"""Programs that save, copy or compile the model, in the loop and behind it."""

from __future__ import annotations

import copy
import io
import os
import tempfile
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional as F

from experiments.programs.kinds.loops import held_back
from experiments.programs.program import Program


class SavedWhole(Program):
    """The model is saved whole, loaded and used behind the loop."""

    reported = True

    def end(self) -> None:
        file = io.BytesIO()
        torch.save(self.model, file)
        self.told["large"] = file.tell() > 8192
        file.seek(0)
        again = torch.load(file, weights_only=False)
        points, classes = held_back(self)
        self.told["right"] = float(F.cross_entropy(again(points), classes).detach())


class CopiedInTheLoop(Program):
    """A deepcopy of the model in the loop, which is evaluated and trained a little by itself."""

    reported = True
    refused: Mapping[str, str] = {"job": "copy"}

    def after(self, step: Any) -> bool | None:
        if step.number == 4:
            mine = copy.deepcopy(self.model)
            points, classes = held_back(self)
            F.cross_entropy(mine(points), classes).backward()
            torch.optim.SGD(mine.parameters(), lr=0.1).step()
            self.told["copied"] = float(mine[0].weight.detach().norm())
        return None


class CopiedBehindTheLoop(Program):
    """A deepcopy behind the loop is fine-tuned as an ordinary model."""

    reported = True

    def end(self) -> None:
        mine = copy.deepcopy(self.model)
        points, classes = held_back(self)
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(mine(points), classes).backward()
            optimizer.step()
        self.told["tuned"] = float(mine[0].weight.detach().norm())


class TrainedOnBehindTheLoop(Program):
    """The model itself is trained on behind the loop, by a new optimizer."""

    def end(self) -> None:
        points, classes = held_back(self)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(self.model(points), classes).backward()
            optimizer.step()
        self.told["tuned"] = float(self.model[0].weight.detach().norm())


class Scripted(Program):
    """The model is compiled by `torch.jit.script` behind the loop."""

    reported = True

    def end(self) -> None:
        points, classes = held_back(self)
        again = torch.jit.script(self.model)
        self.told["right"] = float(F.cross_entropy(again(points), classes).detach())


class Exported(Program):
    """The model is exported and traced behind the loop."""

    def end(self) -> None:
        points, classes = held_back(self)
        again = torch.export.export(self.model.eval(), (points,)).module()
        self.told["right"] = float(F.cross_entropy(again(points), classes).detach())


class SavedEachStep(Program):
    """The state of the model is saved behind each step, as files of a run are."""

    def after(self, step: Any) -> bool | None:
        with tempfile.TemporaryDirectory() as folder:
            torch.save(self.model.state_dict(), f"{folder}/model.pt")
            self.told["size"] = os.path.getsize(f"{folder}/model.pt") < 8192
            found = torch.load(f"{folder}/model.pt")
        self.told["norm"] = float(found["0.weight"].norm())
        return None
