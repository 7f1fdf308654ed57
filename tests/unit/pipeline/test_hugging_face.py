"""Unmodified models of `transformers`, from configurations: cut twice, their gradients are those of the whole model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastrain.pipeline.stubs.fakes import copy_of
from elastrain.pipeline.stubs.naming import blocks_of
from elastrain.pipeline.stubs.passes import Ends, StubPass
from elastrain.pipeline.stubs.stubs import Stubs
from elastrain.pipeline.stubs.uses import allowed_gradients
from elastrain.runtime.loop.split_backward import backward_of_input, backward_of_weights
from tests.support.absent_blocks import let_go
from tests.support.pipeline_members import untie
from tests.support.traced import trace

pytestmark = pytest.mark.slow  # the import of transformers alone takes a second

WORDS = 96


def gpt2(t: Any) -> nn.Module:
    return t.GPT2LMHeadModel(
        t.GPT2Config(vocab_size=WORDS, n_positions=64, n_embd=32, n_layer=4, n_head=2, use_cache=False)
    )


def llama(t: Any) -> nn.Module:
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2}
    return t.LlamaForCausalLM(t.LlamaConfig(vocab_size=WORDS, num_key_value_heads=2, use_cache=False, **shape))


def bert(t: Any) -> nn.Module:
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2}
    return t.BertForMaskedLM(t.BertConfig(vocab_size=WORDS, max_position_embeddings=64, **shape))


def t5(t: Any) -> nn.Module:
    shape = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 2}
    return t.T5ForConditionalGeneration(
        t.T5Config(vocab_size=WORDS, decoder_start_token_id=0, use_cache=False, **shape)
    )


def deberta(t: Any) -> nn.Module:
    """Its table of relative positions is a block that no forward enters."""
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2}
    relative = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "norm_rel_ebd": "layer_norm"}
    return t.DebertaV2ForMaskedLM(t.DebertaV2Config(vocab_size=WORDS, max_position_embeddings=64, **shape, **relative))


def batch_of(model: nn.Module) -> dict[str, Tensor]:
    ids = torch.randint(0, WORDS, (2, 16), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    if "Bert" in type(model).__name__ or "T5" in type(model).__name__:
        mask[0, -5:] = 0
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": mask}


def gradients(*models: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for model in models for n, p in model.named_parameters() if p.grad is not None}


def go_back(passed: StubPass, ends: Ends, split: list[bool] | None) -> None:
    """Compute the backward, in two parts if `split` is a list, to which it is added whether there were two."""
    left = None if split is None else backward_of_input(ends)
    if split is not None:
        split.append(left is not None)
    if left is None:
        passed.backward(ends)
    else:
        backward_of_weights(left)


@pytest.mark.parametrize("split", [None, (gpt2, llama, bert)], ids=["whole", "in two parts"])
@pytest.mark.parametrize("build", [gpt2, llama, bert, t5, deberta])
def test_a_model_of_hugging_face_cut_twice_has_the_gradients_of_the_whole(
    build: Callable[[Any], nn.Module], split: tuple[Any, ...] | None
) -> None:
    import transformers

    torch.set_num_threads(1)
    torch.manual_seed(2)
    model = build(transformers).eval()
    untie(model)
    batch, whole = batch_of(model), copy.deepcopy(model)
    loss = whole(**batch).loss
    loss.backward()

    traced = trace(model, blocks_of(model), lambda: model(**batch).loss)
    legal = traced.graph.legal_cuts
    assert len(legal) >= 5, traced.graph.illegal
    blocks, cuts = (
        traced.graph.blocks,
        (0, legal[len(legal) // 3], legal[2 * len(legal) // 3], len(traced.graph.blocks)),
    )
    members, passes = [copy.deepcopy(model) for _ in range(3)], list[StubPass]()
    told = torch.zeros(())
    for member, begin, end in zip(members, cuts, cuts[1:], strict=False):
        beside = [name for name, neighbour in traced.graph.never_entered if neighbour in blocks[begin:end]]
        here = [*blocks[begin:end], *beside]
        let_go(member, [name for name in blocks_of(model) if name not in here], here)
        above = [tensor for tensor in passes[-1].going if tensor is not None] if passes else []
        came = [copy_of(tensor).requires_grad_(tensor.requires_grad) for tensor in above]
        passes.append(Stubs(member, traced, begin, end).begin(came))
        told = member(**batch).loss
        passes[-1].backward_is_called()
    assert torch.equal(told, loss)
    were_split = None if split is None else list[bool]()
    with allowed_gradients():
        go_back(passes[2], [(told, None)], were_split)
        for below, above in ((passes[2], passes[1]), (passes[1], passes[0])):
            go_back(above, above.ends(below.gradients), were_split)
    assert split is None or build not in split or were_split == [True, True, False]

    found, expected = gradients(*members), gradients(whole)
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
