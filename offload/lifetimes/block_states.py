"""The pieces of each block: its parameters, gradients and optimizer states, as tensors over the pieces' memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from elastrain.offload.errors import OffloadConfigError
from elastrain.offload.lifetimes.blocks import ModelBlock, PieceView, places_of
from elastrain.offload.lifetimes.piece_store import PieceStore
from elastrain.offload.lifetimes.pieces import process_heap
from elastrain.offload.lifetimes.pieces.piece_memory import HeldPiece
from elastrain.offload.planning.orders import BlockSizes
from elastrain.offload.planning.plan_values import Kind
from elastrain.offload.planning.program import PieceKey


class BlockStates:
    """All pieces of a model and its optimizer. `pieces` holds those that exist so far.

    `adopted_bytes` is the memory that the model and the optimizer took before. A parameter is in `given` while autograd
    adds to a gradient tensor of the program.
    """

    def __init__(self, blocks: Sequence[ModelBlock], optimizer: torch.optim.Optimizer, custody: PieceStore) -> None:
        self.pieces: dict[PieceKey, HeldPiece] = {}
        self.block_of = {each: number for number, block in enumerate(blocks) for each in block.parameters}
        self.given = set[nn.Parameter]()
        self._blocks = blocks
        self._optimizer = optimizer
        self._custody = custody
        self._gradients: dict[nn.Parameter, PieceView] = {}
        self._by_storage: dict[int, HeldPiece] = {}
        self._parts: list[torch.Tensor] = []  # keeps the storages of `_by_storage` alive
        self._state_places: dict[tuple[nn.Parameter, str], PieceView] = {}
        # Until it is adopted, the model takes memory that cannot leave. It counts as reserved, which never causes a
        # refusal.
        self.adopted_bytes = custody.account.reserved_bytes = self.unadopted_bytes()
        for number, block in enumerate(blocks):
            if block.parameters:
                self._adopt_parameters(number, block)
                self.adopt_optimizer_states(number, self.trained(number))
                process_heap.trim()
                custody.release()
                custody.account.reserved_bytes = self.unadopted_bytes()

    def unadopted_bytes(self) -> int:
        """Return the bytes of parameters and optimizer states that do not lie in pieces yet."""
        ours = {piece.memory.tensor.untyped_storage()._cdata for piece in self.pieces.values()}
        tensors = [each.data for each in self.block_of]
        tensors += [value for state in self._optimizer.state.values() for value in state.values() if _is_large(value)]
        storages = {each.untyped_storage()._cdata: each.untyped_storage() for each in tensors}
        return sum(each.nbytes() for key, each in storages.items() if key not in ours | self._by_storage.keys())

    def of(self, kind: Kind, blocks: Sequence[int]) -> list[HeldPiece]:
        """Return the pieces of one kind of these blocks, as far as they exist."""
        return [self.pieces[kind, number] for number in blocks if (kind, number) in self.pieces]

    def trained(self, block: int) -> list[nn.Parameter]:
        """Return the block's parameters that the optimizer updates, in the optimizer's order."""
        return [
            each
            for group in self._optimizer.param_groups
            for each in group["params"]
            if self.block_of[each] == block and each.requires_grad
        ]

    def sizes(self) -> list[BlockSizes]:
        """Return the sizes of all blocks, for a plan."""
        return [
            BlockSizes(
                name=block.name,
                parameter_bytes=self._bytes(Kind.PARAMETER, number),
                gradient_bytes=self._bytes(Kind.GRADIENT, number),
                state_bytes=self._bytes(Kind.STATE, number),
                touches=block.touches,
            )
            for number, block in enumerate(self._blocks)
        ]

    def holding(self, tensor: torch.Tensor) -> list[HeldPiece]:
        """Return the parameter piece that the tensor's memory belongs to, as a list of one, or an empty list."""
        piece = self._by_storage.get(tensor.untyped_storage()._cdata)
        return [] if piece is None else [piece]

    def check_parameters(self, model: nn.Module) -> None:
        """Raise OffloadConfigError if a parameter is new, or was moved out of its piece. Reads no values."""
        for name, parameter in model.named_parameters():
            # torch.func.functional_call puts plain tensors in the place of parameters.
            if isinstance(parameter, nn.Parameter) and parameter not in self.block_of:
                raise OffloadConfigError(
                    f"{name} became a parameter of the model after `within` was called: add or replace parameters "
                    f"before, and make the optimizer of them; torch.func.functional_call takes plain tensors, such as "
                    f"p.view_as(p)"
                )
        for block in self._blocks:
            for parameter in block.parameters:
                if not self.holding(parameter):
                    raise OffloadConfigError(
                        f"a parameter of {block.name} was replaced after `within` was called (by .to() or .data = …, "
                        f"it may be): do that before, or change its values inside `with training.whole():`"
                    )

    def is_ours(self, parameter: nn.Parameter) -> bool:
        """Return True if the parameter's gradient lies at its place in its block's piece."""
        grad, piece = parameter.grad, self.pieces.get((Kind.GRADIENT, self.block_of[parameter]))
        place = self._gradients.get(parameter)
        if grad is None or piece is None or place is None:
            return False
        return place.holds(grad) and place.is_place_of(grad, piece.memory.tensor)

    def part_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Copy gradients that lie at the place of another parameter, for example after the program swapped two."""
        pieces = self.of(Kind.GRADIENT, range(len(self._blocks)))
        ours = {each.memory.tensor.untyped_storage()._cdata for each in pieces}
        for each in parameters:
            if each.grad is not None and not self.is_ours(each) and each.grad.untyped_storage()._cdata in ours:
                each.grad = each.grad.clone()

    def was_written(self, parameter: nn.Parameter) -> bool:
        """Return True if the program wrote to gradients of the parameter's block since autograd made them."""
        return self.pieces[Kind.GRADIENT, self.block_of[parameter]].written

    def at(self, address: int) -> tuple[PieceKey, HeldPiece] | None:
        """Return the piece that contains an address, with its key, or None."""
        for key, piece in self.pieces.items():
            begin = piece.memory.tensor.data_ptr()
            if begin <= address < begin + piece.size_bytes:
                return key, piece
        return None

    def keep_gradient(self, parameter: nn.Parameter) -> None:
        """Move a gradient that autograd has made into its block's piece.

        Raises OffloadConfigError for a sparse gradient.
        """
        fresh = parameter.grad
        assert fresh is not None
        number = self.block_of[parameter]
        if fresh.layout is not torch.strided:
            name = self._blocks[number].name
            raise OffloadConfigError(
                f"{name} makes sparse gradients, which have no place of their own: use sparse=False"
            )
        if parameter not in self._gradients:
            self._make_gradient_piece(number, parameter)
        piece = self.pieces[Kind.GRADIENT, number]
        self._custody.begin(piece)
        self._custody.change([piece])
        view = self.gradient(parameter)
        view.copy_(fresh)
        parameter.grad = view

    def _make_gradient_piece(self, number: int, first: nn.Parameter) -> None:
        """Create the piece for a block's gradients.

        A larger one replaces it if a frozen parameter gets a gradient later.
        """
        own = self._blocks[number].parameters
        wanted = [each for each in own if each.requires_grad or each in self._gradients or each is first]
        places, size_bytes = places_of(wanted)
        before = self.pieces.get((Kind.GRADIENT, number))
        made = self._custody.adopt(f"the gradients of {self._blocks[number].name}", Kind.GRADIENT, size_bytes)
        if before is not None:
            there = [(each, place) for each, place in zip(wanted, places, strict=True) if self.is_ours(each)]
            self._custody.acquire([before] if there else [])
            for each, place in there:
                assert each.grad is not None
                each.grad = place.of(made.memory.tensor).copy_(each.grad)
            self._custody.drop(before, for_good=True)
        self._gradients.update(zip(wanted, places, strict=True))
        self.pieces[Kind.GRADIENT, number] = made

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the view of the block's piece in which the parameter's gradient lies."""
        piece = self.pieces[Kind.GRADIENT, self.block_of[parameter]]
        return self._gradients[parameter].of(piece.memory.tensor)

    # Parameters and optimizer states.

    def _adopt_parameters(self, number: int, block: ModelBlock) -> None:
        places, size_bytes = places_of([each.data for each in block.parameters])
        piece = self._custody.adopt(f"the parameters of {block.name}", Kind.PARAMETER, size_bytes)
        self.pieces[Kind.PARAMETER, number] = piece
        for parameter, place in zip(block.parameters, places, strict=True):
            part = piece.memory.part(place.offset_bytes, parameter.data.nbytes)
            self._parts.append(part)
            self._by_storage[part.untyped_storage()._cdata] = piece
            view = replace(place, offset_bytes=0).of(part)
            view.copy_(parameter.data)
            parameter.data = view

    def has_states(self, block: int) -> bool:
        """Return True if the block's optimizer states lie in a piece."""
        return (Kind.STATE, block) in self.pieces

    def adopt_optimizer_states(self, number: int, parameters: Sequence[nn.Parameter]) -> None:
        """Move the optimizer's states for a block's parameters into the block's piece. Counters stay where they are.

        The first parameter with states shows how many bytes the whole block needs.
        """
        for parameter in parameters:
            state = self._optimizer.state.get(parameter, {})
            keys = [key for key, value in state.items() if _is_large(value)]
            if keys and not self.has_states(number):
                self._make_state_piece(number, {key: state[key].dtype for key in keys})
            for key in keys:
                place = self._state_places.get((parameter, key))
                if place is None or not place.holds(state[key]):
                    continue
                memory = self.pieces[Kind.STATE, number].memory.tensor
                if not place.is_place_of(state[key], memory):
                    view = place.of(memory)
                    view.copy_(state[key])
                    state[key] = view

    def _make_state_piece(self, number: int, keys: Mapping[str, torch.dtype]) -> None:
        """Create the piece for these states of the block's parameters. Each state has the shape of its parameter."""
        wanted = [(each, key) for each in self.trained(number) if each.numel() > 1 for key in keys]
        forms = [each.data.to("meta", keys[key]) for each, key in wanted]
        places, size_bytes = places_of(forms)
        self._state_places.update(zip(wanted, places, strict=True))
        name = f"the optimizer's states of {self._blocks[number].name}"
        self.pieces[Kind.STATE, number] = self._custody.adopt(name, Kind.STATE, size_bytes)

    def _bytes(self, kind: Kind, number: int) -> int:
        piece = self.pieces.get((kind, number))
        return 0 if piece is None else piece.size_bytes


def _is_large(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() > 1
