"""Origins of tensors in a tracing pass: the block that made each, and the cuts that code between blocks forbids.

The home of a tensor that code between blocks makes is the latest block that went into it: the member with that block
runs this code on real tensors. No member may begin between the home and code that uses the tensor later.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from elastrain.errors import ConfigError
from elastrain.pipeline.graph import IllegalCut
from elastrain.pipeline.stubs.draws import NO_VALUES, OtherDraws, TracedDraws
from elastrain.pipeline.stubs.fakes import NOT_HERE
from elastrain.pipeline.stubs.naming import is_fake
from elastrain.pipeline.stubs.saved_bytes import storage_of
from elastrain.pipeline.stubs.uses import ParameterUses

_NOWHERE = -1
_BY_FORWARD = "behind block {} others are called by their forward, not as modules, and draw the numbers behind its own"


class Origins:
    """The numbers and homes of tensors, and the illegal cuts. Places are those of the block graph."""

    def __init__(self, model: nn.Module, blocks: Sequence[str]) -> None:
        self.latest = _NOWHERE
        """The deepest block that was entered so far."""
        self.at = _NOWHERE
        """The block that was entered last."""
        self.shapes: dict[int, Tensor] = {}
        """Tensors by number. They are kept during the pass, so that no other tensor gets the same id."""
        self.home: dict[int, int] = {}
        """Number of a tensor -> place of its home block."""
        self._order: list[str] = []
        self._numbers: dict[int, int] = {}
        self._inside: dict[int, tuple[weakref.ref[Tensor], int, bool]] = {}
        """By id: a tensor that a block made and did not return, the block's place, and True if it depends on
        activations, parameters or random numbers.
        """
        self._given: dict[int, object] = {}
        """By id: the activations that the last entered block was given."""
        self._written: dict[int, tuple[Tensor, int]] = {}
        """By storage: a real tensor into which activations were written, and its home since then."""
        self._illegal: dict[int, str] = {}
        """Cut -> reason. Key 0 stands for all cuts."""
        self.parameters = ParameterUses(model, blocks)

    def enter(self, at: int, name: str) -> None:
        """Note that the forward enters a block. Entering one again forbids the cuts in between."""
        if at < len(self._order):
            self._forbid(at, self.latest, f"block {name!r} is entered again behind it")
        else:
            self._order.append(name)
        self.latest, self.at = max(self.latest, at), at

    def takes(self, at: int, arguments: Sequence[object]) -> None:
        """Note that a block is entered with these tensors, or uses them."""
        self.parameters.used([each for each in arguments if isinstance(each, Tensor)], at)
        # Homes of real tensors are known only if other members draw other numbers or lack the activations written into
        # them.
        for home in self.homes_of_own(arguments):
            why = "takes random numbers that are drawn before it, or what activations are written into"
            self._forbid(home, at, f"block {self._order[at]!r} {why}")

    def hooked(self, at: int, tensors: Sequence[Tensor]) -> None:
        """Note that the block has a hook on the gradients of these arguments."""
        for home in self.homes(tensors):
            self._forbid(home, at, f"block {self._order[at]!r} has a hook on the gradient of what it is given")

    def number(self, tensor: Tensor) -> int:
        """Return the tensor's number. The home of a new tensor is the latest block, or the block that kept it."""
        number = self._numbers.get(id(tensor))
        if number is not None:
            return number
        kept_at = self._place_inside(tensor)
        return self._register(tensor, max(self.latest, 0) if kept_at is None else kept_at)

    def returned(self, at: int, leaves: Sequence[object]) -> dict[int, int]:
        """Note the results of a block. Returns index of a tensor -> its number."""
        return {index: self._register(leaf, at) for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}

    def given(self, leaves: Sequence[object]) -> None:
        """Note the activations that the last entered block is given."""
        self._given = {id(leaf): leaf for leaf in leaves}

    def made_inside(self, taken: Sequence[Tensor], made: Sequence[Tensor], *, has_drawn: bool) -> None:
        """Note tensors that a block made inside. Later code or blocks may find them in an attribute or a hook."""
        is_own = has_drawn
        for tensor in taken:
            _, at, its = self._made_at(tensor)
            homes = [at] * its + [self.home[number] for number in [self._numbers.get(id(tensor))] if number is not None]
            is_own |= its or id(tensor) in self._given or isinstance(tensor, nn.Parameter)
            for home in homes if id(tensor) not in self._given else ():
                self._forbid(
                    home, self.at, f"block {self._order[self.at]!r} uses what block {self._order[home]!r} keeps"
                )
        for tensor in made:
            if not any(tensor is each for each in taken):
                self._inside[id(tensor)] = weakref.ref(tensor), self.at, is_own

    def _made_at(self, tensor: Tensor) -> tuple[bool, int, bool]:
        """Return (True if a block made the tensor, its place, True if only members with that block have the values)."""
        made, at, is_own = self._inside.get(id(tensor), (None, _NOWHERE, False))
        return (True, at, is_own) if made is not None and made() is tensor else (False, _NOWHERE, False)

    def changed(self, tensors: Sequence[Tensor]) -> None:
        """Note arguments that the last entered block has changed in place."""
        for storage in map(storage_of, tensors):
            alike = [number for number, other in self.shapes.items() if storage_of(other) == storage]
            if len(alike) > 1:
                first = min(self.home[number] for number in alike)
                why = "changes in place what it is given, whose memory another tensor has, too"
                self._forbid(first, self.at, f"block {self._order[self.at]!r} {why}")

    def _place_inside(self, tensor: Tensor) -> int | None:
        """Return the place of the block that made the tensor and did not return it, or None if no block is known."""
        is_known, at, _ = self._made_at(tensor)
        if is_known:
            return at
        # Only blocks make fakes. A fake whose making was not seen is attributed to the first block.
        return 0 if is_fake(tensor) and self.latest != _NOWHERE else None

    def written(self, tensors: Iterable[Tensor], homes: Sequence[int]) -> None:
        """Note that values which only members with the blocks `homes` have were written into these real tensors."""
        self._written |= {storage_of(tensor): (tensor, max(homes)) for tensor in tensors if homes}

    def made_between(self, operation: str, taken: Sequence[Tensor], made: Sequence[Tensor], *, is_own: bool) -> None:
        """Note that code between blocks took some tensors and made others.

        `is_own`: only this member draws these numbers.
        """
        homes = self.homes(taken) + [self.latest] * is_own
        for place in [self._place_inside(tensor) for tensor in taken if id(tensor) not in self._numbers]:
            if place is not None:
                whose = self._order[place]
                self._illegal[0] = f"{operation!r} takes what block {whose!r} has kept beside what it returned"
                homes.append(place)
        for home in homes:
            if home < self.latest:
                self._forbid(home, self.latest, f"{operation!r} behind it uses what block {self._order[home]!r} made")
        if homes:
            is_real = not any(is_fake(tensor) for tensor in taken)
            for tensor in made:
                if is_fake(tensor) or is_real:
                    self._register(tensor, max(homes))

    def illegal(self, neighbours: Mapping[str, str]) -> tuple[IllegalCut, ...]:
        """Return the illegal cuts. `neighbours`: a block that was never entered -> the block that it stays with."""
        for first, last, why in self.parameters.together(self._order, neighbours):
            self._forbid(first, last, why)
        # Every member runs that code, even one without the block, where the code finds nothing.
        if 0 in self._illegal:
            self._illegal = dict.fromkeys(range(1, len(self._order)), self._illegal[0])
        return tuple(IllegalCut(cut=cut, why=why) for cut, why in sorted(self._illegal.items()))

    def homes_of_own(self, tensors: Sequence[object]) -> list[int]:
        """Return the homes of real tensors with values that other members lack.

        These are random numbers that only some members draw, tensors into which activations were written, and tensors
        that blocks have kept.
        """
        own = [each for each in tensors if isinstance(each, Tensor) and not is_fake(each)]
        return self.homes(own) + [place for each in own if (place := self._place_inside(each)) is not None]

    def homes(self, tensors: Sequence[Tensor]) -> list[int]:
        """Return the known homes of tensors."""
        homes = [self.home[self._numbers[id(tensor)]] for tensor in tensors if id(tensor) in self._numbers]
        found = [self._written.get(storage_of(tensor)) for tensor in tensors if self._written and not is_fake(tensor)]
        return homes + [each[1] for each in found if each is not None]

    def keep_together(self, first: int, last: int, why: str) -> None:
        """Forbid all cuts behind the first block and up to the last one. `{}` in `why` is the first block's name."""
        self._forbid(first, last, why.format(repr(self._order[first])))

    def _forbid(self, first: int, last: int, why: str) -> None:
        for cut in range(first + 1, last + 1):
            self._illegal.setdefault(cut, why)

    def _register(self, tensor: Tensor, home: int) -> int:
        number = self._numbers.get(id(tensor))
        if number is None:
            number = self._numbers[id(tensor)] = len(self.shapes)
            self.shapes[number] = tensor
            self.home[number] = home
        else:
            # The tensor was changed in place by later code, so its home moves further behind.
            self.home[number] = max(home, self.home[number])
        return number


