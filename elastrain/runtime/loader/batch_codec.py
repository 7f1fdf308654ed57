"""A codec between objects and plain data: a tree of numbers, texts and lists, with the bytes of tensors beside it.

Containers, tensors, arrays and numbers have their own tags. Any other object is encoded as its class name, its content
(if it is a kind of tuple, list, dict, set, text or number) and its attributes. Decoding calls nothing that the class
defines, and only uses classes that the process has already imported, so a tree cannot run code. Objects with hidden
state (files, locks, functions) and objects that refer to themselves are refused.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Tree = Any
"""A value that MessagePack can encode. A list is always `[tag, …]`."""
_ARRAY_KINDS = "biufcSUmM"
_AS_THEY_ARE = (bool, float, str, bytes, type(None))
# The content of these is encoded; a class may be derived from one of them, or from none.
_BASES: tuple[type, ...] = (OrderedDict, dict, list, tuple, set, frozenset, str, int, float, bytes)
_MISSING = object()


class Describer:
    """The encoder of one object. `buffers` collects the bytes of its tensors. Raises TypeError for non-data."""

    Of a tensor the content travels, never the rest of its storage. Tensors that share memory do not share it
    afterwards; one tensor in two places stays one. Raises ConfigError for what cannot be pickled, with its place, such
    as `batch['x'][0]`.
    """
    try:
        return _pickled(batch)
    except Exception as error:
        place, cause = _culprit(batch, error)
        raise ConfigError(
            f"batch{place}: {str(cause).rstrip('.')}; a loader process cannot hand this over: return tensors, NumPy "
            "arrays, numbers, texts, containers and plain objects of them, or use num_workers=0"
        ) from error

    def describe(self, thing: Any) -> Tree:
        """Return the tree of an object."""
        kind = type(thing)
        if kind in _AS_THEY_ARE:
            return thing
        if kind is int:
            return thing if -(1 << 63) <= thing < 1 << 64 else ["int", str(thing)]
        if id(thing) in self._under_way:
            raise _refusal(thing, "that refers to itself")
        if id(thing) in self._known:
            return ["again", self._known[id(thing)]]
        self._known[id(thing)] = len(self._kept)
        self._kept.append(thing)
        self._under_way.add(id(thing))
        tree = self._tagged(thing)
        self._under_way.discard(id(thing))
        return tree

    def way(self) -> list[Any]:
        """Return the objects being encoded, from the whole to the one that was refused."""
        return [each for each in self._kept if id(each) in self._under_way]


class _Pickler(pickle.Pickler):
    def reducer_override(self, thing: Any) -> Any:
        """Return how a tensor in host memory is made again; everything else is pickled by its own rules."""
        if not isinstance(thing, Tensor) or isinstance(thing, torch.nn.Parameter):
            return NotImplemented
        if thing.requires_grad and not thing.is_leaf:
            raise RuntimeError("a tensor with autograd's history: detach() it in the dataset or collate_fn")
        is_wrapper = type(thing).__torch_dispatch__ is not Tensor.__torch_dispatch__
        is_dense = thing.layout is torch.strided and not thing.is_nested and not thing.is_quantized
        if is_wrapper or not is_dense or thing.device.type != "cpu":
            return NotImplemented
        bare = thing.detach().as_subclass(Tensor).resolve_conj().resolve_neg()
        if not bare.is_contiguous():
            bare = bare.clone()
        flat = bare.as_strided((bare.numel(),), (1,)).view(torch.uint8).numpy()
        how = (bare.dtype, tuple(bare.shape), bare.stride(), thing.requires_grad)
        kind = () if type(thing) is Tensor and not thing.__dict__ else (type(thing), dict(thing.__dict__))
        return _tensor, (pickle.PickleBuffer(flat.data), *how, *kind)


def _pickled(thing: Any) -> tuple[bytes, list[memoryview]]:
    file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(file, protocol=5, buffer_callback=buffers.append).dump(thing)
    return file.getvalue(), [buffer.raw() for buffer in buffers]


