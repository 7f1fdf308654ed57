"""Train a small GPT on one process or several: after nanoGPT's train.py. Settings are given as --name=value."""

import math
import os
import sys
import time

import numpy as np
import torch
import wandb
from models import GPT
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel

out_dir, init_from = "out", "scratch"  # or "resume"
eval_interval, eval_iters, log_interval, always_save_checkpoint = 8, 8, 1, True
wandb_project, wandb_run_name = "owt", "gpt2"
gradient_accumulation_steps, batch_size, block_size = 8, 4, 32
n_layer, n_head, n_embd, dropout = 2, 2, 32, 0.1
learning_rate, max_iters, weight_decay, beta1, beta2, grad_clip = 3e-3, 48, 1e-1, 0.9, 0.95, 1.0
warmup_iters, lr_decay_iters, min_lr = 5, 60, 3e-4
for argument in sys.argv[1:]:
    name, _, value = argument.removeprefix("--").partition("=")
    globals()[name] = type(globals()[name])(value)

if ddp := int(os.environ.get("RANK", "-1")) != -1:
    init_process_group("gloo")
    master_process = int(os.environ["RANK"]) == 0
    seed_offset, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    assert gradient_accumulation_steps % world_size == 0
    gradient_accumulation_steps //= world_size
else:
    master_process, seed_offset = True, 0
os.makedirs(out_dir, exist_ok=True)
torch.manual_seed(1337 + seed_offset)


def get_batch(split):
    data = np.memmap(f"{split}.bin", dtype=np.uint16, mode="r")
    at = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(data[i : i + block_size].astype(np.int64)) for i in at])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in at])
    return x, y


model_args = {"n_layer": n_layer, "n_head": n_head, "n_embd": n_embd, "block_size": block_size, "dropout": dropout}
iter_num, best_val_loss = 0, torch.tensor(1e9)
model = GPT(vocab_size=256, **model_args)
decayed = [p for p in model.parameters() if p.dim() >= 2]
others = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(beta1, beta2))
if init_from == "resume":
    checkpoint = torch.load(os.path.join(out_dir, "ckpt.pt"))
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    iter_num, best_val_loss = checkpoint["iter_num"], checkpoint["best_val_loss"]
raw_model = model
if ddp:
    model = DistributedDataParallel(model)


@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    for split in ["train", "val"]:
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            _, losses[k] = model(*get_batch(split))
        out[split] = losses.mean()
    model.train()
    return out


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = min(1.0, (it - warmup_iters) / (lr_decay_iters - warmup_iters))
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


if master_process:
    wandb.init(project=wandb_project, name=wandb_run_name)
t0, first_iter = time.time(), iter_num
while iter_num < max_iters:
    lr = get_lr(iter_num)
    for group in optimizer.param_groups:
        group["lr"] = lr
    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        _, loss = model(*get_batch("train"))
        (loss / gradient_accumulation_steps).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1
    figures = {"iter": iter_num, "lr": lr, "loss": loss.item()}
    if iter_num % eval_interval == 0:
        losses = estimate_loss()
        figures |= {"train/loss": losses["train"], "val/loss": losses["val"]}
        if losses["val"] < best_val_loss or always_save_checkpoint:
            best_val_loss = losses["val"]
            if master_process:
                checkpoint = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict()}
                checkpoint |= {"model_args": model_args, "iter_num": iter_num, "best_val_loss": best_val_loss}
                torch.save(checkpoint, os.path.join(out_dir, "ckpt.pt"))
    if iter_num % log_interval == 0 and master_process:
        average_s = (time.time() - t0) / (iter_num - first_iter)
        print(f"iter {iter_num}: loss {figures['loss']:.4f}, {average_s * 1000:.2f} ms")
        wandb.log(figures)
if ddp:
    destroy_process_group()
