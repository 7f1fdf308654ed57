"""A script for accelerate, after its example for text, on a small BERT of random words."""

import argparse
import sys
import time

import torch
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup, set_seed

import elastrain
from elastrain.integrations.accelerate import Accelerator
from tests.support.evaluated import watch_evaluations


class Pairs(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        words = torch.randint(2, 60, (10,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": words, "labels": (words[0] > 30).long()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--out", required=True)
    parser.add_argument("--resume")
    parser.add_argument("--linger", type=int, default=0)
    parser.add_argument("--precision", default="no")
    parser.add_argument("--lose-clip", action="store_true")
    parser.add_argument("--still", action="store_true", help="a model without dropout")
    parser.add_argument("--plain", action="store_true", help="the same, under plain SGD")
    parser.add_argument("--kill-evaluating", default="")
    args = parser.parse_args()
    torch.set_num_threads(1)
    log = elastrain.Jsonl(f"{args.out}/log.jsonl")
    norm = None if args.lose_clip else 1.0
    accelerator = Accelerator(
        gradient_accumulation_steps=4, cpu=True, log_with=log, mixed_precision=args.precision, max_grad_norm=norm
    )
    accelerator.init_trackers("small", {})
    set_seed(5)
    config = BertConfig(vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    if args.plain or args.still:
        config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    model = BertForSequenceClassification(config)
    watch_evaluations(model, accelerator.job, args.kill_evaluating)
    optimizer = (torch.optim.SGD if args.plain else torch.optim.AdamW)(model.parameters(), lr=3e-3)
    train = torch.utils.data.DataLoader(Pairs(96), batch_size=4, shuffle=True)
    evaluation = torch.utils.data.DataLoader(Pairs(30), batch_size=2)
    scheduler = get_linear_schedule_with_warmup(optimizer, 2, args.epochs * len(train) // 4)
    model, optimizer, train, evaluation, scheduler = accelerator.prepare(model, optimizer, train, evaluation, scheduler)
    starting, resume_step, overall = 0, None, 0
    if args.resume:
        accelerator.load_state(args.resume)
        overall = int(args.resume.rpartition("_")[2])
        starting, resume_step = divmod(overall, len(train))
    for epoch in range(starting, args.epochs):
        model.train()
        total = torch.zeros(())
        active = train
        if resume_step is not None and epoch == starting:
            active = accelerator.skip_first_batches(train, resume_step)
        for _index, batch in enumerate(active):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                total += loss.detach()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            overall += 1
            if accelerator.sync_gradients and overall % 24 == 0:
                accelerator.save_state(f"{args.out}/step_{overall}")
            if accelerator.sync_gradients and overall >= 32 and accelerator.job.world_size < args.linger:
                time.sleep(8)
        model.eval()
        right = seen = 0
        for batch in evaluation:
            with torch.no_grad():
                told = model(**batch).logits.argmax(-1)
            told, labels = accelerator.gather_for_metrics((told, batch["labels"]))
            right, seen = right + int((told == labels).sum()), seen + len(labels)
        accelerator.log({"accuracy": right / seen, "seen": seen, "loss": round(float(total), 3), "overall": overall})
    accelerator.end_training()
    rate = scheduler.get_last_lr()[0]
    sys.stderr.write(f"ended overall {overall} rate {rate} {accelerator.job.digest()}\n")


if __name__ == "__main__":
    main()
