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
_BOTH = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
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


def _albert() -> nn.Module:
    """One layer that each forward enters three times."""
    return transformers.AlbertForMaskedLM(transformers.AlbertConfig(**_ENCODER, embedding_size=16))


def _whisper() -> nn.Module:
    """Convolutions over sound, an encoder, a decoder with a tied head; positions that are frozen."""
    sizes = {
        **_BOTH,
        "max_source_positions": 24,
        "max_target_positions": 32,
        "num_mel_bins": 16,
        "dropout": 0.1,
        "encoder_layerdrop": 0.3,
        "decoder_layerdrop": 0.3,
        "apply_spec_augment": True,
        "mask_time_prob": 0.2,
        "mask_time_length": 3,
        "mask_time_min_masks": 1,
    }
    return transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(
            vocab_size=VOCABULARY,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            suppress_tokens=None,
            begin_suppress_tokens=None,
            **sizes,
        )
    )


def _wav2vec2() -> nn.Module:
    """Masks drawn by NumPy, layers dropped at random, weight norm of a convolution."""
    return transformers.Wav2Vec2ForSequenceClassification(
        transformers.Wav2Vec2Config(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            conv_dim=(16, 16),
            conv_stride=(5, 2),
            conv_kernel=(10, 3),
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=16,
            num_conv_pos_embedding_groups=4,
            num_labels=LABELS,
            mask_time_prob=0.2,
            mask_time_length=4,
            mask_time_min_masks=1,
            layerdrop=0.3,
            classifier_proj_size=16,
        )
    )


def _clip() -> nn.Module:
    """Two towers, and a loss over all pairs of a micro-batch."""
    text = {**_ENCODER, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0, "projection_dim": 16}
    vision = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "image_size": 16,
        "patch_size": 4,
        "projection_dim": 16,
    }
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))


def _qwen2_moe() -> nn.Module:
    """Experts beside one that all words share, and a loss of the router."""
    return transformers.Qwen2MoeForCausalLM(
        transformers.Qwen2MoeConfig(
            **_DECODER,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
            output_router_logits=True,
        )
    )


def _gemma2() -> nn.Module:
    """Windows of attention in every second layer, and logits that are capped."""
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**_DECODER, head_dim=8, sliding_window=4))


def _bart() -> nn.Module:
    """Layers of the encoder that a forward leaves out at random."""
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(
            vocab_size=VOCABULARY,
            max_position_embeddings=32,
            decoder_start_token_id=2,
            encoder_layerdrop=0.3,
            **_BOTH,
        )
    )


def _swin() -> nn.Module:
    """Shifted windows, and whole paths that are dropped."""
    return transformers.SwinForImageClassification(
        transformers.SwinConfig(
            image_size=16,
            patch_size=2,
            embed_dim=16,
            depths=[1, 1],
            num_heads=[2, 2],
            window_size=4,
            drop_path_rate=0.2,
            num_labels=LABELS,
        )
    )


def _convnext() -> nn.Module:
    """Convolutions by channel, scaled residuals, and whole paths that are dropped."""
    return transformers.ConvNextForImageClassification(
        transformers.ConvNextConfig(
            num_stages=2, hidden_sizes=[8, 16], depths=[1, 1], patch_size=2, drop_path_rate=0.3, num_labels=LABELS
        )
    )


def _bloom() -> nn.Module:
    """Biases in place of positions."""
    return transformers.BloomForCausalLM(
        transformers.BloomConfig(
            vocab_size=VOCABULARY, hidden_size=32, n_layer=3, n_head=4, hidden_dropout=0.1, use_cache=False
        )
    )


def _neox() -> nn.Module:
    """Attention and feed-forward side by side."""
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**_ENCODER, use_cache=False, hidden_dropout=0.1))


def _mobilenet() -> nn.Module:
    """Fifty batch norms."""
    return transformers.MobileNetV2ForImageClassification(
        transformers.MobileNetV2Config(image_size=32, depth_multiplier=0.25, num_labels=LABELS)
    )


def _xlnet() -> nn.Module:
    """Two streams of attention, of which a plain forward uses one: parameters without a gradient."""
    return transformers.XLNetLMHeadModel(
        transformers.XLNetConfig(vocab_size=VOCABULARY, d_model=32, n_layer=2, n_head=4, d_inner=64)
    )


def _deberta() -> nn.Module:
    """Attention over relative positions, which lie in one table for all layers."""
    return transformers.DebertaV2ForMaskedLM(
        transformers.DebertaV2Config(
            **_ENCODER, relative_attention=True, pos_att_type=["p2c", "c2p"], share_att_key=True
        )
    )


def _checkpointed() -> nn.Module:
    """Layers that are computed again in backward."""
    model = _llama()
    model.gradient_checkpointing_enable()
    return model


def _checkpointed_reentrant() -> nn.Module:
    """Likewise, by torch's older way, which runs a backward inside the backward."""
    model = _gpt2()
    model.gradient_checkpointing_enable({"use_reentrant": True})
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
    "albert": _albert,
    "whisper": _whisper,
    "wav2vec2": _wav2vec2,
    "clip": _clip,
    "qwen2_moe": _qwen2_moe,
    "gemma2": _gemma2,
    "bart": _bart,
    "swin": _swin,
    "convnext": _convnext,
    "bloom": _bloom,
    "neox": _neox,
    "mobilenet": _mobilenet,
    "xlnet": _xlnet,
    "deberta": _deberta,
    "checkpointed": _checkpointed,
    "checkpointed_reentrant": _checkpointed_reentrant,
}


def loss_of(kind: str, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """The loss that the model's own forward computes. BERT's masks are drawn here, by torch's default generator."""
    words = batch["words"]
    if kind == "whisper":
        sound = batch["image"].reshape(len(words), 16, 48)
        found = model(input_features=sound, labels=words)
    elif kind == "wav2vec2":
        found = model(input_values=batch["image"].reshape(len(words), -1), labels=batch["label"])
    elif kind == "clip":
        found = model(input_ids=words, pixel_values=batch["image"], return_loss=True)
    elif kind in ("vit", "resnet", "swin", "convnext", "mobilenet"):
        found = model(pixel_values=batch["image"], labels=batch["label"])
    elif kind == "bert_frozen":
        masked = torch.rand(words.shape) < 0.3
        masked[:, 0] = True
        found = model(input_ids=words.masked_fill(masked, 3), labels=words.masked_fill(~masked, -100))
    else:
        found = model(input_ids=words, labels=words)
    return found.loss
