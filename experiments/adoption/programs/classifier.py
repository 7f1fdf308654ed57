"""Train an image classifier: after PyTorch's imagenet example."""

import argparse
import os
from collections import Counter

import torch
from models import ConvNet, Pictures
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader
from torch.utils.tensorboard import SummaryWriter

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--resume", default="", help="path of a checkpoint")


def sums_of(batch, model, criterion):
    images, target = batch
    output = model(images)
    correct = (output.argmax(1) == target).sum().item()
    return {"loss": criterion(output, target).item() * len(target), "correct": correct, "seen": len(target)}


def validate(loader, model, criterion):
    sums = Counter()
    model.eval()
    with torch.no_grad():
        for batch in loader:
            sums.update(sums_of(batch, model, criterion))
    model.train()
    return {"val_loss": sums["loss"] / sums["seen"], "val_acc1": sums["correct"] / sums["seen"]}


def main():
    args = parser.parse_args()
    torch.manual_seed(0)
    model = ConvNet()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, 8, 0.9)
    train_loader = DataLoader(Pictures(512, seed=1), args.batch_size, shuffle=True)
    val_loader = DataLoader(Pictures(160, seed=2), 16)
    start_epoch = 0
    if args.resume:
        checkpoint = torch.load(args.resume)
        start_epoch = checkpoint["epoch"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
    writer = SummaryWriter("runs")
    for epoch in range(start_epoch, args.epochs):
        for i, (images, target) in enumerate(train_loader, epoch * len(train_loader)):
            output = model(images)
            loss = criterion(output, target)
            correct = (output.argmax(1) == target).sum().item()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            figures = {"loss": loss.item(), "acc1": correct / args.batch_size}
            if (i + 1) % len(train_loader) == 0:
                figures |= validate(val_loader, model, criterion)
                state = {"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}
                state |= {"epoch": epoch + 1, "scheduler": scheduler.state_dict()}
                torch.save(state, "checkpoint.tmp")
                os.replace("checkpoint.tmp", "checkpoint.pt")
            for name, value in figures.items():
                writer.add_scalar(name, value, i)
    writer.close()


if __name__ == "__main__":
    main()
