"""Which version every engine has acknowledged, and how a new one gets there.

A publisher that encodes against what it last sent loses the bytes that an engine failed to apply. Here the base of the
next delta is the version under a pointer that moves only once every engine holds it, by the digest of its own bytes.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np
from pydantic import TypeAdapter, ValidationError

from infra import policies
from infra.store import Conflict, Store
from infra.version_chain import chain_of, policy_key
from k3core.checkpoint.tensors import RawTensor, Weights, combine_digests, weights_sha256
from k3core.errors import IntegrityError, RunError
from k3core.model.weights import is_adapter_tensor
from k3core.sealed import canonical_json, parse_canonical, seal, unseal
from k3core.types import PolicyVersion

SCHEMA = 1


class NotServed(Exception):
    """Engines did not load the version in time, or could not: the pointer stands where it was. Another try asks those
    again, and nobody else."""

    def __init__(self, message: str, failures: Sequence[Failure]) -> None:
        super().__init__(message)
        self.failures = tuple(failures)


class ServedPolicyError(RunError):
    """An engine refused the version, or holds other weights than were published. Another try would end the same way."""

    def __init__(self, message: str, failures: Sequence[Failure] = ()) -> None:
        super().__init__(message)
        self.failures = tuple(failures)


class ServingEngine(Protocol):
    """Whatever answers requests with a policy: this process's engine, or a server's client."""

    @property
    def name(self) -> str:
        """The same for the same engine after a restart; another for every engine of the run."""

    def load(self, version: PolicyVersion) -> str:
        """Serve this version from now on; `resident_sha256` of the bytes that it then holds.

        A version that it serves already is no work. Raises OSError or any other exception when it could not, which
        another try may mend; ValueError, RunError or IntegrityError when another try would fail the same way.
        """


@dataclass(frozen=True, slots=True)
class Ack:
    """sha256: what the engine found in its own memory."""

    engine: str
    sha256: str
    acked_ms: int


@dataclass(frozen=True, slots=True)
class Failure:
    engine: str
    error: Exception

    def __str__(self) -> str:
        kind = (
            "" if isinstance(self.error, (ValueError, RunError, IntegrityError)) else f"{type(self.error).__name__}: "
        )
        return f"engine {self.engine}: {kind}{self.error}"


@dataclass(frozen=True, slots=True)
class Served:
    """The version under the pointer, and who acknowledged it when; in the order of the engines' names."""

    version: PolicyVersion
    acks: tuple[Ack, ...]


_SERVED = TypeAdapter(Served)
_ACK = TypeAdapter(Ack)


def read_served(store: Store, run: str) -> Served | None:
    """None until a version was acknowledged by all. Raises IntegrityError when the pointer was altered."""
    found = _read_pointer(store, run)
    return None if found is None else found[0]


def acked_base(store: Store, run: str, before_step: int) -> PolicyVersion | None:
    """What the next delta may stand on: the version that every engine holds.

    None when there is none, when it is an adapter, which nothing stands on, and when it does not come before the step.
    """
    served = read_served(store, run)
    if served is None or served.version.kind == "adapter" or served.version.step >= before_step:
        return None
    return served.version


def served_sha256(store: Store, version: PolicyVersion) -> str:
    """What `resident_sha256` of an engine must be once it serves `version`."""
    if version.kind != "adapter":
        return version.weights_sha256
    base = policies.read_version(store, version.run, 0)
    if base is None:
        raise ValueError(f"{version.weights.uri}: an adapter, but step 0 of run {version.run!r} is not published")
    return _with_adapter(base.weights_sha256, version.weights_sha256)


def resident_sha256(version: PolicyVersion, resident: Weights) -> str:
    """The identity of what an engine computes with, from its own bytes.

    For an adapter, base and adapter together: an engine that kept the frozen base, or another one, has another
    identity. For a version without adapter the digest of the weights; an adapter that changes something counts.
    """
    adapter = {name: raw for name, raw in resident.items() if is_adapter_tensor(name)}
    base = {name: raw for name, raw in resident.items() if name not in adapter}
    if version.kind == "adapter":
        return _with_adapter(weights_sha256(base), weights_sha256(adapter))
    is_active = any(
        name.endswith(".lora_B") and np.frombuffer(raw.data, np.uint8).any() for name, raw in adapter.items()
    )
    return weights_sha256(resident if is_active else base)


