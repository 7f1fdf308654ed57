"""Small models built from configurations of `transformers`, what they are fed with, and their loss.

Nothing is downloaded: every model starts from its random initialisation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn

VOCABULARY, WORDS, LABELS, SAMPLES = 128, 12, 7, 157
_ENCODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
}
_DECODER = {**_ENCODER, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}


class Samples(torch.utils.data.Dataset[Mapping[str, Any]]):
    """Words, an image and a label per sample, each a function of its index."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        generator = torch.Generator().manual_seed(index)
        words = torch.randint(4, VOCABULARY, (WORDS,), generator=generator)
        image = torch.randn(3, 16, 16, generator=generator)
        return {"words": words, "image": image, "label": index % LABELS}


class LowRank(nn.Module):
    """A frozen linear layer with a trained update of low rank beside it (LoRA, https://arxiv.org/abs/2106.09685)."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.base(inputs) + inputs @ self.down.T @ self.up.T


def _gpt2() -> nn.Module:
    """Ties its embedding to its head; dropout everywhere."""
    sizes = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2, **sizes)
    )


def _llama(tied: bool = False) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_DECODER, tie_word_embeddings=tied))


def _mixtral() -> nn.Module:
    """Experts that some micro-batches do not use, and a loss of the router beside the language's."""
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**_DECODER, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)
    )


def _bert() -> nn.Module:
    """Frozen embeddings under a tied, trained head."""
    model = transformers.BertForMaskedLM(transformers.BertConfig(**_ENCODER))
    model.bert.embeddings.requires_grad_(False)
    return model


def _t5() -> nn.Module:
    """An encoder and a decoder that share an embedding."""
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, **sizes)
    )


def _vit() -> nn.Module:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(image_size=16, patch_size=4, num_labels=LABELS, **sizes)
    )


def _resnet() -> nn.Module:
    """A convolution stem and batch norms."""
    return transformers.ResNetForImageClassification(
        transformers.ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=LABELS, layer_type="basic"
        )
    )


def _mamba() -> nn.Module:
    """A state-space model: a scan over the words."""
    return transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=8)
    )


def _lora() -> nn.Module:
    """Everything is frozen but what was put beside two projections of each layer."""
    model = _llama().requires_grad_(False)
    for layer in model.model.layers:  # type: ignore[union-attr,operator]
        layer.self_attn.q_proj = LowRank(layer.self_attn.q_proj)
        layer.self_attn.v_proj = LowRank(layer.self_attn.v_proj)
    return model


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "llama_tied": lambda: _llama(tied=True),
    "mixtral": _mixtral,
    "bert_frozen": _bert,
    "t5": _t5,
    "vit": _vit,
    "resnet": _resnet,
    "mamba": _mamba,
    "lora": _lora,
}


def loss_of(kind: str, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """The loss that the model's own forward computes. BERT's masks are drawn here, by torch's default generator."""
    words = batch["words"]
    if kind in ("vit", "resnet"):
        found = model(pixel_values=batch["image"], labels=batch["label"])
    elif kind == "bert_frozen":
        masked = torch.rand(words.shape) < 0.3
        masked[:, 0] = True
        found = model(input_ids=words.masked_fill(masked, 3), labels=words.masked_fill(~masked, -100))
    else:
        found = model(input_ids=words, labels=words)
    return found.loss