def _culprit(thing: Any, error: Exception) -> tuple[str, Exception]:
    """Return the place of the innermost part that cannot be pickled, and the error that it ends with."""
    for key, part in _parts(thing):
        try:
            bare = self._bare(tensor.as_subclass(Tensor))
        except (TypeError, NotImplementedError):  # the class overrides what a tensor does itself
            raise _refusal(tensor) from None
        return ["subclass", _name_of(type(tensor)), bare, self.describe(dict(tensor.__dict__))]

    def _bare(self, tensor: Tensor) -> Tree:
        if tensor.is_nested:
            raise _refusal(tensor, "that is nested")
        if not tensor.is_leaf:
            raise RuntimeError(
                "a tensor with autograd's history cannot leave its process: detach() it in the dataset or collate_fn"
            )
        if tensor.layout is torch.sparse_coo:
            parts = self._items([tensor._indices(), tensor._values()])
            return ["coo", *parts, list(tensor.shape), tensor.is_coalesced()]
        if tensor.layout is torch.sparse_csr:
            parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values(), tensor.shape]
            return ["csr", *self._items(parts)]
        how = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        if tensor.is_meta:
            return ["meta", *how]
        if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
            raise _refusal(tensor, f"{tensor.layout}, {tensor.dtype} on {tensor.device}")
        content = tensor.detach().resolve_conj().resolve_neg()
        if not content.is_contiguous():
            content = content.clone()
        flat = content.as_strided((content.numel(),), (1,)).view(torch.uint8).numpy().data
        return ["tensor", self._beside(flat), *how, list(content.stride()), tensor.requires_grad]

    def _array(self, array: np.ndarray[Any, Any]) -> Tree:
        if array.dtype.kind not in _ARRAY_KINDS:
            raise _refusal(array, f"of {array.dtype}")
        by_columns = array.flags.f_contiguous and not array.flags.c_contiguous
        rows = array.T if by_columns else np.ascontiguousarray(array).reshape(array.shape)
        content = rows.reshape(-1).view(np.uint8).data if rows.size else memoryview(b"")
        shape, writable = list(array.shape), bool(array.flags.writeable)
        return ["array", self._beside(content), array.dtype.str, shape, by_columns, writable]

    def _object(self, thing: Any) -> Tree:
        kind = type(thing)
        if isinstance(thing, np.generic):
            return ["scalar", self._array(np.asarray(thing))]
        if isinstance(thing, enum.Enum):
            is_named = thing.name in kind.__members__
            return ["member", _name_of(kind), thing.name if is_named else thing.value]
        if isinstance(thing, type):
            return ["class", _name_of(thing)]
        base = _base_of(kind)
        try:
            _made(kind, base, _content(base, ()))
        except TypeError:
            raise _refusal(thing) from None
        content = self.describe(_content(base, thing)) if base is not object else None
        return ["object", _name_of(kind), content, self.describe(_attributes(thing))]


def _attributes(thing: Any) -> dict[str, Any]:
    """Return the attributes in the object's dictionary and in its slots."""
    slots = [name for kind in type(thing).__mro__ for name in _slots_of(kind)]
    in_slots = {name: value for name in slots if (value := getattr(thing, name, _MISSING)) is not _MISSING}
    if isinstance(thing, defaultdict):
        in_slots["default_factory"] = thing.default_factory
    return {**in_slots, **getattr(thing, "__dict__", {})}


def _slots_of(kind: type) -> Sequence[str]:
    named = kind.__dict__.get("__slots__", ())
    names = (named,) if isinstance(named, str) else tuple(named)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _refusal(thing: Any, more: str = "") -> TypeError:
    kind = type(thing)
    return TypeError(
        f"a {kind.__module__}.{kind.__qualname__} {more}".rstrip()
        + " cannot be handed over by a loader process: return "
        "tensors, NumPy arrays, numbers, texts, tuples, lists, dicts and plain objects of them, or use num_workers=0"
    )


