"""The limit on saved storages in memory: how much must be free for the next one, and whether the limit can hold at all.

Values only: no lock, no clock, no I/O. The manager's lock guards it.
"""

from __future__ import annotations

from elastrain.offload.errors import LimitTooSmallError


class SpillLimit:
    """`limit_bytes` holds now, None for no limit; it may change while somebody waits."""

    def __init__(self, limit_bytes: int | None) -> None:
        self.limit_bytes = limit_bytes
        # Only a limit that the user gave before anything was saved can be called too small. A later one holds from the
        # next storage on, and what was saved under another limit says nothing against it.
        self._is_given = limit_bytes is not None
        self._smallest_bytes = 0
        self._foreseen_bytes: int | None = None

    def set(self, limit_bytes: int) -> None:
        """Let another limit hold from the next storage on."""
        self.limit_bytes, self._is_given = limit_bytes, False

    def check(self) -> None:
        """Raises LimitTooSmallError, with the smallest limit that works, where one was found not to hold."""
        if self.limit_bytes is not None and self._smallest_bytes > self.limit_bytes:
            raise LimitTooSmallError(self.limit_bytes, self._smallest_bytes)

    def at_least(self, size_bytes: int) -> None:
        """Note that no limit below this would have held."""
        self._smallest_bytes = max(self._smallest_bytes, size_bytes)

    def foresee(self, largest_bytes: int) -> None:
        """Note the largest storage of a whole forward: the next one is expected to save none that is larger."""
        self._foreseen_bytes = largest_bytes

    def before_next_bytes(self, largest_bytes: int) -> int:
        """How much may be live when a forward, whose largest storage is this so far, saves its next storage.

        In the first forward nobody knows how large that will be: everything leaves.
        """
        assert self.limit_bytes is not None
        foreseen_bytes = self.limit_bytes if self._foreseen_bytes is None else self._foreseen_bytes
        return max(0, self.limit_bytes - max(largest_bytes, foreseen_bytes))

    def passed_bytes(self, *, live_bytes: int, index: int, size_bytes: int) -> int:
        """How much is live if a storage that was just saved went beyond the limit, and the limit is to blame; else 0.

        It is not to blame where another limit held a moment ago, where nothing could have left before the pass's first
        storage, or where this storage was not foreseen.
        """
        is_passed = self.limit_bytes is not None and live_bytes > self.limit_bytes
        is_foreseen = self._foreseen_bytes is None or size_bytes <= self._foreseen_bytes
        return live_bytes if is_passed and is_foreseen and self._is_given and index > 0 else 0
