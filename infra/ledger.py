"""Which batch each policy step was made of: an update is applied once, however often its task is tried."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from infra.store import AlreadyCommitted, Store
from k3core.sealed import seal, unseal


class Ledger:
    """Entries {run, step, batch_sha256, result}, one for each update of a run, never changed."""

    def __init__(self, store: Store, run: str) -> None:
        self._store = store
        self._run = run

    def record(self, step: int, batch_sha256: str, result: Mapping[str, Any]) -> dict[str, Any]:
        """The step's entry: this one, or the one that an earlier try with the same batch recorded.

        Raises ValueError when the step was made of another batch, or when `result` is not JSON (NaN is not).
        """
        recorded = self.get(step)
        if recorded is None:
            entry = {"run": self._run, "step": step, "batch_sha256": batch_sha256, "result": dict(result)}
            try:
                document = seal(entry)
            except ValueError as error:
                raise ValueError(f"ledger of run {self._run!r}, step {step}: result: {error}") from error
            # Another try may have been faster: then its entry is the one that is read below.
            with suppress(AlreadyCommitted):
                self._store.commit(self._key(step), document)
            recorded = self.get(step)
            assert recorded is not None, "nothing deletes a ledger entry"
        if recorded["batch_sha256"] != batch_sha256:
            raise ValueError(
                f"run {self._run!r} applied step {step} to batch {recorded['batch_sha256']}, not to {batch_sha256}: "
                "resume from the recorded step, or start a new run"
            )
        return recorded

    def get(self, step: int) -> dict[str, Any] | None:
        """None when the step was not applied. Raises IntegrityError when its entry was altered."""
        key = self._key(step)
        document = self._store.read_manifest(key)
        return None if document is None else unseal(document, self._store.uri(key))

    def entries(self, last_step: int) -> list[dict[str, Any]]:
        """Those recorded for steps 0 to `last_step`, in order."""
        found = (self.get(step) for step in range(last_step + 1))
        return [entry for entry in found if entry is not None]

    def _key(self, step: int) -> str:
        return f"{self._run}/ledger/{step:06d}.json"
