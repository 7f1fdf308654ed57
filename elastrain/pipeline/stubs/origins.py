"""Where tensors of a tracing pass come from: by which block, and what code between blocks does with them.

A tensor that code between blocks makes lives with the latest block that went into it: the member that has that block
runs this code on real tensors. So no member may begin between that block and code that uses the tensor later.
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
    """Numbers of tensors, the block that each lives with, and the illegal cuts. Places are those of the graph."""

    def __init__(self, model: nn.Module, blocks: Sequence[str]) -> None:
        self.latest = _NOWHERE
        """The deepest block that was entered so far."""
        self.at = _NOWHERE
        """The block that was entered last."""
        self.shapes: dict[int, Tensor] = {}
        """By number. Kept as long as the pass lasts: else another tensor could get the address of one that is gone."""
        self.home: dict[int, int] = {}
        """Number -> the place of the block that the tensor lives with."""
        self._order: list[str] = []
        self._numbers: dict[int, int] = {}
        self._inside: dict[int, tuple[weakref.ref[Tensor], int, bool]] = {}
        """By id: a tensor that a block has made and not returned, the block's place, and whether it is of activations,
        parameters or random numbers.
        """
        self._given: dict[int, object] = {}
        """By id: the activations that the block was given that was entered last."""
        self._written: dict[int, tuple[Tensor, int]] = {}
        """By storage: a real tensor into which activations were written, and the block that it lives with from then."""
        self._illegal: dict[int, str] = {}
        """Cut -> why; 0 stands for all of them."""
        self.parameters = ParameterUses(model, blocks)

    def enter(self, at: int, name: str) -> None:
        if at < len(self._order):
            self._forbid(at, self.latest, f"block {name!r} is entered again behind it")
        else:
            self._order.append(name)
        self.latest, self.at = max(self.latest, at), at

    def takes(self, at: int, arguments: Sequence[object]) -> None:
        """A block is entered with these, or uses them."""
        self.parameters.used([each for each in arguments if isinstance(each, Tensor)], at)
        # Real ones are known only where others draw other random numbers, or have no activations to write into them.
        for home in self.homes_of_own(arguments):
            why = "takes random numbers that are drawn before it, or what activations are written into"
            self._forbid(home, at, f"block {self._order[at]!r} {why}")

    def hooked(self, at: int, tensors: Sequence[Tensor]) -> None:
        """The block is told of gradients of these, which it was given."""
        for home in self.homes(tensors):
            self._forbid(home, at, f"block {self._order[at]!r} has a hook on the gradient of what it is given")

    def number(self, tensor: Tensor) -> int:
        """The tensor's number; a new one lives with the latest block."""
        number = self._numbers.get(id(tensor))
        if number is not None:
            return number
        kept_at = self._place_inside(tensor)
        return self._register(tensor, max(self.latest, 0) if kept_at is None else kept_at)

    def returned(self, at: int, leaves: Sequence[object]) -> dict[int, int]:
        """A block has made these. By index of a tensor its number."""
        return {index: self._register(leaf, at) for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}

    def given(self, leaves: Sequence[object]) -> None:
        """The block that was entered last is given these activations."""
        self._given = {id(leaf): leaf for leaf in leaves}

    def made_inside(self, taken: Sequence[Tensor], made: Sequence[Tensor], *, has_drawn: bool) -> None:
        """A block has made these, which code behind it may find in an attribute or a hook, and so may another block."""
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
        """Whether a block is known to have made the tensor; which, and whether nobody else could."""
        made, at, is_own = self._inside.get(id(tensor), (None, _NOWHERE, False))
        return (True, at, is_own) if made is not None and made() is tensor else (False, _NOWHERE, False)

    def changed(self, tensors: Sequence[Tensor]) -> None:
        """The block that was entered last has changed these in place, which it was given."""
        for storage in map(storage_of, tensors):
            alike = [number for number, other in self.shapes.items() if storage_of(other) == storage]
            if len(alike) > 1:
                first = min(self.home[number] for number in alike)
                why = "changes in place what it is given, whose memory another tensor has, too"
                self._forbid(first, self.at, f"block {self._order[self.at]!r} {why}")

    def _place_inside(self, tensor: Tensor) -> int | None:
        """The block that has made the tensor and not returned it, as far as is known."""
        is_known, at, _ = self._made_at(tensor)
        if is_known:
            return at
        # A fake is always a block's: of one that nobody saw being made the first block may be it.
        return 0 if is_fake(tensor) and self.latest != _NOWHERE else None

    def written(self, tensors: Iterable[Tensor], homes: Sequence[int]) -> None:
        """Into these real tensors went what only the members have that compute the blocks at `homes`."""
        self._written |= {storage_of(tensor): (tensor, max(homes)) for tensor in tensors if homes}

    def made_between(self, operation: str, taken: Sequence[Tensor], made: Sequence[Tensor], *, is_own: bool) -> None:
        """Code between blocks took these tensors and made those. `is_own`: random ones, as only this member draws."""
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
        """`neighbours`: a block that was never entered -> the one that it goes with."""
        for first, last, why in self.parameters.together(self._order, neighbours):
            self._forbid(first, last, why)
        # Every member runs that code, also one that has no such block and so finds nothing.
        if 0 in self._illegal:
            self._illegal = dict.fromkeys(range(1, len(self._order)), self._illegal[0])
        return tuple(IllegalCut(cut=cut, why=why) for cut, why in sorted(self._illegal.items()))

    def homes_of_own(self, tensors: Sequence[object]) -> list[int]:
        """Those of real tensors: of random ones as only this member draws, of what activations are written into, and
        of what blocks have kept.
        """
        own = [each for each in tensors if isinstance(each, Tensor) and not is_fake(each)]
        return self.homes(own) + [place for each in own if (place := self._place_inside(each)) is not None]

    def homes(self, tensors: Sequence[Tensor]) -> list[int]:
        """The blocks that tensors live with, as far as they are known."""
        homes = [self.home[self._numbers[id(tensor)]] for tensor in tensors if id(tensor) in self._numbers]
        found = [self._written.get(storage_of(tensor)) for tensor in tensors if self._written and not is_fake(tensor)]
        return homes + [each[1] for each in found if each is not None]

    def keep_together(self, first: int, last: int, why: str) -> None:
        """Nobody may begin behind the first block and up to the last one. `{}` in `why` is the first one's name."""
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
            # Changed in place by later code: from there on it lives further behind.
            self.home[number] = max(home, self.home[number])
        return number