class CodeBetween(TorchFunctionMode):
    """A mode that sees every operation of the forward, and tells `Origins` what code between blocks does."""

    def __init__(self, origins: Origins) -> None:
        super().__init__()
        self._origins = origins
        self._draws = OtherDraws()
        self._is_paused = False
        self._is_inside = False
        self._is_ahead = False
        """True if members that compute the last entered block have drawn numbers, in it or for activations, that others
        have not.
        """
        self.called: list[str] = []
        """The block being called as a module, whose hooks set its random stream. Empty for a call of `forward`."""
        self._stream = _NOWHERE  # the block whose random stream is drawn from

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Ignore operations in the body: they are not the user's code."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def enter(self, at: int, name: str, arguments: Sequence[object]) -> None:
        """Note that the forward enters the block `name` at place `at`."""
        self._draws.look(self._origins.at, is_inside=False)
        self._origins.enter(at, name)
        self._origins.takes(at, arguments)
        if name in self.called:
            self._stream, self._is_ahead = at, False
        self.called.clear()

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Treat the body as the inside of a block: only its uses of parameters and its results matter."""
        before, self._is_paused, self._is_inside = self._is_paused, False, True
        try:
            yield
        finally:
            self._is_paused, self._is_inside = before, False
            self._draws.look(self._origins.at, is_inside=True)

    def reads(self) -> None:
        """Note that the block that runs returns or keeps numbers that it has read from values."""
        self._draws.read([self._origins.at])

    def finish(self, blocks: int) -> TracedDraws:
        """End the forward. Returns the places where it drew random numbers."""
        self._draws.look(self._origins.at, is_inside=False)
        for first, last, why in self._draws.together(blocks - 1):
            self._origins.keep_together(first, last, why)
        return self._draws.traced

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_paused:
            return func(*args, **kwargs)
        taken = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        written = writes(taken)
        with _SeenDraws() as seen, _read_as_ours(func):  # type: ignore[no-untyped-call]
            returned = func(*args, **kwargs)
        made = [leaf for leaf in tree_flatten(returned)[0] if isinstance(leaf, Tensor)]
        name = getattr(func, "__name__", str(func))
        if not made and not self._is_inside and name not in NO_VALUES:
            self._draws.read([] if written() else self._origins.homes_of_own(taken))
            self._origins.parameters.read(taken, self._origins.latest)
        if self._is_inside and name == "register_hook":
            self._origins.hooked(self._origins.at, taken)
        if made or written():
            is_real = not self._is_inside and not any(is_fake(tensor) for tensor in (*taken, *made))
            if self._is_inside:
                self._origins.takes(self._origins.at, taken)
                self._origins.made_inside(taken, made, has_drawn=seen.has_drawn)
                if seen.has_drawn:
                    self._origins.keep_together(max(self._stream, 0), self._origins.at, _BY_FORWARD)
            else:
                is_own = seen.has_drawn and self._is_ahead and is_real
                if seen.has_drawn:
                    self._draws.draw(self._origins.at, is_own=self._is_ahead or not is_real, is_real=is_real)
                self._origins.made_between(name, taken, made, is_own=is_own)
                self._origins.parameters.made_between(name, taken, made, self._origins.latest)
            self._origins.written(written(), [self._origins.at] if self._is_inside else self._origins.homes(taken))
            self._is_ahead |= seen.has_drawn and not is_real
        return returned


@contextlib.contextmanager
def _read_as_ours(func: Any) -> Iterator[None]:
    """Replace torch's error for a fake without values, such as one in a list, by a ConfigError."""
    try:
        yield
    except RuntimeError as error:
        if "not allocated yet" not in str(error):
            raise
        raise ConfigError(f"torch.{func.__name__} looks at {NOT_HERE}") from None


def writes(tensors: Sequence[object]) -> Callable[[], list[Tensor]]:
    """Return a function that lists the real tensors among these that were written into since this call."""
    real = [each for each in tensors if isinstance(each, Tensor) and not is_fake(each) and not each.is_inference()]
    versions = [each._version for each in real]
    return lambda: [each for each, version in zip(real, versions, strict=True) if each._version != version]


class _SeenDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """A mode that notes if an operation draws from a generator that the script did not pass, even on fakes."""

    has_drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            its = {each.name: each.default_value for each in func._schema.arguments}
            its |= {**dict(zip(its, args, strict=False)), **kwargs}
            # Attention and the recurrent layers of a device have the tag even without dropout.
            has_none = 0.0 in (its.get("dropout_p"), its.get("dropout"))
            self.has_drawn |= its.get("generator") is None and not has_none
        return func(*args, **kwargs)
