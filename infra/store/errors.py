"""How a store says no. Bytes that are not what they must be are an IntegrityError."""

from __future__ import annotations

from k3core.errors import RunError


class AlreadyCommitted(Exception):
    """Other content stands under this key; the first one stays."""


class Conflict(Exception):
    """The pointer is not at the expected version any more; nothing was changed. Read it again and decide again."""


class StoreUnavailable(OSError):
    """The server did not do it within all tries; a later try may succeed. A write may have happened all the same."""


class StoreDenied(RunError):
    """The server refuses these credentials, this bucket or this region; trying again does not help."""
