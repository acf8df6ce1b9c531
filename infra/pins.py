"""Which versions other runs go on from. gc reads them by key; whoever branches off says so before it relies on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from infra.policies import is_marked
from infra.pruned import Pruned
from infra.store import Conflict, Store
from infra.version_chain import chain_of
from k3core.errors import IntegrityError
from k3core.sealed import seal, unseal
from k3core.types import PolicyVersion

SCHEMA = 1


def pin(store: Store, version: PolicyVersion, by: str) -> None:
    """What the version needs stays while run `by` has it pinned. Once is enough, twice is the same.

    Raises Pruned when gc is taking it away: it marks before it reads the pins, and this reads the marks after pinning.
    """
    _change(store, version.run, version.step, lambda runs: {*runs, by})
    if is_marked(store, version.run, chain_of(store, version)):
        raise Pruned(f"{version.weights.uri}: gc took, or is taking, what step {version.step} needs; take another step")


def unpin(store: Store, run: str, step: int, by: str) -> None:
    _change(store, run, step, lambda runs: {*runs} - {by})


def pinned_steps(store: Store, run: str) -> dict[int, list[str]]:
    """Step -> the runs that pinned it. Raises IntegrityError when the document was altered."""
    found = store.read_pointer(_key(run))
    return {} if found is None else _parse(found[0], store.uri(_key(run)))


def _change(store: Store, run: str, step: int, change: Callable[[Iterable[str]], set[str]]) -> None:
    while True:
        found = store.read_pointer(_key(run))
        pins, token = ({}, None) if found is None else (_parse(found[0], store.uri(_key(run))), found[1])
        changed = {**pins, step: sorted(change(pins.get(step, [])))}
        if changed == pins:
            return
        document = {"schema": SCHEMA, "pins": {str(step): runs for step, runs in changed.items() if runs}}
        try:
            store.swap(_key(run), seal(document), token)
        except Conflict:
            continue  # another run pinned meanwhile: read again, and add ours
        return


def _parse(document: Mapping[str, Any], file: str) -> dict[int, list[str]]:
    content = unseal(document, file)
    if content.get("schema") != SCHEMA:
        raise IntegrityError(f"{file}: expected schema {SCHEMA}, found {content.get('schema')}")
    return {int(step): list(runs) for step, runs in content["pins"].items()}


def _key(run: str) -> str:
    return f"{run}/pins.json"