class CodeBetween(TorchFunctionMode):
    """Sees every operation of the forward while it is entered, and tells `Origins` what code between blocks does."""

    def __init__(self, origins: Origins) -> None:
        super().__init__()
        self._origins = origins
        self._draws = OtherDraws()
        self._is_paused = False
        self._is_inside = False
        self._is_ahead = False
        """Who computes the block that was entered last has drawn what others have not: in it, or for fakes."""
        self.called: list[str] = []
        """The block that is called as a module, with the hooks that set its random stream: not by its `forward`."""
        self._stream = _NOWHERE  # the block whose random stream is drawn from

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing in here is the user's code."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def enter(self, at: int, name: str, arguments: Sequence[object]) -> None:
        self._draws.look(self._origins.at, is_inside=False)
        self._origins.enter(at, name)
        self._origins.takes(at, arguments)
        if name in self.called:
            self._stream, self._is_ahead = at, False
        self.called.clear()

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """In here a block runs: what it does with activations is its own, which parameters it uses is not."""
        before, self._is_paused, self._is_inside = self._is_paused, False, True
        try:
            yield
        finally:
            self._is_paused, self._is_inside = before, False
            self._draws.look(self._origins.at, is_inside=True)

    def reads(self) -> None:
        """The block that runs hands on, or keeps, numbers that it has read from values."""
        self._draws.read([self._origins.at])

    def finish(self, blocks: int) -> TracedDraws:
        """The forward is over; where it drew."""
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
    """Our sentence where torch says that a fake among other things, as in a list, has no values."""
    try:
        yield
    except RuntimeError as error:
        if "not allocated yet" not in str(error):
            raise
        raise ConfigError(f"torch.{func.__name__} looks at {NOT_HERE}") from None


def writes(tensors: Sequence[object]) -> Callable[[], list[Tensor]]:
    """Says which of them are real, and have been written into since."""
    real = [each for each in tensors if isinstance(each, Tensor) and not is_fake(each) and not each.is_inference()]
    versions = [each._version for each in real]
    return lambda: [each for each, version in zip(real, versions, strict=True) if each._version != version]


class _SeenDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """Notes whether an operation draws from a generator that the script has not given, on fakes, too."""

    has_drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            its = {each.name: each.default_value for each in func._schema.arguments}
            its |= {**dict(zip(its, args, strict=False)), **kwargs}
            # Attention has the tag without dropout, too.
            self.has_drawn |= its.get("generator") is None and its.get("dropout_p") != 0.0
        return func(*args, **kwargs)
