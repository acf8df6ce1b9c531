"""What garbage collection took away: a mark for each object, committed before the object goes, read when it is missed."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass

from infra.store import AlreadyCommitted, Store
from k3core.errors import IntegrityError
from k3core.sealed import seal, unseal


class Pruned(IntegrityError):
    """The bytes are gone because no live version needed them; the message says since when, and what to use instead."""


@dataclass(frozen=True, slots=True)
class Mark:
    """sha256: of the object's bytes; of its key for what nothing describes (`key_sha256`).

    pruned_at: when it was decided, for a person, in UTC. instead: for a person, what to use now.
    """

    key: str
    sha256: str
    size_bytes: int
    reason: str
    pruned_at: str
    instead: str

    def sentence(self) -> str:
        return f"pruned by gc at {self.pruned_at} ({self.reason}); {self.instead}"


def key_sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def mark(store: Store, run: str, new: Mark) -> None:
    """Committed when this returns. The first mark of an object stays, also when it is written again and goes again."""
    document = seal(asdict(new))
    for key in _mark_keys(run, new.sha256, new.key):
        try:
            store.commit(key, document)
        except AlreadyCommitted:
            if _read(store, key, new.key) is not None:
                return
            continue  # of equal bytes under another key
        return
    raise AssertionError("the second key is the object's own")


def find_mark(store: Store, run: str, sha256: str, key: str) -> Mark | None:
    """The mark of the object under `key`, which may still be there."""
    first, own = _mark_keys(run, sha256, key)
    if store.read(first) is None:  # nothing of these bytes was marked, which is the rule
        return None
    return _read(store, first, key) or _read(store, own, key)


def _mark_keys(run: str, sha256: str, key: str) -> tuple[str, str]:
    """By the object's digest, as its reference has it; equal bytes under a second key have that key in the name too."""
    return f"{run}/pruned/{sha256}.json", f"{run}/pruned/{sha256}-{key_sha256(key)[:16]}.json"


def _read(store: Store, where: str, key: str) -> Mark | None:
    document = store.read_manifest(where)
    if document is None:
        return None
    content = unseal(document, store.uri(where))
    return Mark(**content) if content["key"] == key else None
