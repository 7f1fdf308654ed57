"""What the strategy for Lightning refuses, and how it folds what `training_step` logs."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

lightning: Any = pytest.importorskip("lightning.pytorch", reason="the group integrations is not installed")

from torch.utils.data import DataLoader, IterableDataset, TensorDataset  # noqa: E402 - lightning is there now

from elastrain.errors import ConfigError  # noqa: E402 - lightning is there now
from elastrain.integrations.lightning_figures import CsvFile, StepLines, captured, log_sums  # noqa: E402 - lightning is there now
from elastrain.integrations.lightning_limits import check_loader, check_trainer, one_optimizer  # noqa: E402 - lightning is there now
from elastrain.job.log_book import Line  # noqa: E402 - lightning is there now

QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_checkpointing": False}


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)


class Manual(Model):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Backward(Model):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


def test_what_works_is_taken() -> None:
    check_trainer(lightning.Trainer(max_epochs=2, gradient_clip_val=1.0, accumulate_grad_batches=2, **QUIET), Model())
    check_trainer(lightning.Trainer(max_epochs=2, precision="bf16-mixed", **QUIET), Model())
    check_loader(DataLoader(TensorDataset(torch.zeros(4, 2)), batch_size=2))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, "gradient_clip_algorithm='value'"),
        ({"sync_batchnorm": True}, "sync_batchnorm=True"),
        ({"limit_train_batches": 3}, "limit_train_batches"),
        ({"fast_dev_run": True}, "fast_dev_run"),
        ({"reload_dataloaders_every_n_epochs": 1}, "a job has one loader"),
        ({"max_time": {"hours": 1}}, "Timer"),
        ({"callbacks": [lightning.callbacks.Timer({"hours": 1})]}, "Timer"),
        ({"callbacks": [lightning.callbacks.StochasticWeightAveraging(1e-2)]}, "use WeightAveraging"),
    ],
)
def test_what_cannot_work_is_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as found:
        check_trainer(lightning.Trainer(**QUIET, **options), Model())
    assert "\n" not in str(found.value) and ":" in str(found.value)


@pytest.mark.parametrize(("model", "words"), [(Manual, "manual optimization"), (Backward, "Backward.backward")])
def test_modules_that_optimize_by_themselves_are_refused(model: type[Model], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_trainer(lightning.Trainer(**QUIET), model())


class Two(Model):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([each], 0.1) for each in self.parameters()]


def test_several_optimizers_are_refused() -> None:
    model, trainer = Two(), lightning.Trainer(**QUIET)
    model.trainer = trainer
    trainer.strategy.connect(model)
    with pytest.raises(ConfigError, match="configure_optimizers returned several: put all"), one_optimizer():
        trainer.strategy.setup_optimizers(trainer)
    with pytest.raises(RuntimeError, match="another"), one_optimizer():
        raise RuntimeError("another")


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        ([1, 2], "got list"),
        (DataLoader(Stream()), "IterableDataset"),
        (DataLoader(TensorDataset(torch.zeros(4, 2)), batch_size=None), "batch_size"),
    ],
)
def test_loaders_that_cannot_be_shared_out_are_refused(loader: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_loader(loader)


class FakeStep:
    """Folds figures as a step does, over micro-batches of several members."""

    samples = 6

    def __init__(self) -> None:
        self.sums: dict[str, float] = defaultdict(float)

    def add(self, name: str, value: Any) -> None:
        self.sums[name] += float(value)


class Logged:
    _current_fx_name = "optimizer_step"

    def __init__(self) -> None:
        self.lines: list[tuple[str, float, dict[str, Any]]] = []

    def log(self, name: str, value: Tensor, **options: Any) -> None:
        assert self._current_fx_name == "training_step"
        self.lines.append((name, float(value), options))


def test_means_and_sums_of_all_micro_batches_are_logged_once_with_their_options() -> None:
    step: Any = FakeStep()
    for loss in (1.0, 2.0, 6.0):
        model: Any = Logged()  # members that know nothing of one another
        with captured(model, step):
            model.log("loss", torch.tensor(loss), prog_bar=True, on_epoch=False, sync_dist=True)
            model.log("right", 2, reduce_fx="sum")
        assert not model.lines
    model = Logged()
    log_sums(model, step)
    assert sorted(model.lines, key=lambda line: line[0]) == [
        ("loss", 3.0, {"batch_size": 6, "reduce_fx": "mean", "prog_bar": True, "on_epoch": False}),
        ("right", 6.0, {"batch_size": 6, "reduce_fx": "sum"}),
    ]
    assert model._current_fx_name == "optimizer_step"


@pytest.mark.parametrize(("value", "options"), [(1.0, {"reduce_fx": "max"}), (nn.Identity(), {})])
def test_what_cannot_be_folded_is_refused(value: Any, options: dict[str, Any]) -> None:
    model: Any = Logged()
    with captured(model, FakeStep()), pytest.raises(ConfigError, match=r"self.log\('loss', …\) in training_step takes"):  # type: ignore[arg-type] # a fake
        model.log("loss", value, **options)


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_a_csv_file_loses_the_lines_of_another_run_and_those_that_are_not_sure(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("loss,step\n0.5,0\n0.4,1\n0.3,2\n")
    file = CsvFile(str(tmp_path))
    assert file.begin("run") == -1, "these lines are of another run"
    file.cut(1)
    file.write([Line(2, {"loss": 0.25})])
    file.write([Line(3, {"loss": 0.2, "val": 0.1})])
    with path.open("a") as text:
        text.write("0.1")  # a line that was being written
    heir = CsvFile(str(tmp_path))
    assert heir.begin("run") == 3
    heir.cut(2)
    heir.write([Line(3, {"loss": 0.2, "val": 0.1}), Line(4, {"loss": 0.1})])
    found = [(row["step"], row["loss"], row["val"]) for row in rows(path)]
    assert found == [("0", "0.5", ""), ("1", "0.4", ""), ("2", "0.25", ""), ("3", "0.2", "0.1"), ("4", "0.1", "")]


class JobStub:
    def __init__(self) -> None:
        self.given: list[Any] = []
        self.behind, self.lines = -1, list[dict[str, Any]]()

    def loggers(self, *loggers: Any, behind: int) -> None:
        self.given, self.behind = list(loggers), behind

    def log(self, values: dict[str, Any]) -> None:
        self.lines.append(values)


def test_what_a_step_logs_is_one_line_of_the_job(tmp_path: Path) -> None:
    ours = [kind(tmp_path, "logs", "v") for kind in (lightning.loggers.CSVLogger, lightning.loggers.TensorBoardLogger)]
    job = JobStub()
    lines = StepLines(job, ours)  # type: ignore[arg-type]
    lines.begin(7)
    assert [type(each).__name__ for each in job.given] == ["CsvFile", "TensorBoard"] and job.behind == 7
    lines.flush()
    for metrics in ({"lr": 0.1}, {"loss": 2.0, "epoch": 0}, {"val": 1.0, "epoch": 0}):
        for logger in ours:
            logger.log_metrics(metrics, 0)
            logger.save()
    lines.flush()
    lines.flush()
    assert job.lines == [{"lr": 0.1, "loss": 2.0, "epoch": 0, "val": 1.0}]
    assert not (tmp_path / "logs" / "v" / "metrics.csv").exists()


def test_a_wandb_logger_is_one_run_with_the_hyperparameters(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    job, logger = JobStub(), lightning.loggers.WandbLogger("name", tmp_path, offline=True, project="p")
    lines = StepLines(job, [logger])  # type: ignore[arg-type]
    logger.log_hyperparams({"lr": 0.1})
    lines.begin(0)
    assert [str(each) for each in job.given] == ["wandb project p"]
    assert job.given[0]._options == {"config": {"lr": 0.1}, "name": "name"} and job.given[0]._mode == "offline"


@pytest.mark.parametrize(
    ("options", "words"), [({"prefix": "a"}, "leave it out"), ({"project": "p", "id": "x"}, "chooses id itself")]
)
def test_names_of_a_logger_that_a_job_cannot_keep_are_refused(options: dict[str, Any], words: str) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    lines = StepLines(JobStub(), [lightning.loggers.WandbLogger(**options)])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=words):
        lines.begin(0)
