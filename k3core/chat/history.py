"""The tokens of an episode as it grows."""

from __future__ import annotations

from collections.abc import Iterable


class History:
    """The tokens of one episode and who made each of them. It only ever grows at its end."""

    __slots__ = ("_loss_mask", "_tokens")

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._loss_mask: list[bool] = []

    def append_context(self, ids: Iterable[int]) -> None:
        """Tokens of the prompt, the environment or the stub: no loss."""
        self._append(ids, sampled=False)

    def append_sampled(self, ids: Iterable[int]) -> None:
        """Tokens exactly as the engine returned them: these, and only these, carry loss."""
        self._append(ids, sampled=True)

    @property
    def tokens(self) -> list[int]:
        """A copy."""
        return list(self._tokens)

    @property
    def loss_mask(self) -> list[bool]:
        """A copy; true where the policy sampled the token."""
        return list(self._loss_mask)

    def __len__(self) -> int:
        return len(self._tokens)

    def _append(self, ids: Iterable[int], sampled: bool) -> None:
        added = list(ids)
        self._tokens += added
        self._loss_mask += [sampled] * len(added)
