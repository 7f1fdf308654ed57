"""Train a model on pairs of sentences: after accelerate's complete_nlp_example.py, with `accumulate`."""

import argparse
import os

import torch
from accelerate import Accelerator
from models import Pairs, bert
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--checkpointing_steps", default="epoch", help="a number of batches, or 'epoch'")
parser.add_argument("--resume_from_checkpoint", help="folder of a state")
args = parser.parse_args()

accelerator = Accelerator(
    cpu=True, gradient_accumulation_steps=4, log_with=["tensorboard", "wandb"], project_dir="logs"
)
set_seed(42)
accelerator.init_trackers("nlp", config=vars(args))
model = bert()
train_dataloader = DataLoader(Pairs(256, seed=1), shuffle=True, batch_size=8, drop_last=True)
eval_dataloader = DataLoader(Pairs(96, seed=2), batch_size=8)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
lr_scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=4, num_training_steps=80)
model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
)
overall_step = starting_epoch = resume_step = 0
if args.resume_from_checkpoint:
    accelerator.print(f"Resumed from checkpoint: {args.resume_from_checkpoint}")
    accelerator.load_state(args.resume_from_checkpoint)
    kind, _, number = os.path.basename(args.resume_from_checkpoint).partition("_")
    if kind == "epoch":
        starting_epoch = int(number) + 1
    else:
        starting_epoch, resume_step = divmod(int(number), len(train_dataloader))
    overall_step = starting_epoch * len(train_dataloader) + resume_step

for epoch in range(starting_epoch, args.epochs):
    model.train()
    total_loss = 0
    active_dataloader = train_dataloader
    if resume_step and epoch == starting_epoch:
        active_dataloader = accelerator.skip_first_batches(train_dataloader, resume_step)
    for batch in active_dataloader:
        with accelerator.accumulate(model):
            outputs = model(**batch)
            loss = outputs.loss
            accelerator.backward(loss)
            total_loss += loss.detach().float()
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        overall_step += 1
        if args.checkpointing_steps != "epoch" and overall_step % int(args.checkpointing_steps) == 0:
            accelerator.save_state(f"step_{overall_step}")
        if accelerator.sync_gradients:
            accelerator.log({"loss": total_loss.item()}, step=overall_step)
    model.eval()
    right = seen = 0
    for batch in eval_dataloader:
        with torch.no_grad():
            outputs = model(**batch)
        predictions = outputs.logits.argmax(dim=-1)
        predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
        right += (predictions == references).sum().item()
        seen += len(references)
    accelerator.print(f"epoch {epoch}: accuracy {right / seen:.3f}")
    train_loss = total_loss.item() / len(train_dataloader)
    accelerator.log({"accuracy": right / seen, "train_loss": train_loss, "epoch": epoch}, step=overall_step)
    if args.checkpointing_steps == "epoch":
        accelerator.save_state(f"epoch_{epoch}")
accelerator.end_training()
