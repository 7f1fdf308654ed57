"""Models of five kinds, most of whose memory is parameters: what members hold is compared with what is stated."""

import argparse
import itertools
import sys

import torch
from torch import Tensor, nn

import elastrain


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 8, batch_first=True)
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, inputs: Tensor) -> Tensor:
        seen = self.before(inputs)
        inputs = inputs + self.attention(seen, seen, seen, need_weights=False)[0]
        return inputs + self.wide(self.between(inputs))


class Text(nn.Module):
    """A small GPT. `tied`: its embedding and its last layer are one tensor. `frozen`: half of its blocks stay."""

    def __init__(self, *, tied: bool, frozen: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4096, 512)
        self.blocks = nn.Sequential(*(Block(512) for _ in range(4)))
        self.last = nn.Linear(512, 4096, bias=False)
        if tied:
            self.last.weight = self.embedding.weight
        if frozen:
            self.blocks[:2].requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(self.blocks(self.embedding(tokens)))


def images() -> nn.Module:
    widths = [3, 256, 512, 512, 512]
    layers = [
        nn.Sequential(nn.Conv2d(a, b, 3, padding=1, stride=2), nn.BatchNorm2d(b), nn.ReLU())
        for a, b in itertools.pairwise(widths)
    ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def gpt2() -> nn.Module:
    import transformers

    sizes = {"n_embd": 512, "n_layer": 4, "n_head": 8, "n_positions": 32}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=4096, use_cache=False, **sizes))


def t5() -> nn.Module:
    import transformers

    sizes = {"d_model": 512, "d_kv": 64, "d_ff": 1024, "num_layers": 3, "num_heads": 8}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=4096, use_cache=False, decoder_start_token_id=0, **sizes)
    )


MODELS = {
    "gpt2": gpt2,
    "t5": t5,
    "gpt": lambda: Text(tied=False, frozen=False),
    "conv": images,
    "frozen": lambda: Text(tied=True, frozen=True),
}


class Samples(torch.utils.data.Dataset[Tensor]):
    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        if self._kind == "conv":
            return torch.randn(3, 16, 16, generator=generator)
        return torch.randint(4096, (16,), generator=generator)


def loss_of(kind: str, model: nn.Module, inputs: Tensor) -> Tensor:
    if kind in ("gpt2", "t5"):
        return model(input_ids=inputs, labels=inputs).loss  # type: ignore[no-any-return]
    told = model(inputs)
    if kind == "conv":
        return told.square().mean()
    return nn.functional.cross_entropy(told[:, :-1].flatten(0, 1), inputs[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=MODELS, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--backups", type=int, default=1)
    parser.add_argument("--batch", type=int, default=2, help="samples of a micro-batch; there are four of them")
    args = parser.parse_args()
    torch.set_num_threads(1)
    job = elastrain.init(seed=3, backups=args.backups)
    model = MODELS[args.kind]()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    loader = elastrain.DataLoader(Samples(args.kind), global_batch_size=4 * args.batch, micro_batch_size=args.batch)
    model, optimizer, loader = job.prepare(model, optimizer, loader, max_grad_norm=1.0)
    for step in job.steps(loader, until=args.steps):
        for inputs in step:
            step.backward(loss_of(args.kind, model, inputs))
    sys.stderr.write(f"digest {job.digest()}\n")


if __name__ == "__main__":
    main()
