"""Trains one model of `transformers` that no author of this project has chosen, in one of many ways.

python experiments/pipeline/zoo_train.py causal bloom --ways bf16,scheduler
"""

from __future__ import annotations

import argparse
import random
from typing import Any

import torch
from torch import Tensor, nn

WORDS, LENGTH, STEPS = 96, 16, 5
MODELS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
}
"""Kind -> the table in which `transformers` names the classes of its architectures."""
_SIZES = {
    WORDS: "vocab_size",
    64: "intermediate_size ffn_dim d_ff n_inner hidden_dim ffn_hidden_size encoder_ffn_dim decoder_ffn_dim "
    "max_position_embeddings n_positions n_ctx",
    32: "hidden_size n_embd d_model dim embed_dim embedding_size encoder_hidden_size moe_intermediate_size "
    "shared_expert_intermediate_size",
    16: "head_dim d_kv kv_channels q_lora_rank kv_lora_rank v_head_dim qk_head_dim",
    8: "qk_rope_head_dim qk_nope_head_dim rotary_dim state_size block_size attention_window sliding_window",
    4: "num_hidden_layers n_layer n_layers num_layers num_experts num_local_experts n_routed_experts",
    2: "num_attention_heads n_head n_heads num_heads num_key_value_heads encoder_layers decoder_layers "
    "num_encoder_layers num_decoder_layers encoder_attention_heads decoder_attention_heads type_vocab_size "
    "num_experts_per_tok num_experts_per_token expand eos_token_id",
    1: "n_group topk_group n_shared_experts first_k_dense_replace multi_query_group_num bos_token_id",
    0: "pad_token_id decoder_start_token_id",
}
_SHRUNKEN = {name: size for size, names in _SIZES.items() for name in names.split()}
OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-3, momentum=0.9),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=1e-3),
}
WAYS = (
    *("checkpoint", "reentrant", "bf16", "autocast", "compile", "scheduler", "groups", "weight", "unclipped"),
    *("frozen-embedding", "frozen-half", "frozen-some", "freeze-later", "runs-of-2", "backups-2", "loader"),
    *OPTIMIZERS,
)


def architectures(kind: str) -> dict[str, str]:
    """Name -> class."""
    from transformers.models.auto import modeling_auto

    table = getattr(modeling_auto, MODELS[kind])
    return {name: found[0] if isinstance(found, tuple) else found for name, found in table.items()}


def build(kind: str, name: str) -> nn.Module:
    """A small one. Raises whatever the library does for those that small sizes do not make."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    transformers.logging.set_verbosity_error()  # advice about sizes
    of_class = CONFIG_MAPPING[name]
    usual = of_class().to_dict()
    sizes = {key: size for key, size in _SHRUNKEN.items() if isinstance(usual.get(key, ""), int | float | None)}
    config = of_class(**sizes)
    for collected in ("use_cache", "output_router_logits"):
        if hasattr(config, collected):
            setattr(config, collected, False)
    model: nn.Module = getattr(transformers, architectures(kind)[name])(config)
    return model.train()


class Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Seeded per sample by the loader."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        words = torch.randint(3, WORDS, (LENGTH,))
        return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words.clone()}


def change(model: Any, ways: set[str]) -> None:
    """What the script does to the model before `prepare`."""
    drawn = random.Random(5)
    parameters = list(model.parameters())
    if ways & {"checkpoint", "reentrant"}:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": "reentrant" in ways})
    if "bf16" in ways:
        model.to(torch.bfloat16)
    if "frozen-embedding" in ways:
        model.get_input_embeddings().requires_grad_(False)
    for at, parameter in enumerate(parameters):
        if ("frozen-half" in ways and 2 * at < len(parameters)) or ("frozen-some" in ways and drawn.random() < 0.4):
            parameter.requires_grad_(False)
    if "compile" in ways:
        layers = next(each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each) > 1)
        for at, layer in enumerate(layers):
            layers[at] = torch.compile(layer, backend="aot_eager")


def grouped(trained: list[nn.Parameter], ways: set[str]) -> Any:
    """For the optimizer."""
    if "groups" not in ways:
        return trained
    flat, others = ([q for q in trained if (q.dim() < 2) is is_flat] for is_flat in (True, False))
    return [{"params": flat, "weight_decay": 0.0}, {"params": others, "lr": 3e-3}]


def main() -> None:
    import elastrain

    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=MODELS)
    parser.add_argument("name")
    parser.add_argument("--ways", default="", help=f"of {', '.join(WAYS)}; commas between them")
    args = parser.parse_args()
    ways = set(filter(None, args.ways.split(",")))
    if unknown := ways.difference(WAYS):
        parser.error(f"--ways {','.join(sorted(unknown))}: known are {', '.join(WAYS)}")
    torch.set_num_threads(1)
    job = elastrain.init(seed=4, run_length=1 + ("runs-of-2" in ways), backups=1 + ("backups-2" in ways))
    model = build(args.kind, args.name)
    change(model, ways)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    made = next((make for name, make in OPTIMIZERS.items() if name in ways), torch.optim.AdamW)
    optimizer = made(grouped(trained, ways))
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)] if "scheduler" in ways else []
    loader = elastrain.DataLoader(Texts(), global_batch_size=12, micro_batch_size=2, num_workers=int("loader" in ways))
    clipped = None if "unclipped" in ways else 1.0
    model, optimizer, loader = job.prepare(model, optimizer, loader, max_grad_norm=clipped)
    for step in job.steps(loader, until=STEPS):
        if "freeze-later" in ways:
            for parameter in trained[:3]:
                parameter.requires_grad_(step.number != 2)
        for batch in step:
            with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in ways):
                loss = model(**batch).loss
            step.backward(loss, weight=float(batch["input_ids"].sum()) if "weight" in ways else 1.0)
        for scheduler in schedulers:
            scheduler.step()


if __name__ == "__main__":
    main()
