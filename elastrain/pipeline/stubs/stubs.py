"""Stubs at the blocks that a member does not hold; at its own blocks, received tensors in place of fakes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten

from elastrain.errors import ConfigError
from elastrain.pipeline.stubs.draws import BackwardDraws, UntracedDraws
from elastrain.pipeline.stubs.fakes import NOT_HERE, AbsentBlock, Fakes
from elastrain.pipeline.stubs.generators import Generators, device_of
from elastrain.pipeline.stubs.module_state import Counters, KeptByLoop
from elastrain.pipeline.stubs.naming import flatten, is_fake, leaves_of, module_of
from elastrain.pipeline.stubs.passes import SAME, StubPass
from elastrain.pipeline.stubs.placeholders import AbsentParameter, Entries, Forward
from elastrain.pipeline.stubs.stateful_blocks import Steady
from elastrain.pipeline.stubs.trace import TracedModel
from elastrain.pipeline.stubs.uses import allowed_gradients, check_entry
from elastrain.pipeline.stubs.warm_up import warm_up

_Give = Callable[[Tensor, tuple[int, int]], Tensor | None]
"""(fake, (place of the block, index of the argument)) -> the tensor received for it, or None."""


class Stubs:
    """The replacement of all blocks' entries in a traced model. This member computes the blocks `[begin, end)`."""

    def __init__(
        self,
        model: nn.Module,
        traced: TracedModel,
        begin: int,
        end: int,
        is_here: Callable[[int], bool] | None = None,
        set_stream: Callable[[str], None] | None = None,
    ) -> None:
        """Put the stubs into the model.

        Args:
            model: The user's model.
            traced: The result of its tracing pass.
            begin: First block that this member computes.
            end: The block behind the last one.
            is_here: Returns True if this member has a block, which may then be used outside of a step. By default these
                are the computed blocks.
            set_stream: Sets the random stream of a compiled block, in place of the hook on it.

        Raises:
            ConfigError: If the model is compiled as a whole, or if a cut is not legal.
        """
        self._traced = traced
        self._counters = Counters(model, traced.counted)
        self._is_here = is_here or self._is_computed
        self._fakes = Fakes()
        self._fakes.written = partial(self._written, KeptByLoop())
        self._stretch = range(0)
        """Places of the blocks that this member computes."""
        self._pass: StubPass | None = None
        self._going_back: StubPass | None = None
        """The pass whose backward runs now."""
        self.hold(begin, end)
        self._draws = UntracedDraws(traced.graph.blocks, traced.draws, Generators(device_of(model)))
        self._standing = contextlib.ExitStack()
        self._standing.callback(Entries(model, traced.names, self._enter).close)
        modules = {name: module_of(model, name) for name in traced.names}
        compiled = {name for name, each in modules.items() if each._compiled_call_impl is not None}
        outputs = (*traced.outputs, *({} for _ in traced.graph.never_entered))
        names = zip(modules.items(), outputs, strict=True)
        self._absent = tuple(AbsentBlock(name, module, its, self._fakes) for (name, module), its in names)
        self._unproven = {p: Steady(self._absent[p]) for p in traced.keeping if traced.names[p] not in compiled}
        # A hook of a compiled block would run behind the entry or, if the block is absent, not at all.
        self._streams = dict.fromkeys(compiled, set_stream)
        # These hooks run before the hook that sets a block's random stream.
        written = [each for name, each in modules.items() if name not in compiled]
        for each in written:
            self._standing.callback(each.register_forward_pre_hook(self._before, prepend=True).remove)

    def hold(self, begin: int, end: int) -> None:
        """Compute the blocks `[begin, end)` from the next micro-batch on.

        Raises ConfigError for a cut that is not legal.
        """
        points = self._traced.graph.points
        if begin not in points or end not in points or begin >= end:
            raise ConfigError(f"a member cannot hold the blocks [{begin}, {end}): legal cuts are {points}")
        self._stretch = range(begin, end)

    def begin(
        self, received: Sequence[Tensor | None] = (), entered_at: Callable[[int], None] = lambda place: None
    ) -> StubPass:
        """Begin a micro-batch, before the user's loop body runs.

        `received` has the tensors that cross the cut above, in order. `entered_at` is called with the place of each
        block that is entered. Raises ConfigError if the model counts its micro-batches.
        """
        self._counters.look()
        # Weights cast for the previous micro-batch would connect its graph with this one's.
        torch.clear_autocast_cache()
        AbsentParameter.computing.add(self)
        crossing = self._traced.crossing
        self._pass = StubPass(crossing[self._stretch.start], crossing[self._stretch.stop], received, entered_at)
        return self._pass

    def loss_is_made(self) -> None:
        """End the forward. Raises ConfigError if code drew random numbers that the tracing pass has not seen."""
        assert self._pass is not None, "a micro-batch is under way"
        AbsentParameter.computing.discard(self)
        self._draws.behind()
        self._pass.draws = self._draws.in_backward(self._stretch)

    def go_back(self, passed: StubPass, backward: Callable[[], Any]) -> Any:
        """Run the backward of a micro-batch, or a part of it, and return its result.

        Raises ConfigError if it draws numbers that one worker would not draw.
        """
        assert passed.draws is not None, "its forward is over"
        self._going_back = passed
        AbsentParameter.computing.add(self)
        try:
            with allowed_gradients():
                return passed.draws.compute(backward)
        finally:
            self._going_back = None
            AbsentParameter.computing.discard(self)

    def _written(self, kept: KeptByLoop, func: Any, real: Tensor) -> None:
        """Raise ConfigError if the loop accumulates values that are not here, such as losses.

        The result would be wrong.
        """
        passed, is_backward = self._pass, torch._C._current_graph_task_id() != -1
        if passed is None or is_backward or len(passed.entries) < len(self._traced.graph.blocks):
            return
        if passed.draws is not None or kept.is_older(real, passed):
            raise ConfigError(f"{func} keeps {NOT_HERE}")

    def warm_up(self, places: Collection[int]) -> dict[str, str]:
        """Compute absent blocks at these places of the graph once on zeros, between two actions.

        Returns block -> the reason why that failed, or "".
        """
        entries = [(self._absent[place], self._traced.first[place]) for place in places]
        return {each.name: warm_up(each.module, entry) for each, entry in entries if entry is not None}

    def finish(self) -> None:
        """End the loop body. Until the next `begin`, a block may be entered only if this member has it."""
        self._pass = None
        AbsentParameter.computing.discard(self)

    def close(self) -> None:
        """Take the stubs off the model."""
        self.finish()
        self._standing.close()

    def _enter(self, place: int, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A checkpoint may compute a part again while another micro-batch goes forward. That is no new entry.
        is_again = torch._C._current_graph_task_id() != -1
        set_stream = self._streams.get(self._traced.names[place]) or (lambda _: None)
        if self._pass is None and (self._going_back is None or not is_again):
            self._check_is_here(place)
            set_stream(self._traced.names[place])
            return forward(*args, **kwargs)
        self._before()
        set_stream(self._traced.names[place])
        if is_again:
            return self._again(lambda: self._computed_again(place, forward, args, kwargs))
        return self._entered(place, forward, args, kwargs)

    def _entered(self, place: int, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Enter a block in the forward of the micro-batch, and return its result."""
        passed = self._pass
        assert passed is not None, "else it would have been called outside of a step"
        entry, at = passed.enter(place), self._traced.places[place]
        # A block that the tracing pass left out takes what its neighbour took.
        numbers = self._traced.numbers(at, entry if place == at else 0)
        leaves, tree = flatten((args, kwargs))
        check_entry(self._traced.names[place], leaves)
        if self._is_computed(place):
            self._exchange(place, leaves, lambda fake, at: passed.give(fake, self._known(numbers.taken, at[1]), at))
            arguments = args, kwargs = tree_unflatten(leaves, tree)
            compute = partial(self._draws.computed, at, lambda: forward(*args, **kwargs), is_traced=place == at)
            is_second = place in self._unproven and self._unproven[place].has_seen(passed)
            with allowed_gradients():
                returned = self._unproven.pop(place).check(forward, arguments, compute) if is_second else compute()
            self._check_has_values(place, returned)
        else:
            if at >= self._stretch.stop:
                for index, leaf in enumerate(leaves):
                    if isinstance(leaf, Tensor):
                        passed.collect(
                            leaf, self._known(numbers.taken, index), (place, index), self._traced.names[place]
                        )
            self._draws.passed(at)
            # Results of repeated entries must be different tensors.
            returned = self._absent[place].take(forward, args, kwargs, leaves=leaves, fresh=entry > 0)
        passed.returned(
            leaves_of(returned), numbers.returned if place == at else {}, is_behind=at >= self._stretch.stop
        )
        return returned

    def _known(self, taken: Mapping[int, int], index: int) -> list[int]:
        """Return the numbers that the tensor may have.

        The first is that of the tracing pass. If blocks are left out, their inputs' numbers follow.
        """
        assert self._pass is not None, "a block is entered"
        found, number = list[int](), taken.get(index)
        while number is not None:
            found.append(number)
            place, took = self._traced.made.get(number, (None, None))
            number = None if place in self._pass.entries else took
        return found

    def _computed_again(self, place: int, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute a block again for a checkpoint. Checkpoints may do so in any order."""
        # A forward may also take gradients of its own.
        passed = self._going_back or self._pass
        assert passed is not None, "it came in for a micro-batch"
        leaves, tree = flatten((args, kwargs))
        if self._is_computed(place):
            self._exchange(place, leaves, passed.give_again, passed.entries[place])
            args, kwargs = tree_unflatten(leaves, tree)
            return forward(*args, **kwargs)
        return self._absent[place].take(forward, args, kwargs, leaves=leaves, fresh=passed.entries[place] > 1)

    def _again(self, compute: Callable[[], Any]) -> Any:
        draws = self._draws_back
        return compute() if draws is None else draws.again(compute)

    @property
    def _draws_back(self) -> BackwardDraws | None:
        return None if self._going_back is None else self._going_back.draws

    def _before(self, *_: object) -> None:
        """Check random draws before a block is entered."""
        if torch._C._current_graph_task_id() != -1:
            draws = self._draws_back
            if draws is not None:
                draws.entering()
        elif self._pass is not None:
            self._draws.behind()

    def _is_computed(self, place: int) -> bool:
        return self._traced.places[place] in self._stretch

    def _check_has_values(self, place: int, returned: object) -> None:
        if any(map(is_fake, leaves_of(returned))):
            raise ConfigError(
                f"block {self._traced.names[place]!r} returns a tensor without values, made with one that it keeps "
                "in a global, an object or a closure from a run on such tensors: keep it in an attribute of the module"
            )

    def _check_is_here(self, place: int) -> None:
        if not self._is_here(self._traced.places[place]):
            raise ConfigError(
                f"block {self._traced.names[place]!r} is not on this member, and was called outside of a step: "
                "use the model behind the loop over job.steps(…), on rank 0 (if job.rank == 0), which has all blocks, "
                "as has every member whose memory limit leaves room"
            )

    def _exchange(self, place: int, leaves: list[Any], give: _Give, entries: int = 1) -> None:
        """Replace fakes among `leaves` by received tensors.

        `entries`: the number of times that the forward has entered the block. Raises ConfigError if no tensor is known
        for a fake.
        """
        name = self._traced.names[place]
        for index, leaf in enumerate(leaves):
            if is_fake(leaf):
                if self._absent[place].module._get_backward_hooks()[0]:  # type: ignore[no-untyped-call]  # of torch
                    raise ConfigError(
                        f"block {name!r} has a backward hook that it did not have in the tracing pass, and would be "
                        "told of gradients behind a cut only: register hooks before the loop over job.steps(…)"
                    )
                leaves[index] = give(leaf, (place, index))
                if leaves[index] is None and entries > 1:
                    raise ConfigError(
                        f"block {name!r} is entered more than once in a forward, with tensors of other members, and a "
                        "checkpoint does not say with which of them it computes it again: with --stages, do not "
                        "checkpoint it; or, if the checkpoint holds no more than this block, train without "
                        "--offload-dir"
                    )
                if leaves[index] is None:
                    raise ConfigError(f"block {name!r} takes a tensor that it did not take in the tracing pass: {SAME}")
