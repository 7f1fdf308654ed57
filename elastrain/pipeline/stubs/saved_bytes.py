"""A count of the bytes that a block's forward keeps for its backward, taken while the block runs on fakes or zeros."""

from __future__ import annotations

from types import TracebackType

import torch
from torch import Tensor, nn

from elastrain.pipeline.stubs.fakes import Fakes
from elastrain.pipeline.stubs.naming import leaves_of


class SavedByForward:
    """The tensors that one forward has saved: each storage once, without parameters and results of the block."""

    def __init__(self) -> None:
        # By storage. The tensors are kept alive, so that no other storage gets the same address.
        self.tensors: dict[int, Tensor] = {}
        # True under checkpointing: then the block's inputs are kept, and nothing that its forward saves.
        self.is_for_another = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        self.elsewhere: dict[int, Tensor] = {}
        """Storages that are counted elsewhere: parameters, and the block's results, which the next block saves."""

    def ran(self, taken: object, returned: object) -> None:
        """Note the arguments and the result of the forward."""
        if self.is_for_another:
            for leaf in leaves_of(taken):
                if isinstance(leaf, Tensor):
                    self.tensors[storage_of(leaf)] = leaf
        for leaf in leaves_of(returned):
            if isinstance(leaf, Tensor):
                self.elsewhere[storage_of(leaf)] = leaf

    @property
    def nbytes(self) -> int:
        """Bytes of the saved storages that are not counted elsewhere."""
        saved = (tensor for storage, tensor in self.tensors.items() if storage not in self.elsewhere)
        return sum(tensor.untyped_storage().nbytes() for tensor in saved if tensor.layout is torch.strided)


class Saving:
    """A context manager that records what a forward saves. Each entry starts a new record."""

    def __init__(self, model: nn.Module, fakes: Fakes) -> None:
        self._model = model
        self._fakes = fakes
        self._saved = SavedByForward()
        self._hooks: torch.autograd.graph.saved_tensors_hooks | None = None

    def __enter__(self) -> SavedByForward:
        saved = self._saved = SavedByForward()
        for parameter in self._model.parameters():
            saved.elsewhere[storage_of(parameter)] = parameter
        self._fakes.stands_for_parameter = self._note
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        self._hooks.__enter__()
        return saved

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._hooks is not None
        self._hooks.__exit__(kind, error, trace)
        self._fakes.stands_for_parameter = None

    def _note(self, like: Tensor) -> None:
        self._saved.elsewhere[storage_of(like)] = like

    def _pack(self, tensor: Tensor) -> Tensor:
        if not self._saved.is_for_another:
            self._saved.tensors.setdefault(storage_of(tensor), tensor)
        return tensor


def _unpack(tensor: Tensor) -> Tensor:
    return tensor


def storage_of(tensor: Tensor) -> int:
    """Return a key that all views of a storage share. It is valid as long as the storage lives."""
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else id(tensor)
