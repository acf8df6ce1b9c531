"""How a server gets new weights."""

from __future__ import annotations

from typing import Protocol


class Loader(Protocol):
    """Raises ValueError or FileNotFoundError for what cannot be loaded, RuntimeError for what cannot be loaded now."""

    async def load_policy(self, step: int, ref: str | None) -> None:
        """Serve this version from now on."""

    async def load_adapter(self, name: str, path: str) -> None:
        """Serve the adapter beside the policy, as a model of this name."""

    async def unload_adapter(self, name: str) -> None: ...
