"""A `transformers.Trainer` on a small GPT-2: labels with holes, evaluation, checkpoints, a callback with a state."""

import argparse
import hashlib
import sys
import time
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from elastrain.integrations.transformers import Trainer
from tests.support.evaluated import watch_evaluations


class Text(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random words, of which the first ones are not to be predicted."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        words = torch.randint(0, 60, (12,), generator=torch.Generator().manual_seed(index))
        labels = words.clone()
        labels[: index % 7] = -100
        return {"input_ids": words, "labels": labels}


def metrics(found: Any) -> dict[str, float]:
    """Return an accuracy, and numbers that depend on the order of the samples and on each bit."""
    logits, labels = found.predictions, found.label_ids
    raw = int.from_bytes(hashlib.sha256(logits.tobytes() + labels.tobytes()).digest()[:6], "little")
    return {
        "accuracy": float((logits.argmax(-1)[:, :-1] == labels[:, 1:]).mean()),
        "bits": float(raw),
        "n": len(labels),
    }


def counted_loss(self: Any, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
    """Compute the loss, and count in the trainer, as scripts do."""
    if not model.training:
        self.counted = getattr(self, "counted", 0) + 1
        self.log({"eval_calls": self.counted})
    outputs = model(**inputs)
    return (outputs.loss, outputs) if return_outputs else outputs.loss


class Linger(TrainerCallback):
    """Waits for newcomers behind step 8."""

    def __init__(self, members: int) -> None:
        self.members = members
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= 8 and self.trainer.job.world_size < self.members:
            time.sleep(8)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", required=True)
    parser.add_argument("--resume")
    parser.add_argument("--more", action="append", default=[], help="name=value, more arguments")
    parser.add_argument("--report-to", default="none")
    parser.add_argument("--plain", action="store_true", help="train with the library's own Trainer")
    parser.add_argument("--linger", type=int, default=0)
    parser.add_argument("--kill-evaluating", default="")
    args = parser.parse_args()
    torch.set_num_threads(1)
    set_seed(3)
    config = GPT2Config(vocab_size=60, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    if "sequential" in str(args.more):  # what the library's own Trainer can do alike
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    more = dict(each.split("=") for each in args.more)
    training = TrainingArguments(
        output_dir=args.out,
        max_steps=args.steps,
        per_device_eval_batch_size=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=8,
        learning_rate=1e-2,
        warmup_steps=2,
        eval_strategy="steps",
        eval_steps=4,
        save_strategy="steps",
        save_steps=4,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=False,
        logging_steps=1,
        report_to=args.report_to,
        use_cpu=True,
        seed=3,
        label_smoothing_factor=float(more.get("smooth", 0)),
        bf16="bf16" in more,
        train_sampling_strategy=more.get("order", "random"),
    )
    linger = Linger(args.linger)
    kind: Any = transformers.Trainer if args.plain else Trainer
    if "own" in more:
        kind = type("OwnTrainer", (kind,), {"compute_loss": counted_loss})
    trainer = kind(
        model=GPT2LMHeadModel(config),
        args=training,
        train_dataset=Text(104),
        eval_dataset=Text(20),
        compute_metrics=metrics if {"metrics", "own"} & more.keys() else None,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=8), linger],
    )
    linger.trainer = trainer
    if not args.plain:
        watch_evaluations(trainer.model, trainer.job, args.kill_evaluating)
    trainer.train(resume_from_checkpoint=args.resume)
    sys.stderr.write(f"best {trainer.state.best_metric} {trainer.evaluate()['eval_loss']}\n")
    for line in trainer.state.log_history:
        kept = {n: v for n, v in line.items() if not n.endswith(("_runtime", "_per_second"))}
        sys.stderr.write(f"line {sorted(kept.items())}\n")


if __name__ == "__main__":
    main()
