"""Insertion of `leave` and `come_back` into a program that was cut into forward and backward.

Each saved value that is no input leaves after its last use in the forward. It comes back before its first use in the
backward, and depends on what is computed just before; otherwise all values might come back at once. Views are traced to
the value whose memory they share, which leaves once.

Nothing else is reordered. In half precision, a value that is rounded on its way through memory has other bits than one
that stays in a register. So the compiler must stay free to fuse exactly what it would fuse without these operators.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from elastrain.offload.activations.operators import COME_BACK, LEAVE, new_handle, place_in

MIN_BYTES = 256 << 10
"""Smallest value that leaves, as in eager mode."""
_aten = torch.ops.aten
# Key of a node's `meta` by which inductor stores a value to memory as soon as it is computed, like a returned value.
_LIES_IN_MEMORY = "inductor_realize_to_strides"
# Operators that return a view without declaring it in their schema.
_SILENT_VIEWS = frozenset({_aten._unsafe_view.default, _aten.view.dtype, _aten._reshape_alias.default})
# Operators that a compiler never fuses with others, so that their results lie in memory in any case.
_ALONE = frozenset(
    {
        _aten.mm,
        _aten.addmm,
        _aten.bmm,
        _aten.baddbmm,
        _aten.convolution,
        _aten.convolution_backward,
        _aten._scaled_dot_product_flash_attention_backward,
        _aten._scaled_dot_product_flash_attention_for_cpu_backward,
        _aten._scaled_dot_product_efficient_attention_backward,
        _aten._scaled_dot_product_cudnn_attention_backward,
        _aten.embedding_dense_backward,
    }
)


@dataclass(frozen=True, kw_only=True)
class Departures:
    """Changes of one program: the number of values that leave, and their bytes.

    `varying` is the number of values that stay in memory because their sizes vary from call to call.
    """

    values: int
    size_bytes: int
    varying: int


def let_leave(
    forward: fx.GraphModule, backward: fx.GraphModule, outputs: int, min_bytes: int = MIN_BYTES
) -> Departures:
    """Insert the operators into both graphs.

    The forward returns `outputs` values to its caller, and after them the values that it saves for the backward.
    """
    returned = forward.graph.find_nodes(op="output")[0]
    values = list(returned.args[0])
    shared = {base_of(each) for each in values[:outputs] if isinstance(each, fx.Node)}
    groups: dict[fx.Node, list[int]] = {}
    varying = 0
    for place, value in enumerate(values[outputs:], start=outputs):
        if not isinstance(value, fx.Node) or (base := base_of(value)).op != "call_function" or base in shared:
            continue
        if _varies(value) or _varies(base):
            varying += 1
        elif _may_leave(base, value, min_bytes):
            groups.setdefault(base, []).append(place)
    taken = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    for base, places in groups.items():
        handle = _insert_leave(forward.graph, base)
        for place in places:
            _insert_come_back(backward.graph, taken[values[place].name], base, values[place])
            values[place] = handle
    returned.update_arg(0, tuple(values))
    for each in (forward, backward):
        each.graph.lint()
        each.recompile()
    return Departures(values=len(groups), size_bytes=sum(map(_storage_bytes, groups)), varying=varying)


def base_of(node: fx.Node) -> fx.Node:
    """Return the node in whose memory a node's value lies: the node itself, unless it is a view."""
    while True:
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or node.op != "call_function":
            return node
        if is_view(node) or (_is_item(node) and is_view(source)):
            node = source
        else:
            return node


def is_view(node: fx.Node) -> bool:
    """Return True if a node computes only another view of its first argument."""
    operator = node.target
    return operator in _SILENT_VIEWS or (isinstance(operator, torch._ops.OpOverload) and operator.is_view)


def _is_item(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def _tensor(node: fx.Node) -> torch.Tensor | None:
    found = node.meta.get("val")
    return found if isinstance(found, torch.Tensor) else None


def _storage_bytes(node: fx.Node) -> int:
    found = _tensor(node)
    return 0 if found is None else found.untyped_storage().nbytes()


def _varies(node: fx.Node) -> bool:
    """Return True if a value's size is known only when the program runs."""
    found = _tensor(node)
    return found is not None and any(isinstance(each, torch.SymInt) for each in (*found.shape, *found.stride()))


def _may_leave(base: fx.Node, value: fx.Node, min_bytes: int) -> bool:
    whole, part = _tensor(base), _tensor(value)
    if whole is None or part is None or whole.layout is not torch.strided or part.layout is not torch.strided:
        return False
    if any(each.is_conj() or each.is_neg() or each.is_quantized for each in (whole, part)):
        return False
    is_plain = whole.numel() * whole.itemsize == whole.untyped_storage().nbytes() and whole.storage_offset() == 0
    return is_plain and whole.itemsize == part.itemsize and whole.untyped_storage().nbytes() >= min_bytes


def _users(node: fx.Node) -> Iterable[fx.Node]:
    """Yield all nodes that need a value's memory, also through views of it, except for the output node."""
    for user in node.users:
        if user.op == "output":
            continue
        yield user
        if is_view(user) or (_is_item(user) and is_view(node)):
            yield from _users(user)


def _insert_leave(graph: fx.Graph, base: fx.Node) -> fx.Node:
    place = {node: number for number, node in enumerate(graph.nodes)}
    last = max((base, *_users(base)), key=place.__getitem__)
    with graph.inserting_after(last):
        handle = graph.call_function(LEAVE, (base,))
    handle.meta["val"] = _fake_handle(base)
    base.meta[_LIES_IN_MEMORY] = True
    return handle


def _insert_come_back(graph: fx.Graph, taken: fx.Node, base: fx.Node, value: fx.Node) -> None:
    part, whole = value.meta["val"], base.meta["val"]
    nodes = list(graph.nodes)
    place = {node: number for number, node in enumerate(nodes)}
    users = [node for node in taken.users if node.op != "output"]
    first = min(users or graph.find_nodes(op="output"), key=place.__getitem__)
    before = _computed_before(nodes[: place[first]], users, taken)
    with graph.inserting_before(first):
        back = graph.call_function(COME_BACK, (taken, before, part.dtype, part.device, place_in(part, whole)))
    back.meta["val"] = part
    taken.replace_all_uses_with(back, delete_user_cb=lambda user: user is not back)
    taken.meta["val"] = _fake_handle(base)
    taken.meta.pop("tensor_meta", None)


def _computed_before(nodes: Sequence[fx.Node], users: Sequence[fx.Node], otherwise: fx.Node) -> fx.Node:
    """Return the last node on which all users depend in any case, or an incoming gradient if there is none."""
    common = set.intersection(*map(_ancestors, users)) if users else set()
    for node in reversed(nodes):
        if node in common and getattr(node.target, "overloadpacket", None) in _ALONE and _tensor(node) is not None:
            return node
    gradients = [node for node in nodes if node.op == "placeholder" and node.name.startswith("tangents")]
    return next((node for node in gradients if _tensor(node) is not None), otherwise)


def _ancestors(node: fx.Node) -> set[fx.Node]:
    found, left = set[fx.Node](), [node]
    while left:
        more = [each for each in left.pop().all_input_nodes if each not in found]
        found.update(more)
        left += more
    return found


def _fake_handle(base: fx.Node) -> torch.Tensor:
    mode = getattr(base.meta["val"], "fake_mode", None)
    if mode is None:
        return new_handle()
    with mode:
        return new_handle()
