"""Unpacks zstd into as many bytes as are due: what is packed may state or hold any number."""

from __future__ import annotations

import zstandard

_UNSTATED = -1


def unpacked(packed: memoryview, plain_bytes: int) -> bytes:
    """Exactly so many bytes. Raises ZstdError for what is of another size, and takes no memory for that."""
    # A frame may state its size, and then zstandard takes that much memory, whatever `max_output_size` is.
    stated_bytes = zstandard.frame_content_size(packed)
    if stated_bytes not in (_UNSTATED, plain_bytes):
        raise zstandard.ZstdError(f"it states {stated_bytes:,} bytes, and {plain_bytes:,} are due")
    plain = zstandard.ZstdDecompressor().decompress(packed, max_output_size=plain_bytes)
    if len(plain) != plain_bytes:
        raise zstandard.ZstdError(f"it holds {len(plain):,} bytes, and {plain_bytes:,} are due")
    return plain