def serve(
    store: Store,
    version: PolicyVersion,
    engines: Sequence[ServingEngine],
    timeout_s: float,
    check: Callable[[], None] = lambda: None,
) -> Served:
    """Every engine loads `version`, all at the same time; then the pointer moves to it.

    Engines whose acknowledgement is in the store are not asked. An engine that joins later is served the version
    under the pointer the same way. check: called when all of them hold it; what it raises leaves the pointer where it
    is, in every try. Raises NotServed or ServedPolicyError naming each engine that failed and why, and
    leaves the pointer where it is; the acknowledgements of the others stay. Raises ValueError for a version that is
    not published here, and for one older than the pointer's: engines never go back.
    """
    names = [engine.name for engine in engines]
    if not names or len(set(names)) != len(names):
        raise ValueError(
            f"step {version.step} of run {version.run!r}: expected engines of different names, found {names}"
        )
    if policies.read_version(store, version.run, version.step) != version:
        raise ValueError(
            f"{version.weights.uri}: step {version.step} of run {version.run!r} is not published as this version"
        )
    _refuse_older(read_served(store, version.run), version)
    expected = served_sha256(store, version)
    acks = {name: ack for name in names if (ack := _find_ack(store, version, name, expected)) is not None}
    failures = _ask(
        store, version, [engine for engine in engines if engine.name not in acks], expected, acks, timeout_s
    )
    if failures:
        raise _refusal(version, failures, len(names))
    check()
    return _move_pointer(store, version, acks)


def missing_acks(store: Store, version: PolicyVersion, names: Sequence[str]) -> list[str]:
    """The engines that have not acknowledged a version."""
    expected = served_sha256(store, version)
    return [name for name in names if _find_ack(store, version, name, expected) is None]


def compact_served(store: Store, run: str, full_anchor_every: int) -> int | None:
    """A whole copy of the served version when that many files rebuild it; its step, None when none was due."""
    if full_anchor_every < 2:
        raise ValueError(f"full_anchor_every must be at least 2, found {full_anchor_every}")
    served = read_served(store, run)
    if served is None or len(chain_of(store, served.version)) < full_anchor_every:
        return None
    policies.compact(store, served.version)
    return served.version.step


@dataclass(slots=True)
class ResidentEngine:
    """A ServingEngine whose weights live in this process: it follows one run, version after version.

    install: puts weights into the engine proper. resident: what that holds now. From the parent, a version costs the
    deltas since, applied to the engine's own bytes; a fresh engine, and one whose bytes are not what it was given,
    takes the nearest whole copy and the deltas after it.
    """

    name: str
    store: Store
    install: Callable[[PolicyVersion, Weights], None]
    resident: Callable[[], Weights]
    _version: PolicyVersion | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def load(self, version: PolicyVersion) -> str:
        """Raises ValueError for a version that is older than the resident one, of another run, or not published."""
        with self._lock:  # a try that ran into its time-out may still be at it
            held = self._version
            if held is not None and (held.run != version.run or held.step > version.step):
                raise ValueError(
                    f"holds step {held.step} of run {held.run!r} and does not go back to step {version.step} of run "
                    f"{version.run!r}: start a fresh engine for it"
                )
            if held != version:
                if policies.read_version(self.store, version.run, version.step) != version:
                    raise ValueError(f"{version.weights.uri}: unknown; publish step {version.step} first")
                weights = self._advance(held, version)
                self._version = None  # half loaded is nowhere
                self.install(version, weights)
                self._version = version
            return resident_sha256(version, self.resident())

    def _advance(self, held: PolicyVersion | None, version: PolicyVersion) -> dict[str, RawTensor]:
        if held is None or held.kind == "adapter":
            return policies.load(self.store, version)
        base = {name: raw for name, raw in self.resident().items() if not is_adapter_tensor(name)}
        try:
            return policies.load(self.store, version, policies.Held(held.weights_sha256, base))
        except IntegrityError:  # of its own bytes or of the store's; the store alone tells which
            return policies.load(self.store, version)


