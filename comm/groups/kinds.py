"""Kinds of the frames of a communicator, each named once, and the checks of what they carry."""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from elastrain.comm.errors import MemberLost, ProtocolError
from elastrain.comm.wire.mesh import Mesh
from elastrain.comm.wire.values import Frame


class FrameKind(enum.IntEnum):
    PART = 0x0101  # of an operation: group, sequence, round, the sender's fence, its description; the tensor
    ABORT = 0x0102  # everything ended: the lost member, if any, and the reason
    FENCE = 0x0103  # the sender's fence, in its shared memory
    MESSAGE = 0x0104  # a tagged message: group, tag; the tensor
    RINGS = 0x0105  # of a group: the sender's slot rings, in its shared memory


def unpack(layout: struct.Struct, frame: Frame) -> tuple[tuple[Any, ...], bytes]:
    """The fields that the body begins with, and the rest of it. Raises ProtocolError."""
    if len(frame.body) < layout.size:
        raise ProtocolError(
            f"a frame of kind {frame.kind:#x} with {len(frame.body)} bytes, {layout.size} were expected"
        )
    return layout.unpack_from(frame.body), frame.body[layout.size :]


def only_tensor(frame: Frame, *, dtype: torch.dtype | None = None, numel: int | None = None) -> torch.Tensor:
    """The one tensor that the frame carries, of this dtype and size where they are known. Raises ProtocolError."""
    found = frame.tensors
    if len(found) != 1 or (dtype or found[0].dtype) != found[0].dtype or numel not in (None, found[0].numel()):
        came = ", ".join(f"{tensor.dtype}{list(tensor.shape)}" for tensor in found) or "no tensor"
        raise ProtocolError(f"a frame of kind {frame.kind:#x} with {came}")
    return found[0]


def send(mesh: Mesh, member: str, kind: FrameKind, body: bytes, tensors: Sequence[torch.Tensor] = ()) -> None:
    """Queue a frame for a member; nothing where that is lost.

    The mesh tells of a loss once, in the next poll: that is where it is dealt with.
    """
    with suppress(MemberLost):
        mesh.send(member, kind, body, tensors)
