"""Train an image classifier with Lightning: after its image classification examples."""

import argparse

import lightning
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from models import ConvNet, Pictures
from torch.nn import functional as F
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--ckpt_path", help="checkpoint to go on from")


class Classifier(lightning.LightningModule):
    def __init__(self, lr=0.01):
        super().__init__()
        self.save_hyperparameters()
        self.model = ConvNet()

    def training_step(self, batch, batch_idx):
        images, target = batch
        output = self.model(images)
        loss = F.cross_entropy(output, target)
        self.log("train_loss", loss)
        self.log("train_acc", (output.argmax(1) == target).float().mean(), on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        images, target = batch
        output = self.model(images)
        self.log("val_loss", F.cross_entropy(output, target))
        self.log("val_acc", (output.argmax(1) == target).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


def main():
    args = parser.parse_args()
    lightning.seed_everything(7)
    train_loader = DataLoader(Pictures(256, seed=1), 8, shuffle=True)
    val_loader = DataLoader(Pictures(96, seed=2), 8)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=args.epochs,
        accumulate_grad_batches=4,
        log_every_n_steps=1,
        logger=[TensorBoardLogger("logs", version="tb"), CSVLogger("logs", version="csv")],
        callbacks=[ModelCheckpoint("kept", monitor="val_acc", mode="max", save_last=True), LearningRateMonitor()],
        enable_progress_bar=False,
    )
    trainer.fit(Classifier(), train_loader, val_loader, ckpt_path=args.ckpt_path)


if __name__ == "__main__":
    main()
