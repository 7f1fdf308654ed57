"""A LightningModule under ElastrainStrategy, or under plain Lightning (`--plain`): it prints what its callbacks saw."""

import argparse
import hashlib
import importlib
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.support.evaluated import watch_evaluations

lightning: Any = importlib.import_module("lightning.pytorch")  # of a group that is not always installed


class Samples(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        numbers = torch.arange(8.0) * (index + 1) % 7 - 3
        return numbers, numbers.sum().sin().reshape(1)


class Model(lightning.LightningModule):
    def __init__(self, slow: Path | None, sgd: bool, unfused: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.slow, self.sgd, self.unfused = slow, sgd, unfused
        self.largest = -9.0

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if self.slow is not None and self.slow.exists():
            time.sleep(1.5 if self.global_step > 5 else 0.05)
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("train", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def on_validation_epoch_start(self) -> None:
        self.largest = -9.0

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        found = self.net(batch[0])
        self.log("val", nn.functional.mse_loss(found, batch[1]), sync_dist=True)
        self.largest = max(self.largest, float(found.max()))
        self.log("largest", self.largest)

    def configure_optimizers(self) -> Any:
        weights = list(self.parameters())
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(weights, lr=1e-2, foreach=False if self.unfused else None)
        if self.sgd:
            optimizer = torch.optim.SGD(weights, lr=1e-2, momentum=0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7), "interval": "step"},
        }


class Seen(lightning.callbacks.Callback):
    """Writes, at the end of each step and epoch, what all members should see alike."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def _say(self, *words: Any) -> None:
        with self._path.open("a") as out:
            print(*words, file=out)

    def on_train_batch_end(self, trainer: Any, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            rate = trainer.optimizers[0].param_groups[0]["lr"]
            metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if name == "train_step"}
            self._say("step", trainer.global_step, batch_idx, trainer.current_epoch, f"{rate:.9f}", metrics)

    def on_train_epoch_end(self, trainer: Any, model: Any) -> None:
        metrics = {name: float(value) for name, value in sorted(trainer.callback_metrics.items())}
        self._say("epoch", trainer.current_epoch, trainer.global_step, metrics)

    def on_train_end(self, trainer: Any, model: Any) -> None:
        self._say("end", trainer.global_step, digest(model))


def digest(model: nn.Module) -> str:
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in model.state_dict().values())).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--ema", action="store_true")
    parser.add_argument("--slow-while", type=Path, help="micro-batches are slow while this file is there")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--sgd", action="store_true", help="without the rounding of the fused AdamW")
    parser.add_argument("--unfused", action="store_true", help="the AdamW that plain training has on the CPU")
    parser.add_argument("--clip", type=float)
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--log", action="store_true", help="write metrics.csv and event files")
    parser.add_argument("--kill-evaluating", default="")
    parser.add_argument("--batch", type=int, default=13, help="samples per batch of the validation")
    parser.add_argument("--go-on", type=Path, help="checkpoint to begin from")
    args = parser.parse_args()
    torch.set_num_threads(1)
    lightning.seed_everything(5)
    options: dict[str, Any] = {}
    member = "plain"
    if not args.plain:
        from elastrain.integrations.lightning import ElastrainStrategy

        options["strategy"] = strategy = ElastrainStrategy(backups=2)
        member = strategy.job.member
        lightning.seed_everything(5)
    callbacks: list[Any] = [Seen(args.folder / f"seen-{member}")]
    callbacks.append(
        lightning.callbacks.ModelCheckpoint(args.folder / "kept", monitor="val", save_top_k=2, save_last=True)
    )
    if args.ema:
        callbacks.append(lightning.callbacks.EMAWeightAveraging(decay=0.8))
    loggers = (lightning.loggers.CSVLogger, lightning.loggers.TensorBoardLogger)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=args.epochs,
        accumulate_grad_batches=args.accumulate,
        val_check_interval=6,
        gradient_clip_val=args.clip,
        callbacks=callbacks,
        logger=[kind(args.folder, "logs", "of-a-test") for kind in loggers] if args.log else False,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    model = Model(args.slow_while, args.sgd, args.unfused)
    if not args.plain:
        watch_evaluations(model.net, strategy.job, args.kill_evaluating)
    if args.log:
        model.save_hyperparameters({"slow": False})
    train = DataLoader(Samples(), batch_size=4, shuffle=False, drop_last=True)
    trainer.fit(model, train, DataLoader(Samples(), batch_size=args.batch), ckpt_path=args.go_on)
    sys.stderr.write(f"digest {digest(model)}\n")


if __name__ == "__main__":
    main()
