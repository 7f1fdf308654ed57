"""Train a classifier of sentences with transformers' Trainer: after run_glue.py."""

import argparse

from models import Pairs, bert
from transformers import Trainer, TrainingArguments, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--resume_from_checkpoint", help="folder of a checkpoint")


def compute_metrics(found):
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}


def main():
    args = parser.parse_args()
    set_seed(42)
    training_args = TrainingArguments(
        output_dir="out",
        num_train_epochs=args.epochs,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        gradient_accumulation_steps=4,
        learning_rate=2e-3,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=4,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        logging_steps=1,
        report_to=["tensorboard", "wandb"],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(
        model=bert(),
        args=training_args,
        train_dataset=Pairs(256, seed=1),
        eval_dataset=Pairs(96, seed=2),
        compute_metrics=compute_metrics,
    )
    result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model("best")
    trainer.save_metrics("train", result.metrics)
    trainer.save_state()


if __name__ == "__main__":
    main()
