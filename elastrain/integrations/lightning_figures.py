"""Values that a module logs: folded over the whole batch, and written as lines of the job by Lightning's own names.

So all members log the same numbers, and another member goes on with the files if the one that writes is lost.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import elastrain
from elastrain.errors import ConfigError
from elastrain.job.log_book import Line
from elastrain.runtime.job import Job
from elastrain.runtime.loop.step import Step

_SUM, _COUNT = "log", "logs"
_FLAGS = ("prog_bar", "logger", "on_step", "on_epoch")


@contextmanager
def captured(module: Any, step: Step) -> Iterator[None]:
    """Add what the module logs inside to the figures of the step. The names carry the options of `self.log`.

    Not every member computes a micro-batch in each step, so that it may not know these options otherwise.
    """

    def log(name: str, value: Any, **options: Any) -> None:
        reduction = options.get("reduce_fx", "mean")
        reduction = getattr(reduction, "__name__", reduction)
        if reduction not in ("mean", "sum") or not isinstance(value, int | float | Tensor):
            raise ConfigError(
                f"self.log({name!r}, …) in training_step takes a number or a tensor of one element, with reduce_fx "
                f"'mean' or 'sum', under ElastrainStrategy; got {type(value).__name__} with {reduction!r}"
            )
        flags = "".join({None: "-", True: "1", False: "0"}[options.get(flag)] for flag in _FLAGS)
        step.add(f"{_SUM}:{reduction}:{flags}:{name}", value.detach() if isinstance(value, Tensor) else value)
        step.add(f"{_COUNT}:{name}", 1)

    module.__dict__["log"] = log
    try:
        yield
    finally:
        del module.__dict__["log"]


def log_sums(module: Any, step: Step) -> None:
    """Log the means and sums over the whole batch once the step is committed, as if `training_step` did it."""
    sums = step.sums
    name_before = module._current_fx_name
    module._current_fx_name = "training_step"
    try:
        for key in sorted(sums):
            kind, _, rest = key.partition(":")
            if kind != _SUM:
                continue
            reduction, flags, name = rest.split(":", 2)
            value = sums[key] / (sums[f"{_COUNT}:{name}"] if reduction == "mean" else 1)
            options = {flag: told == "1" for flag, told in zip(_FLAGS, flags, strict=True) if told != "-"}
            module.log(name, torch.tensor(value), batch_size=step.samples, reduce_fx=reduction, **options)
    finally:
        module._current_fx_name = name_before


class StepLines:
    """Loggers of Lightning whose files are written by `job.log`: one line for each committed step.

    These are TensorBoardLogger, CSVLogger and WandbLogger. All others write by themselves, on the member of rank 0.
    """

    def __init__(self, job: Job, loggers: Sequence[Any]) -> None:
        from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger

        self._job, self._config = job, dict[str, Any]()
        self._loggers = [each for each in loggers if isinstance(each, TensorBoardLogger | CSVLogger | WandbLogger)]
        self._values: dict[str, Any] = {}
        for logger in self._loggers:
            logger.log_metrics = self._collect
            if not isinstance(logger, TensorBoardLogger):
                logger.save = lambda: None  # it would begin the file anew, or another run
            if isinstance(logger, WandbLogger):
                logger.log_hyperparams = lambda given: self._config.update(
                    vars(given) if hasattr(given, "__dict__") else given
                )

    def begin(self, behind: int) -> None:
        """Give the job its loggers, behind the steps of the checkpoint that the script begins from."""
        if self._loggers:
            self._job.loggers(*map(self._of_job, self._loggers), behind=behind)

    def flush(self) -> None:
        """Log what was collected since the last step began. Call it between two steps."""
        if self._values:
            self._job.log(self._values)
            self._values = {}

    def _collect(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        self._values.update(metrics)

    def _of_job(self, logger: Any) -> Any:
        kind = type(logger).__name__
        if logger._prefix:
            raise ConfigError(
                f"{kind}(prefix={logger._prefix!r}) has no meaning in a job, whose lines have one name: leave it out"
            )
        if hasattr(logger, "_wandb_init"):
            given = {
                name: value for name, value in logger._wandb_init.items() if value is not None and name != "resume"
            }
            mode = "offline" if logger._offline else given.pop("mode", None)
            project, folder = given.pop("project"), given.pop("dir", ".")
            return elastrain.Wandb(project, mode=mode, dir=folder, **{"config": self._config, **given})
        return CsvFile(logger.log_dir) if "CSV" in kind else elastrain.TensorBoard(logger.log_dir)


class CsvFile:
    """The file `metrics.csv` of a CSVLogger, as a logger of the job. A file beside it has the run's id."""

    def __init__(self, folder: str) -> None:
        self._path, self._marker = Path(folder) / "metrics.csv", Path(folder) / ".run"
        self._run, self._names = "", list[str]()

    def __str__(self) -> str:
        return str(self._path)

    def begin(self, run: str) -> int:
        """Return the step of the last line of this run."""
        self._run = run
        self._path.parent.mkdir(parents=True, exist_ok=True)
        is_ours = self._marker.exists() and self._marker.read_text() == run
        return max((int(row["step"]) for row in self._rows()), default=-1) if is_ours else -1

    def cut(self, step: int) -> None:
        """Remove all lines of later steps."""
        self._write_anew([row for row in self._rows() if int(row["step"]) <= step])
        self._marker.write_text(self._run)

    def write(self, lines: Sequence[Line]) -> None:
        """Append lines. A new name becomes a column of all lines."""
        rows = [{**line.values, "step": line.step} for line in lines]
        if set().union(*rows) - set(self._names):
            self._write_anew([*self._rows(), *rows])
            return
        with self._path.open("a", newline="") as file:
            csv.DictWriter(file, self._names).writerows(rows)

    def _rows(self) -> list[dict[str, Any]]:
        text = self._path.read_text() if self._path.exists() else ""
        return list(csv.DictReader(text[: text.rfind("\n") + 1].splitlines()))

    def _write_anew(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._names = sorted(set().union({"step"}, *rows))
        beside = self._path.with_name(".metrics.csv")
        with beside.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._names)
            writer.writeheader()
            writer.writerows(rows)
        beside.replace(self._path)