def _ask(
    store: Store,
    version: PolicyVersion,
    engines: Sequence[ServingEngine],
    expected: str,
    acks: dict[str, Ack],
    timeout_s: float,
) -> list[Failure]:
    """One thread for each engine; adds to `acks`. A thread that is late still stores its engine's acknowledgement."""
    errors: dict[str, Exception] = {}

    def ask(engine: ServingEngine) -> None:
        try:
            found = engine.load(version)
            if found != expected:
                raise ServedPolicyError(
                    f"{version.weights.uri}: it serves other weights than step {version.step}'s: "
                    f"expected {expected}, found {found}"
                )
            ack = Ack(engine.name, found, int(time.time() * 1000))
            store.put(_ack_key(version, engine.name), canonical_json(seal({"schema": SCHEMA, **asdict(ack)})))
        except Exception as error:
            errors[engine.name] = error  # which of them are worth another try is decided over all of them
        else:
            acks[engine.name] = ack

    threads = {
        engine.name: threading.Thread(target=copy_context().run, args=(ask, engine), daemon=True) for engine in engines
    }
    for thread in threads.values():
        thread.start()
    deadline = time.monotonic() + timeout_s
    for name, thread in threads.items():
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            errors.setdefault(name, TimeoutError(f"no acknowledgement within {timeout_s:g} s"))
    return [Failure(name, errors[name]) for name in threads if name in errors]


def _refusal(version: PolicyVersion, failures: Sequence[Failure], num_engines: int) -> Exception:
    """Retriable only when every failure is."""
    final = [failure for failure in failures if isinstance(failure.error, (ValueError, RunError, IntegrityError))]
    message = (
        f"step {version.step} of run {version.run!r} is not served: {len(failures)} of {num_engines} engines failed: "
        + "; ".join(str(failure) for failure in (*final, *(one for one in failures if one not in final)))
    )
    return ServedPolicyError(message, failures) if final else NotServed(message, failures)


def _move_pointer(store: Store, version: PolicyVersion, acks: Mapping[str, Ack]) -> Served:
    while True:
        found = _read_pointer(store, version.run)
        served, token = (None, None) if found is None else found
        _refuse_older(served, version)
        known = {ack.engine: ack for ack in served.acks} if served is not None and served.version == version else {}
        merged = {**known, **acks}
        moved = Served(version, tuple(merged[name] for name in sorted(merged)))
        if served == moved:
            return moved
        document = seal({"schema": SCHEMA, **_SERVED.dump_python(moved, mode="json")})
        try:
            store.swap(_pointer_key(version.run), document, token)
        except Conflict:
            continue  # somebody else moved it: look again whether this version still comes after it
        return moved


def _refuse_older(served: Served | None, version: PolicyVersion) -> None:
    if served is not None and served.version.step > version.step:
        raise ValueError(
            f"step {version.step} of run {version.run!r}: every engine holds step {served.version.step} already, "
            "and engines do not go back"
        )
    if served is not None and served.version.step == version.step and served.version != version:
        raise IntegrityError(f"{version.weights.uri}: the pointer names another version of this step: {served.version}")


def _read_pointer(store: Store, run: str) -> tuple[Served, str] | None:
    found = store.read_pointer(_pointer_key(run))
    if found is None:
        return None
    served = _parse(_SERVED, found[0], store.uri(_pointer_key(run)))
    assert isinstance(served, Served)
    return served, found[1]


def _find_ack(store: Store, version: PolicyVersion, engine: str, expected: str) -> Ack | None:
    """Only one of the very bytes that are expected counts."""
    key = _ack_key(version, engine)
    data = store.read(key)
    if data is None:
        return None
    ack = _parse(_ACK, parse_canonical(data, store.uri(key)), store.uri(key))
    assert isinstance(ack, Ack)
    return ack if ack.sha256 == expected else None


def _parse(adapter: TypeAdapter[Any], document: Mapping[str, Any], file: str) -> Any:
    content = unseal(document, file)
    if (schema := content.pop("schema", None)) != SCHEMA:
        raise IntegrityError(f"{file}: expected schema {SCHEMA}, found {schema}")
    try:
        return adapter.validate_json(canonical_json(content))
    except ValidationError as error:
        raise IntegrityError(f"{file}: expected what engines serve, found: {error.errors()[0]['msg']}") from error


def _with_adapter(base_sha256: str, adapter_sha256: str) -> str:
    return combine_digests({"base": base_sha256, "adapter": adapter_sha256})


def _pointer_key(run: str) -> str:
    return f"{run}/serving.json"


def _ack_key(version: PolicyVersion, engine: str) -> str:
    """An engine's name may be a URL, which is no part of a key."""
    return policy_key(version.run, version.step, f"acks/{hashlib.sha256(engine.encode()).hexdigest()[:16]}.json")
