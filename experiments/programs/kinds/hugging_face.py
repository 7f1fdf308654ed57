"""Small models of `transformers`, from configurations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from experiments.programs.program import Program

WORDS, LENGTH = 64, 8
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
}


class Samples(torch.utils.data.Dataset[Mapping[str, Tensor]]):
    """Words and an image per sample, functions of its index."""

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        own = torch.Generator().manual_seed(index)
        words = torch.randint(4, WORDS, (LENGTH,), generator=own)
        return {"words": words, "image": torch.randn(3, 8, 8, generator=own), "label": words[0] % 4}


class _Pretrained(Program):
    """A model of a library, which tells how many parameters it has."""

    data = Samples()
    steps = 8
    whole, micro = 8, 2
    max_grad_norm = 1.0

    def make_model(self) -> nn.Module:
        import transformers

        transformers.logging.set_verbosity_error()
        model = self.configured(transformers)
        for part in model.modules():
            if hasattr(part, "config"):
                part.config.use_cache = False
        return model.train()

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def configured(self, of: Any) -> nn.Module:
        raise NotImplementedError

    def loss(self, batch: Any) -> Tensor:
        found: Tensor = self.model(input_ids=batch["words"], labels=batch["words"]).loss
        return found

    def end(self) -> None:
        self.told["parameters"] = len(list(self.model.parameters()))
        self.told["values"] = sum(p.numel() for p in self.model.parameters())


class Gpt2(_Pretrained):
    """GPT-2 with its tied head, without dropout."""

    def configured(self, of: Any) -> nn.Module:
        sizes = {"vocab_size": WORDS, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
        off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}
        return of.GPT2LMHeadModel(of.GPT2Config(**sizes, **off))


class Albert(_Pretrained):
    """ALBERT, which has one layer for all depths, with dropout."""

    reported = True
    random = True

    def configured(self, of: Any) -> nn.Module:
        drop = {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.3, "classifier_dropout_prob": 0.3}
        return of.AlbertForMaskedLM(of.AlbertConfig(**{**SIZES, "num_hidden_layers": 3}, embedding_size=8, **drop))


class T5(_Pretrained):
    """T5, whose encoder, decoder and head share an embedding, without dropout."""

    def configured(self, of: Any) -> nn.Module:
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
        return of.T5ForConditionalGeneration(of.T5Config(vocab_size=WORDS, decoder_start_token_id=0, **sizes))


class Bert(_Pretrained):
    """BERT with frozen embeddings under a tied head, and masks that the loop draws."""

    random = True

    def configured(self, of: Any) -> nn.Module:
        model = of.BertForMaskedLM(of.BertConfig(**SIZES))
        model.bert.embeddings.requires_grad_(False)
        return model

    def loss(self, batch: Any) -> Tensor:
        words = batch["words"]
        masked = torch.rand(words.shape) < 0.3
        masked[:, 0] = True
        found: Tensor = self.model(words.masked_fill(masked, 3), labels=words.masked_fill(~masked, -100)).loss
        return found


class Vit(_Pretrained):
    """A vision transformer."""

    def configured(self, of: Any) -> nn.Module:
        sizes = {**SIZES, "image_size": 8, "patch_size": 4, "num_labels": 4}
        return of.ViTForImageClassification(of.ViTConfig(**sizes))

    def loss(self, batch: Any) -> Tensor:
        found: Tensor = self.model(pixel_values=batch["image"], labels=batch["label"]).loss
        return found


class LlamaCheckpointed(_Pretrained):
    """Llama with a tied head, whose layers are computed again in the backward."""

    def configured(self, of: Any) -> nn.Module:
        model = of.LlamaForCausalLM(of.LlamaConfig(**SIZES, tie_word_embeddings=True))
        model.gradient_checkpointing_enable()
        return model
