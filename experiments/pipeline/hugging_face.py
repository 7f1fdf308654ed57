"""Trains an unmodified model of `transformers`, made from a configuration, for a few steps.

    python experiments/pipeline/hugging_face.py gpt2 --steps 2

Lines go to `steps-<member>.txt` and `parameters-<member>.txt` in the run's folder: see `train.py`.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

if __name__ == "__main__":  # as a script: make `elastrain` importable from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import elastrain
from experiments.pipeline.present import lines_of

WORDS, MICRO_BATCHES, SIZE = 96, 4, 2
_SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2}


def gpt2(t: Any) -> nn.Module:
    config = t.GPT2Config(vocab_size=WORDS, n_positions=64, n_embd=32, n_layer=4, n_head=2, use_cache=False)
    return t.GPT2LMHeadModel(config)


def llama(t: Any) -> nn.Module:
    return t.LlamaForCausalLM(t.LlamaConfig(vocab_size=WORDS, num_key_value_heads=2, use_cache=False, **_SHAPE))


def bert(t: Any) -> nn.Module:
    return t.BertForMaskedLM(t.BertConfig(vocab_size=WORDS, max_position_embeddings=64, **_SHAPE))


def t5(t: Any) -> nn.Module:
    shape = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 2}
    config = t.T5Config(vocab_size=WORDS, decoder_start_token_id=0, use_cache=False, **shape)
    return t.T5ForConditionalGeneration(config)


def vit(t: Any) -> nn.Module:
    return t.ViTForImageClassification(t.ViTConfig(image_size=16, patch_size=8, num_labels=5, **_SHAPE))


def mixtral(t: Any) -> nn.Module:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
    return t.MixtralForCausalLM(t.MixtralConfig(vocab_size=WORDS, use_cache=False, **experts, **_SHAPE))


MODELS = {each.__name__: each for each in (gpt2, llama, bert, t5, vit, mixtral)}


def modules() -> tuple[str, ...]:
    """Where they are defined; none without `transformers`."""
    if importlib.util.find_spec("transformers") is None:
        return ()
    return ("transformers", *(f"transformers.models.{name}.modeling_{name}" for name in MODELS))


class Samples(torch.utils.data.Dataset[dict[str, Any]]):
    """Seeded per sample by the loader."""

    def __init__(self, *, are_images: bool) -> None:
        self._are_images = are_images

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self._are_images:
            return {"pixel_values": torch.randn(3, 16, 16), "labels": index % 5}
        ids: Tensor = torch.randint(1, WORDS, (16,))
        return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


def main() -> None:
    import transformers

    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    job = elastrain.init(seed=4)
    model = MODELS[args.model](transformers).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = elastrain.DataLoader(
        Samples(are_images=args.model == "vit"),
        global_batch_size=SIZE * MICRO_BATCHES,
        micro_batch_size=SIZE,
        num_workers=0,
    )
    model, optimizer, loader = job.prepare(model, optimizer, loader, max_grad_norm=1.0)
    folder, me = Path(os.environ["ELASTRAIN_RUN_DIR"]), os.environ.get("ELASTRAIN_MEMBER", "alone")
    with (
        (folder / f"steps-{me}.txt").open("w", buffering=1) as lines,
        (folder / f"parameters-{me}.txt").open("w", buffering=1) as parameters,
    ):
        for step in job.steps(loader, until=args.steps):
            for batch in step:
                step.backward(model(**batch).loss)
            lines.write(f"{step.number} {step.loss!r} {step.grad_norm!r}\n")
            parameters.writelines(lines_of(model, step.number))
        lines.write(f"end digest {job.digest()}\n")


if __name__ == "__main__":
    main()
