"""Where saved values leave a program and come back, on graphs made by hand."""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import ComputedBuffer
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode

from elastrain.offload.activations.operators import COME_BACK, LEAVE
from elastrain.offload.compiling.graphs import Departures, base_of, is_view, let_leave

aten = torch.ops.aten


class Made:
    """A graph whose values are fake tensors."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.graph, self._mode = fx.Graph(), mode

    def takes(self, name: str, value: Tensor) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = value
        return node

    def call(self, operator: torch._ops.OpOverload, *args: object) -> fx.Node:
        name = operator.overloadpacket.__name__
        node = self.graph.create_node("call_function", operator, args, name=name)
        with self._mode:
            node.meta["val"] = operator(*[each.meta["val"] if isinstance(each, fx.Node) else each for each in args])
        return node

    def returns(self, *values: fx.Node) -> fx.GraphModule:
        self.graph.output(values)
        return fx.GraphModule(torch.nn.Module(), self.graph)


def programs(min_bytes: int) -> tuple[fx.GraphModule, fx.GraphModule, Departures]:
    """exp(x) is saved whole and as a transposed view, x as an input, and a value that is returned, too."""
    with FakeTensorMode() as mode:
        x = torch.empty(64, 64)
    forward = Made(mode)
    taken = forward.takes("x", x)
    e = forward.call(aten.exp.default, taken)
    turned = forward.call(aten.t.default, e)
    product = forward.call(aten.mm.default, turned, e)
    loss = forward.call(aten.sin.default, product)
    values = [taken, e, turned, product]
    fw = forward.returns(product, loss, *values)
    backward = Made(mode)
    saved = [backward.takes(node.name, node.meta["val"]) for node in values]
    tangent = backward.takes("tangents_1", product.meta["val"])
    first = backward.call(aten.mm.default, tangent, saved[0])
    second = backward.call(aten.mm.default, first, saved[1])
    bw = backward.returns(backward.call(aten.mul.Tensor, second, saved[2]), saved[3])
    return fw, bw, let_leave(fw, bw, outputs=2, min_bytes=min_bytes)


def order(module: fx.GraphModule) -> list[str]:
    return [node.name.removesuffix("_default") for node in module.graph.nodes]


def test_a_value_leaves_once_behind_its_last_use_and_each_view_comes_back_before_its_first() -> None:
    forward, backward, found = programs(min_bytes=1)
    assert found == Departures(values=1, size_bytes=64 * 64 * 4, varying=0)
    assert order(forward) == ["x", "exp", "t", "mm", "leave", "sin", "output"]
    returned = forward.graph.find_nodes(op="output")[0].args[0]
    assert [each.name for each in returned] == ["mm", "sin", "x", "leave_default", "leave_default", "mm"]
    assert order(backward)[5:] == ["mm_1", "come_back", "mm_2", "come_back_default_1", "mul", "output"]
    whole, view = backward.graph.find_nodes(op="call_function", target=COME_BACK)
    # Behind what all its users wait for in any case.
    assert (whole.args[1].name, view.args[1].name) == ("mm_1", "mm_2")
    assert (whole.args[4], view.args[4]) == ([0, 64, 64, 64, 1], [0, 64, 64, 1, 64])


def test_what_is_small_stays() -> None:
    forward, _, found = programs(min_bytes=1 << 20)
    assert found.values == 0
    assert not forward.graph.find_nodes(op="call_function", target=LEAVE)


def test_views_are_traced_to_what_was_computed_also_through_parts_of_lists() -> None:
    with FakeTensorMode() as mode:
        x = torch.empty(8, 8)
    made = Made(mode)
    e = made.call(aten.exp.default, made.takes("x", x))
    parts = made.graph.call_function(aten.split.Tensor, (e, 2))
    part = made.graph.call_function(lambda parts, n: parts[n], (parts, 1))
    part.target.__name__ = "getitem"
    flat = made.graph.call_function(aten._unsafe_view.default, (part, [16]))
    assert base_of(flat) is e
    assert is_view(flat)
    assert not is_view(e)


def test_a_part_of_a_value_comes_back_as_that_part() -> None:
    def made() -> tuple[fx.GraphModule, fx.GraphModule]:
        with FakeTensorMode() as mode:
            x = torch.empty(64, 64)
        forward, backward = Made(mode), Made(mode)
        e = forward.call(aten.exp.default, forward.takes("x", x))
        part = forward.call(aten.t.default, forward.call(aten.slice.Tensor, e, 0, 16, 48))
        fw = forward.returns(forward.call(aten.sum.default, e), part)
        tangent = backward.takes("tangents_1", fw.graph.find_nodes(op="output")[0].args[0][0].meta["val"])
        saved = backward.takes(part.name, part.meta["val"])
        return fw, backward.returns(backward.call(aten.mul.Tensor, saved, tangent))

    x, tangent = torch.randn(64, 64), torch.tensor(2.0)
    forward, backward = made()
    _, saved = forward(x)
    (expected,) = backward(tangent, saved)
    forward, backward = made()
    assert let_leave(forward, backward, outputs=1, min_bytes=1).values == 1
    _, handle = forward(x)
    assert handle.numel() == 1
    (found,) = backward(tangent, handle)
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()


def kernels(*, leaves: bool) -> list[set[str]]:
    """What inductor computes in each kernel of relu(x) / sum(relu(x)) in half precision, whose relu is saved."""
    with FakeTensorMode() as mode:
        x = torch.empty(64, 64, dtype=torch.bfloat16)
    forward, backward = Made(mode), Made(mode)
    saved = forward.call(aten.relu.default, forward.takes("x", x))
    quotient = forward.call(aten.div.Tensor, saved, forward.call(aten.sum.dim_IntList, saved, [1], True))
    fw = forward.returns(quotient, saved)
    tangent = backward.takes("tangents_1", quotient.meta["val"])
    product = backward.call(aten.mul.Tensor, backward.takes("relu", saved.meta["val"]), tangent)
    if leaves:
        assert let_leave(fw, backward.returns(product), outputs=1, min_bytes=1).values == 1
    with mode:
        lowered = GraphLowering(fw, [x])
        with V.set_graph_handler(lowered), V.set_fake_mode(mode):
            lowered.run(x)
    return [{node.name for node in each.origins} for each in lowered.buffers if isinstance(each, ComputedBuffer)]


def test_a_value_that_leaves_is_computed_once_and_read_rounded_as_without_us() -> None:
    """A kernel that computes it anew reads it from a register, before it was rounded: other bits in half precision."""
    assert kernels(leaves=True) == kernels(leaves=False) == [{"relu"}, {"sum_1"}, {"div"}]
