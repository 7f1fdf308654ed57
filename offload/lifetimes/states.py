"""What each block holds, in pieces: its parameters, gradients and optimizer states, as tensors over pieces' memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from elastrain.offload.lifetimes.blocks import ModelBlock, PieceView, places_of
from elastrain.offload.lifetimes.custody import HeldPiece, PieceCustody
from elastrain.offload.lifetimes.orders import BlockSizes
from elastrain.offload.lifetimes.values import Kind

PieceKey = tuple[Kind, int]


class BlockStates:
    """All pieces of a model and its optimizer. `pieces` holds those that exist by now."""

    def __init__(self, blocks: Sequence[ModelBlock], optimizer: torch.optim.Optimizer, custody: PieceCustody) -> None:
        self.pieces: dict[PieceKey, HeldPiece] = {}
        self.block_of = {each: number for number, block in enumerate(blocks) for each in block.parameters}
        self._blocks = blocks
        self._optimizer = optimizer
        self._custody = custody
        self._gradients: dict[nn.Parameter, PieceView] = {}
        self._by_storage: dict[int, HeldPiece] = {}
        for number, block in enumerate(blocks):
            if block.parameters:
                self._adopt_parameters(number, block)
                self.adopt_optimizer_states(number)
                custody.release()

    def of(self, kind: Kind, blocks: Sequence[int]) -> list[HeldPiece]:
        """The pieces of one kind of these blocks, as far as there are any."""
        return [self.pieces[kind, number] for number in blocks if (kind, number) in self.pieces]

    def trained(self, block: int) -> list[nn.Parameter]:
        """The block's parameters that the optimizer updates, in its order."""
        return [
            each
            for group in self._optimizer.param_groups
            for each in group["params"]
            if self.block_of[each] == block and each.requires_grad
        ]

    def sizes(self) -> list[BlockSizes]:
        """What the blocks hold, for a program."""
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
        """The piece whose memory a tensor lies in, if it is one of parameters."""
        piece = self._by_storage.get(tensor.untyped_storage()._cdata)
        return [] if piece is None else [piece]

    # Gradients.

    def is_ours(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter's gradient lies in its block's piece already."""
        grad, piece = parameter.grad, self.pieces.get((Kind.GRADIENT, self.block_of[parameter]))
        if grad is None or piece is None:
            return False
        return bool(grad.untyped_storage()._cdata == piece.memory.tensor.untyped_storage()._cdata)

    def keep_gradient(self, parameter: nn.Parameter) -> None:
        """Move a gradient that autograd has made into its block's piece."""
        fresh = parameter.grad
        assert fresh is not None
        number = self.block_of[parameter]
        if (Kind.GRADIENT, number) not in self.pieces:
            wanted = [each for each in self._blocks[number].parameters if each.requires_grad]
            places, size_bytes = places_of(wanted)
            self._gradients.update(zip(wanted, places, strict=True))
            name = f"the gradients of {self._blocks[number].name}"
            self.pieces[Kind.GRADIENT, number] = self._custody.adopt(name, Kind.GRADIENT, size_bytes)
        piece = self.pieces[Kind.GRADIENT, number]
        self._custody.begin(piece)
        self._custody.change([piece])
        view = self.gradient(parameter)
        view.copy_(fresh)
        parameter.grad = view

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor:
        """Where the parameter's gradient lies."""
        piece = self.pieces[Kind.GRADIENT, self.block_of[parameter]]
        return self._gradients[parameter].of(piece.memory.tensor)

    # Parameters and optimizer states.

    def _adopt_parameters(self, number: int, block: ModelBlock) -> None:
        places, size_bytes = places_of([each.data for each in block.parameters])
        piece = self._custody.adopt(f"the parameters of {block.name}", Kind.PARAMETER, size_bytes)
        self.pieces[Kind.PARAMETER, number] = piece
        self._by_storage[piece.memory.tensor.untyped_storage()._cdata] = piece
        for parameter, place in zip(block.parameters, places, strict=True):
            view = place.of(piece.memory.tensor)
            view.copy_(parameter.data)
            parameter.data = view

    def adopt_optimizer_states(self, number: int) -> None:
        """Move what the optimizer has made for a block into a piece, once; counters stay where they are."""
        if (Kind.STATE, number) in self.pieces:
            return
        found = [
            (state, key)
            for parameter in self._blocks[number].parameters
            if (state := self._optimizer.state.get(parameter)) is not None
            for key, value in state.items()
            if isinstance(value, torch.Tensor) and value.numel() > 1
        ]
        if not found:
            return
        places, size_bytes = places_of([state[key] for state, key in found])
        name = f"the optimizer's states of {self._blocks[number].name}"
        piece = self.pieces[Kind.STATE, number] = self._custody.adopt(name, Kind.STATE, size_bytes)
        for (state, key), place in zip(found, places, strict=True):
            view = place.of(piece.memory.tensor)
            view.copy_(state[key])
            state[key] = view

    def _bytes(self, kind: Kind, number: int) -> int:
        piece = self.pieces.get((kind, number))
        return 0 if piece is None else piece.size_bytes
