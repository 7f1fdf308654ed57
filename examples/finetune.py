"""Fine-tuning: a small transformer whose embedding and first layers are frozen, with a lower rate for what is above.

elastrain run --nproc-per-node 2 examples/finetune.py

The model is made by hand, so that nothing has to be downloaded. With a model of a library it is the same: freeze
parameters with `requires_grad_(False)` before `prepare`, and name the others in the optimizer's groups.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import elastrain

WORDS, LENGTH, WIDTH = 32, 12, 32


class Sequences(Dataset[tuple[Tensor, Tensor]]):
    """Sequences of words, labelled by whether the first word occurs again."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        words = torch.randint(WORDS, (LENGTH,))
        return words, (words[1:] == words[0]).any().long()


class Layer(nn.Module):
    """Attention and a feed-forward part, each with its residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, num_heads=4, batch_first=True)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.norm_1(hidden)
        hidden = hidden + self.attention(normed, normed, normed, need_weights=False)[0]
        out: Tensor = hidden + self.feed_forward(self.norm_2(hidden))
        return out


class Classifier(nn.Module):
    """`pretrained` stands for what a real script would load from a file: the same on every member."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.embedding(words) + self.positions
        for layer in self.layers:
            hidden = layer(hidden)
        scores: Tensor = self.head(hidden.mean(dim=1))
        return scores


def freeze(model: Classifier, layers: int) -> None:
    """Everything up to the layer `layers`: it is published to newcomers, but has no gradient and no optimizer state."""
    model.positions.requires_grad_(False)
    for part in (model.embedding, *model.layers[:layers]):
        part.requires_grad_(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps

    job = elastrain.init(seed=0)
    model = Classifier()
    freeze(model, layers=2)
    trained = [parameter for parameter in model.layers.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        [{"params": trained, "lr": 1e-3}, {"params": model.head.parameters(), "lr": 1e-2}], weight_decay=0.01
    )
    loader = elastrain.DataLoader(Sequences(), global_batch_size=32, micro_batch_size=4)
    model, optimizer, loader = job.prepare(model, optimizer, loader, max_grad_norm=1.0)

    before = model.embedding.weight.clone()
    for step in job.steps(loader, until=steps):
        for words, labels in step:
            step.backward(nn.functional.cross_entropy(model(words), labels))
        if job.rank == 0 and step.number % 5 == 0:
            print(f"step {step.number}: loss {step.loss:.4f}, gradient {step.grad_norm:.3f}", flush=True)
    assert torch.equal(before, model.embedding.weight), "what is frozen does not move"
    if job.rank == 0:
        print(f"digest {job.digest()}", flush=True)


if __name__ == "__main__":
    main()
