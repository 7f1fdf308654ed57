"""`python -m experiments.offload.zoo`: other people's models, small and untrained, with and without offload.

Needs `pip install transformers`. Each model of Hugging Face that is named here, and torch's own recurrent and
transformer modules, as they are and with the library's own recomputation, in float32 and under bfloat16 autocast: the
gradients of six steps, three without a limit and three with a third of what is saved, against keeping everything.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from importlib.util import find_spec
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from elastrain.offload import ActivationOffload, LimitTooSmallError, save_on_disk
from experiments.harness import Reach, add_record_flag, record, report
from experiments.offload.device import spill_directory

MIN_BYTES = 2 << 10
LIMIT_SHARE = 1 / 3
STEPS = 3
VOCABULARY = 512
Loss = Callable[[Any], Tensor]

COMMON = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 256}
WORDS = {**COMMON, "vocab_size": VOCABULARY}
GROUPED = {**WORDS, "num_key_value_heads": 2}
LANGUAGE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 128, "n_layer": 3, "n_head": 4, "vocab_size": VOCABULARY}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**GROUPED, "head_dim": 32}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**GROUPED, "head_dim": 32}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**GROUPED, "num_local_experts": 4}),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", WORDS),
    "falcon": ("FalconForCausalLM", "FalconConfig", WORDS),
    "bert": ("BertForMaskedLM", "BertConfig", WORDS),
    "deberta": (
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        {**WORDS, "relative_attention": True, "pos_att_type": "p2c|c2p", "max_relative_positions": 64},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": 128, "d_ff": 256, "num_layers": 2, "num_heads": 4, "d_kv": 32, "vocab_size": VOCABULARY}
        | {"decoder_start_token_id": 0},
    ),
    "mamba": ("MambaForCausalLM", "MambaConfig", {"hidden_size": 128, "num_hidden_layers": 2, "state_size": 8} | WORDS),
    "rwkv": ("RwkvForCausalLM", "RwkvConfig", {**WORDS, "context_length": 64}),
}
PICTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "vit": ("ViTForImageClassification", "ViTConfig", {**COMMON, "image_size": 64, "patch_size": 8}),
    "convnext": (
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {"hidden_sizes": [32, 64, 96, 128], "depths": [1] * 4},
    ),
    "resnet": (
        "ResNetForImageClassification",
        "ResNetConfig",
        {"embedding_size": 32, "hidden_sizes": [64, 96, 128, 160], "depths": [1] * 4},
    ),
}
MODULES: dict[str, Callable[[], nn.Module]] = {
    "nn.RNN": lambda: nn.RNN(64, 128, 2),
    "nn.GRU": lambda: nn.GRU(64, 128, 2, dropout=0.1),
    "nn.LSTM": lambda: nn.LSTM(64, 128, 2, bidirectional=True),
    "nn.TransformerEncoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128), 2),
}


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _words() -> Tensor:
    return torch.randint(0, VOCABULARY, (2, 64), generator=torch.Generator().manual_seed(1))


def _of_module(model: nn.Module) -> Tensor:
    found = model(_random(50, 4, 64))
    return (found[0] if isinstance(found, tuple) else found).square().mean()


def cases() -> Iterator[tuple[str, Callable[[], nn.Module], Loss]]:
    """Name, how to make it, and its loss."""
    import transformers  # the rest of the experiment does without

    def make(model: str, config: str, values: dict[str, Any]) -> nn.Module:
        made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**values))
        return made

    for name, found in LANGUAGE.items():
        yield name, lambda found=found: make(*found), lambda model: model(input_ids=_words(), labels=_words()).loss  # type: ignore[misc]
    labels = torch.tensor([0, 1, 1, 0])
    for name, found in PICTURES.items():
        yield (
            name,
            lambda found=found: make(*found),  # type: ignore[misc]
            lambda model: model(pixel_values=_random(4, 3, 64, 64), labels=labels).loss,
        )
    for name, module in MODULES.items():
        yield name, module, _of_module


def step(model: nn.Module, loss: Loss, around: AbstractContextManager[Any], *, autocast: bool) -> str:
    """The digest of all gradients, bit for bit."""
    model.zero_grad()
    torch.manual_seed(3)  # of dropout
    with around, torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        value = loss(model)
    value.backward()
    found = hashlib.sha256()
    for parameter in model.parameters():
        if parameter.grad is not None:
            found.update(parameter.grad.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def same_bits(model: nn.Module, loss: Loss, directory: str, *, autocast: bool) -> bool:
    """Without a limit, and with one that is raised to the smallest that works where it is too small."""
    expected = step(model, loss, nullcontext(), autocast=autocast)
    free = save_on_disk(directory, min_bytes=MIN_BYTES)
    found = [step(model, loss, free, autocast=autocast) for _ in range(STEPS)]
    last = free.stats().last
    free.close()
    assert last is not None, "nothing was saved"
    limit_bytes = int(LIMIT_SHARE * last.saved_bytes)
    while True:
        limited = save_on_disk(directory, min_bytes=MIN_BYTES, memory_limit=limit_bytes)
        try:
            found += _steps(model, loss, limited, autocast=autocast)
        except LimitTooSmallError as small:
            limit_bytes = small.smallest_bytes
        else:
            return all(each == expected for each in found)
        finally:
            limited.close()


def _steps(model: nn.Module, loss: Loss, offload: ActivationOffload, *, autocast: bool) -> list[str]:
    return [step(model, loss, offload, autocast=autocast) for _ in range(STEPS)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.offload.zoo", description=__doc__)
    parser.add_argument("--dir", default=None, help="a directory on the SSD (default: the temporary directory)")
    add_record_flag(parser)
    given = parser.parse_args()
    if find_spec("transformers") is None:
        parser.error("it needs Hugging Face's models: pip install transformers")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    tried: dict[str, bool] = {}
    with tempfile.TemporaryDirectory(dir=spill_directory(parser, given.dir)) as directory:
        for (name, make, loss), recomputes, autocast in product(cases(), (False, True), (False, True)):
            torch.manual_seed(0)
            model = make().train()
            if recomputes:
                if not getattr(model, "supports_gradient_checkpointing", False):
                    continue
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
            key = f"{name}{' recomputed' if recomputes else ''}{' autocast' if autocast else ''}"
            tried[key] = same_bits(model, loss, directory, autocast=autocast)
            print(f"{key:<40} {'same bits' if tried[key] else 'OTHER BITS'}", flush=True)
    figures = {
        "bits_equal": float(all(tried.values())),
        "tried": len(tried),
        "wrong": [k for k, v in tried.items() if not v],
    }
    if given.record:
        record("offload", figures, quick=True, settings={"parts": ["zoo"], "transformers": version("transformers")})
    report(figures, {"bits_equal": Reach(limit=1, at_least=True)})


if __name__ == "__main__":
    main()
