"""Changes that a training loop makes in the model's modules: train and eval, freezing, a dropout's p, a switch.

Newcomers and resumed jobs get these changes, because their loops did not run the earlier steps. Changes that a forward
makes by itself, such as the length of a cache, are not sent. A number that counts micro-batches is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from elastrain.errors import ConfigError
from elastrain.offload.original_hooks import OriginalsHook
from elastrain.runtime.loop_state.loop_state_codec import Packer, Tree, unpack
from elastrain.runtime.model.watched import MISSING, PlainAttributes, sums_of

Changes = dict[str, Tree]
"""`path.attribute` -> the value that the loop gave it, as a JSON tree (see `loop_state_codec`)."""
_LOOP, _BODY, _FORWARD = "the loop", "the loop, among its micro-batches,", "the forward"
_COUNTED = 3
"""Number of equal changes in a row, one per micro-batch, that show a counter."""


class Layers:
    """The changes that a loop made in a model outside of its forward, and all changes of persistent buffers."""

    def __init__(self, model: nn.Module) -> None:
        self.changes: Changes = {}
        self.tensors: dict[str, Tensor | None] = {}
        """Read-only copies of persistent buffers and of other tensors that the loop has changed."""
        self.untold: set[str] = set()
        """Names of values that the loop changed between its micro-batches. They are sent to newcomers, not compared."""
        self.of_forwards: set[str] = set()
        """Names of values that forwards change by themselves."""
        self._sums: dict[str, int] = {}
        """Checksums of the copies in `tensors`."""
        self._initial: dict[str, int] = {}
        """Checksums of the persistent buffers at the start of the loop."""
        self._numbers: dict[str, list[float]] = {}
        """First values of each number that changed in a micro-batch. An empty list marks a number as no counter."""
        self._depth = 0
        self._has_forward = False
        self._is_in_step: bool | None = None  # until the loop begins
        self._hooks = [
            model.register_forward_pre_hook(OriginalsHook(lambda *_: self._called(by=1))),
            model.register_forward_hook(OriginalsHook(lambda *_: self._called(by=-1)), always_call=True),
        ]
        self._watched = PlainAttributes(model)

    def digest(self) -> str:
        """Return the digest of the values that must be equal on all members at the start."""
        return self._watched.digest()

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def begin(self) -> None:
        """Start to record changes, as the loop begins. Earlier changes do not count."""
        for name in self._watched.persistent():
            self._set(name, self._watched.get(name))
        self._initial, self._is_in_step = dict(self._sums), False
        self.begin_again()

    def begin_again(self) -> None:
        """Forget the changes that a tracing pass has made."""
        self._watched.rebase()
        self._numbers, self._depth = {}, 0

    def note(self) -> None:
        """Record all changes since `settle` as made by the loop. Raises ConfigError for values that are not data."""
        self._take_changes(_LOOP, is_thorough=True)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Undo what the body changes in plain attributes. Other changes of attributes count as made by forwards."""
        self.note()
        kept, self._is_in_step = self._is_in_step, None
        try:
            yield
        finally:
            self._is_in_step = kept
            for name, _, before in self._watched.changed(is_thorough=True):
                if name in self._watched.parameters or type(before) in (bool, int, float, str, type(None)):
                    self._watched.put(name, before)
                elif not name.startswith("hooks of ") and name not in self._initial:
                    self.of_forwards.add(name)
            self._watched.rebase()

    def enter(self) -> None:
        """Record the loop's changes before its micro-batches. Raises ConfigError as `note` and `check_hooks` do."""
        self._take_changes(_LOOP)
        self.check_hooks()
        self._is_in_step, self._has_forward = True, False

    def settle(self) -> None:
        """Record changes after the commit. Raises ConfigError if a persistent buffer was changed since `enter`."""
        if self._has_forward:
            self._take_changes(_BODY)
        self._take_changes(_FORWARD)
        self._is_in_step, self._depth = False, 0

    def _called(self, *, by: int) -> None:
        """Record changes at the begin (by=1) or the end (-1) of a call of the model. Calls may be nested."""
        if torch.compiler.is_compiling() or self._is_in_step is None:
            return
        if by == 1 and self._depth == 0:
            self._has_forward = True
            self._take_changes(_BODY if self._is_in_step else _LOOP, has_hooks=not self._is_in_step)
        self._depth += by
        if by == -1 and self._depth == 0:
            self._take_changes(_FORWARD, has_hooks=not self._is_in_step)  # in a step, `settle` looks at hooks

    def _take_changes(self, doer: str, *, is_thorough: bool = False, has_hooks: bool = True) -> None:
        for name, value, before in self._watched.changed(is_thorough=is_thorough, has_hooks=has_hooks):
            if name in self._watched.parameters or name.startswith("hooks of "):
                self.changes |= {name: value} if doer is _LOOP else {}
                continue
            is_state = name in self._initial or name in self._watched.persistent()
            if is_state and self._is_in_step:
                raise ConfigError(
                    f"{doer} changes buffer {name!r}, and members would come to differ in it: only running statistics "
                    "of normalisation layers are shared. Change it before or behind `for batch in step`, alike on all "
                    "members, register a mere cache with persistent=False, or count in a variable of the script"
                )
            if self._is_in_step and doer is not _LOOP:
                self._check_counter(name, before, value)
            if doer is _FORWARD and not is_state:
                self.of_forwards.add(name)
            elif name not in self.of_forwards:
                self._keep(name, self._watched.get(name), is_inside=doer is _BODY)

    def _keep(self, name: str, value: Any, *, is_inside: bool) -> None:
        if is_inside and isinstance(value, Tensor):  # an input that the script passes through an attribute
            self.of_forwards.add(name)
        elif isinstance(value, Tensor) or (value is None and name in self.tensors):
            self._set(name, value)
        elif (tree := _tree(name, value)) is not MISSING:
            self.changes[name] = tree
            self.untold |= {name} if is_inside else set()
        elif is_inside:
            self.of_forwards.add(name)
        else:
            what = "removed" if value is MISSING else f"set to a {type(value).__name__}"
            raise ConfigError(
                f"{name!r} of the model was {what} while training, and members that join later could not get it: set "
                "a number, a word, a tensor or a list of numbers, or do it before the loop"
            )

    def _check_counter(self, name: str, before: Any, value: Any) -> None:
        seen = self._numbers.setdefault(name, [before])
        if not 0 < len(seen) <= _COUNTED or not {type(before), type(value)} <= {int, float}:
            return
        self._numbers[name] = seen = [*seen, value] if seen[-1] == before else []
        if len(seen) > _COUNTED and _is_progression(seen):
            raise ConfigError(
                f"{name!r} of the model counts micro-batches ({', '.join(f'{each:g}' for each in seen)}), and members "
                "compute different ones: what is computed with it would depend on who computes. Set it from "
                "step.number before `for batch in step`, or count in a variable of the script"
            )

    def _set(self, name: str, value: Tensor | None) -> None:
        self.tensors[name] = None if value is None else value.detach().clone()
        self._sums[name] = sums_of([value])[0]

    def told(self) -> dict[str, str]:
        """Return the digests that members compare in each vote, by name. All unchanged buffers share one digest."""
        alone = {name: total for name, total in self._sums.items() if self._initial.get(name) == total}
        told = {name: f"{total:x}" for name, total in self._sums.items() if name not in alone}
        told |= {name: short(json.dumps(tree)) for name, tree in self.changes.items()}
        untold = self.untold | self.of_forwards
        named = {f"{name!r} of the model": digest for name, digest in sorted(told.items()) if name not in untold}
        return {"buffers": short(json.dumps(alone, sort_keys=True)), **named}

    def state_dict(self) -> dict[str, Tensor | None]:
        """Return the persistent buffers, and other tensors that the loop has changed."""
        return dict(self.tensors)

    def load_state_dict(self, state: Mapping[str, Tensor | None]) -> None:
        """Put the tensors of `state_dict` into the model, on a newcomer or in a resumed job."""
        for name, value in state.items():
            self._set(name, self._watched.put(name, value))  # on its device: checksums differ between kinds of devices
        self._watched.rebase()

    def load(self, changes: Mapping[str, Tree], untold: Collection[str] = ()) -> None:
        """Apply all other changes that the donor's or the checkpoint's loop made so far."""
        hooks = dict(self._watched.hooks())
        for name, tree in changes.items():
            if name not in hooks:  # see `check_hooks`
                self._watched.put(name, unpack(tree, None))
        self.changes, self.untold = dict(changes), set(untold)
        self._watched.rebase()

    def check_hooks(self) -> None:
        """Raise ConfigError if the number of hooks differs from that of the donor or of the checkpoint."""
        for name, count in self._watched.hooks():
            if self.changes.get(name, count) != count:
                raise ConfigError(
                    f"the {name} are {count} on this member and {self.changes[name]} where training comes from: "
                    "register and remove hooks before the loop over job.steps(…), where members that join later do, too"
                )


def _is_progression(seen: list[float]) -> bool:
    """Return True if the numbers grow by a constant difference or by a constant factor."""
    steps = [(b - a, b / a if a else 0.0) for a, b in pairwise(seen)]
    return any(all(math.isclose(each, kind[0]) and each for each in kind) for kind in zip(*steps, strict=True))


def _tree(name: str, value: Any) -> Tree:
    """Return the value as a JSON tree, or MISSING if it is not plain data without tensors and code."""
    packer = Packer()
    try:
        tree = packer.pack(name, value)
    except ConfigError:
        return MISSING
    return MISSING if packer.size_bytes or '"code"' in json.dumps(tree) else tree


def short(text: str) -> str:
    """Return a digest of a text, as 12 hexadecimal digits."""
    return blake2b(text.encode(), digest_size=6).hexdigest()