_PLAIN: dict[type, Callable[[Describer, Any], Tree]] = {
    list: lambda d, thing: ["list", *d._items(thing)],
    tuple: lambda d, thing: ["tuple", *d._items(thing)],
    set: lambda d, thing: ["set", *d._items(list(thing))],
    frozenset: lambda d, thing: ["frozenset", *d._items(list(thing))],
    dict: lambda d, thing: ["dict", *d._items([each for pair in thing.items() for each in pair])],
    complex: lambda _, thing: ["complex", thing.real, thing.imag],
    bytearray: lambda _, thing: ["bytearray", bytes(thing)],
    slice: lambda d, thing: ["slice", *d._items([thing.start, thing.stop, thing.step])],
    range: lambda _, thing: ["range", thing.start, thing.stop, thing.step],
    torch.Size: lambda _, thing: ["size", *thing],
    torch.dtype: lambda _, thing: ["dtype", str(thing).removeprefix("torch.")],
    torch.device: lambda _, thing: ["device", str(thing)],
    np.ndarray: lambda d, thing: d._array(thing),
}


def _name_of(kind: type) -> list[str]:
    name = [kind.__module__, kind.__qualname__]
    if _find(name) is not kind:
        raise TypeError(f"the class {'.'.join(name)} cannot be found by its name: define it at the top of a module")
    return name


def _find(name: Sequence[str]) -> type | None:
    """Find a class in a module that is already imported; nothing is imported here."""
    found: Any = sys.modules.get(name[0])
    for part in name[1].split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) else None


def _class_of(name: Sequence[str]) -> type:
    kind = _find(name)
    if kind is None:
        raise ValueError(
            f"the class {'.'.join(name)} is not known in the training process: import its module there, too"
        )
    return kind


def _base_of(kind: type) -> type:
    return next((base for base in _BASES if issubclass(kind, base)), object)


def _content(base: type, thing: Any) -> Any:
    """Return the content of an object of kind `base` as a plain `base`."""
    if base is object:
        return None
    return dict(thing) if base is OrderedDict else base(thing)


def _made(kind: type, base: Any, content: Any) -> Any:
    """Make an object without calling its class. Raises TypeError if its kind has state that Python does not show."""
    if base in (tuple, frozenset, str, int, float, bytes):
        return base.__new__(kind, content)
    made = base.__new__(kind)
    if base in (list, dict, OrderedDict, set):
        base.__init__(made, content)
    return made


