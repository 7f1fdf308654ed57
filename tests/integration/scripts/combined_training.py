"""Small trainings of real kinds of models, each with one thing that scripts combine with elastrain."""

from __future__ import annotations

import argparse
import contextlib
import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import elastrain

WORDS, LENGTH, WIDTH = 61, 12, 32


class Texts(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(WORDS, (LENGTH,), generator=torch.Generator().manual_seed(index))


class Images(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        drawn = torch.Generator().manual_seed(index)
        return torch.randn(3, 8, 8, generator=drawn), torch.tensor(index % 4)


def gpt(*, tied: bool = False, layers: int = 3) -> nn.Module:
    """Return a small GPT from a configuration of transformers."""
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.GPT2Config(
        vocab_size=WORDS,
        n_positions=LENGTH,
        n_embd=WIDTH,
        n_layer=layers,
        n_head=2,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    return transformers.GPT2LMHeadModel(config).train()


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2)),
        nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 4)),
    )


def text_loss(model: nn.Module, texts: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=texts, labels=texts).loss
    return loss


def image_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def built(kind: str, feature: str) -> nn.Module:
    """Return the model, changed as the feature wants it before `prepare`."""
    model: Any = convnet() if kind == "convnet" else gpt(tied=feature == "tied")
    if feature in ("checkpoint", "reentrant"):
        model.gradient_checkpointing_enable({"use_reentrant": feature == "reentrant"})
    if feature == "fp16":
        model.half()
    if feature == "lora":
        from experiments.strangers.lora import with_lora

        model = with_lora(model, ["c_attn"])
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=["gpt", "convnet"], default="gpt")
    parser.add_argument("--feature", default="plain")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    job = elastrain.init(seed=5, loss_scale="dynamic" if args.feature == "fp16" else None)
    model: Any = built(args.kind, args.feature)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3)
    data: Any = Images() if args.kind == "convnet" else Texts()
    loss_of: Callable[..., Tensor] = image_loss if args.kind == "convnet" else text_loss
    loader = elastrain.DataLoader(data, global_batch_size=16, micro_batch_size=2)
    called: Any = model
    if args.feature == "compile before":
        called = model = torch.compile(model, backend=args.backend)
    if args.feature == "model.compile()":
        model.compile(backend=args.backend)
    if args.feature == "block.compile()":
        for block in model.transformer.h:
            block.compile(backend=args.backend)
    model, optimizer, loader = job.prepare(model, optimizer, loader, max_grad_norm=1.0)
    if args.feature == "compile after":
        called = torch.compile(model, backend=args.backend)
    average = copy.deepcopy(model) if args.feature == "ema" else None
    if average is not None:
        job.register("average", average)
    mixed = torch.autocast("cpu", torch.bfloat16) if args.feature == "autocast" else contextlib.nullcontext()
    for step in job.steps(loader, until=args.steps):
        for batch in step:
            with mixed:
                loss = loss_of(called, batch)
            step.backward(loss)
        if average is not None:
            with torch.no_grad():
                for mean, value in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(value, 0.1)
    told = "" if average is None else f" average {sum(float(each.double().sum()) for each in average.parameters())!r}"
    sys.stderr.write(f"digest {job.digest()}{told}\n")


if __name__ == "__main__":
    main()