class Restorer:
    """The decoder of a tree. Tensors and arrays of the result are views of the buffers."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._buffers = buffers
        self._known: list[Any] = []

    def restore(self, tree: Tree) -> Any:
        """Return the object. Raises ValueError if the tree is invalid or names an unknown class."""
        try:
            return self._restore(tree)
        except (TypeError, AttributeError, KeyError, IndexError, RuntimeError, OverflowError, RecursionError) as error:
            raise ValueError(f"what a loader process has handed over cannot be read ({error})") from error

    def _restore(self, tree: Tree) -> Any:
        if not isinstance(tree, list):
            return tree
        tag, *told = tree
        if tag == "again":
            if self._known[told[0]] is _MISSING:
                raise ValueError("a thing that refers to itself")
            return self._known[told[0]]
        if tag == "int":
            return int(told[0])
        place = len(self._known)
        self._known.append(_MISSING)
        self._known[place] = made = _MAKERS[tag](self, *told)
        return made

    def _all(self, trees: Sequence[Tree]) -> list[Any]:
        return [self._restore(each) for each in trees]

    def _pairs(self, trees: Sequence[Tree]) -> dict[Any, Any]:
        flat = self._all(trees)
        return dict(zip(flat[::2], flat[1::2], strict=True))

    def _tensor(self, at: int, dtype: str, shape: list[int], strides: list[int], requires_grad: bool) -> Tensor:
        """Make a tensor that autograd does not regard as a view, as the original was none."""
        buffer, kind = self._buffers[at], _dtype(dtype)
        if not len(buffer):
            if math.prod(shape):
                raise ValueError(f"a tensor of shape {shape} without content")
            return torch.empty_strided(shape, strides, dtype=kind, requires_grad=requires_grad)
        storage = torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
        return torch.empty(0, dtype=kind).set_(storage, 0, shape, strides).requires_grad_(requires_grad)

    def _array(self, at: int, dtype: str, shape: list[int], by_columns: bool, writable: bool) -> np.ndarray[Any, Any]:
        kind = np.dtype(dtype)
        if kind.kind not in _ARRAY_KINDS:
            raise ValueError(f"arrays of {kind} are not handed over")
        flat = np.frombuffer(self._buffers[at], dtype=kind) if len(self._buffers[at]) else np.empty(0, kind)
        array = flat.reshape(shape[::-1]).T if by_columns else flat.reshape(shape)
        array.flags.writeable = writable
        return array

    def _subclass(self, name: list[str], bare: Tree, attributes: Tree) -> Tensor:
        kind = _class_of(name)
        if not issubclass(kind, Tensor):
            raise ValueError(f"{name[1]} is no kind of tensor")
        made: Tensor = self._bare(bare).as_subclass(kind)
        made.__dict__.update(self._restore(attributes))
        return made

    def _bare(self, tree: Tree) -> Tensor:
        """Return a tensor that gets no number of its own, because its owner has one."""
        tensor: Tensor = _MAKERS[tree[0]](self, *tree[1:])
        return tensor

    def _coo(self, indices: Tree, values: Tree, shape: list[int], coalesced: bool) -> Tensor:
        made = torch.sparse_coo_tensor(self._restore(indices), self._restore(values), shape, check_invariants=True)
        return made._coalesced_(coalesced)

    def _object(self, name: list[str], content: Tree, attributes: Tree) -> Any:
        kind = _class_of(name)
        base = _base_of(kind)
        made = _made(kind, base, self._restore(content))
        for attribute, value in self._restore(attributes).items():
            object.__setattr__(made, attribute, value)
        return made


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch.{name} is no dtype")
    return found


def _csr(rows: Tensor, columns: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    return torch.sparse_csr_tensor(rows, columns, values, size=shape, check_invariants=True)


def _member(name: list[str], value: str | int) -> Any:
    """Return an enumeration member by its name, or combined flags by their value."""
    kind = _class_of(name)
    if not issubclass(kind, enum.Enum):
        raise ValueError(f"{name[1]} is no enumeration")
    if isinstance(value, int):
        return enum.Flag._missing_.__func__(kind, value)  # type: ignore[attr-defined]  # not what the class may define
    return kind.__members__[value]


_MAKERS: dict[str, Callable[..., Any]] = {
    "list": lambda r, *items: r._all(items),
    "tuple": lambda r, *items: tuple(r._all(items)),
    "set": lambda r, *items: set(r._all(items)),
    "frozenset": lambda r, *items: frozenset(r._all(items)),
    "dict": lambda r, *items: r._pairs(items),
    "complex": lambda _, real, imaginary: complex(real, imaginary),
    "bytearray": lambda _, content: bytearray(content),
    "slice": lambda r, *items: slice(*r._all(items)),
    "range": lambda _, *items: range(*items),
    "size": lambda _, *items: torch.Size(items),
    "dtype": lambda _, name: _dtype(name),
    "device": lambda _, name: torch.device(name),
    "tensor": Restorer._tensor,
    "parameter": lambda r, bare, wants: torch.nn.Parameter(r._bare(bare), requires_grad=wants),
    "subclass": Restorer._subclass,
    "coo": Restorer._coo,
    "csr": lambda r, *told: _csr(*r._all(told)),
    "meta": lambda _, dtype, shape: torch.empty(shape, dtype=_dtype(dtype), device="meta"),
    "array": Restorer._array,
    "scalar": lambda r, array: r._array(*array[1:])[()],
    "member": lambda _, name, value: _member(name, value),
    "class": lambda _, name: _class_of(name),
    "object": Restorer._object,
}
