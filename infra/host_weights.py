"""Weights of a version as one file on this machine, made once for all engine processes that share the folder.

The first process that asks applies the delta to the file of the version before, under a lock; the others find the new
file and map it. What the folder starts from are the store's bytes or the engine's own, never the trainer's memory.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock

from infra import policies
from infra.mapped_weights import lay_out_like, map_weights
from infra.store import Store
from infra.version_chain import chain_of, explained
from k3core.checkpoint.chain import Manifest, result_digests
from k3core.checkpoint.delta import apply_delta
from k3core.checkpoint.tensors import RawTensor, combine_digests, weights_sha256
from k3core.errors import IntegrityError
from k3core.types import PolicyVersion

FOLDER = "K3_HOST_WEIGHTS"
KEEP = 2  # the newest, and what it was made from


def load_shared(store: Store, version: PolicyVersion) -> dict[str, RawTensor]:
    """A version's weights, through the folder that the environment names, if it names one (K3_HOST_WEIGHTS)."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return policies.load(store, version)
    return map_weights(HostWeights(Path(folder), store).at(version))


@dataclass(slots=True)
class HostWeights:
    """num_deltas, num_rebuilt: files that this object made from the file before, and from a whole copy in the store.

    Neither a version nor what it is made from is ever held in memory: a delta goes from one mapped file into another.
    """

    folder: Path
    store: Store
    lock_timeout_s: float = 600.0
    num_deltas: int = 0
    num_rebuilt: int = 0
    _thread_lock: threading.Lock = field(default_factory=threading.Lock)

    def at(self, version: PolicyVersion) -> Path:
        """The file of `version`, whole and checked. An open map of it stays valid when the file is dropped later.

        Waits for another process that makes it; filelock.Timeout, an OSError, after lock_timeout_s. A file that is not
        what it must be is made again. Raises IntegrityError when the store's own bytes are broken.
        """
        folder = self._folder(version.run)
        path = folder / _file_name(version)
        with self._thread_lock, FileLock(folder / ".lock", timeout=self.lock_timeout_s):
            for torn in folder.glob("*.tmp"):  # whoever wrote it died: the lock is ours
                torn.unlink()
            if not _is_whole(path, version.weights_sha256):
                _give_name(self._make(folder, version), path, version.weights_sha256)
            os.utime(_stamp(path))  # the order in which files were asked for
            _drop_old(folder, path)
            return path

    def seed(self, version: PolicyVersion, file: Path) -> Path:
        """Take a copy of a file that an engine has already. Raises IntegrityError when it holds other weights."""
        weights = map_weights(file)
        if (found := weights_sha256(weights)) != version.weights_sha256:
            raise IntegrityError(
                f"{file}: expected weights {version.weights_sha256} of step {version.step}, found {found}"
            )
        folder = self._folder(version.run)
        path = folder / _file_name(version)
        with self._thread_lock, FileLock(folder / ".lock", timeout=self.lock_timeout_s):
            written = _temporary(folder)
            shutil.copyfile(file, written)
            _give_name(written, path, version.weights_sha256)
            _drop_old(folder, path)
        return path

    def _folder(self, run: str) -> Path:
        folder = self.folder / run
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _make(self, folder: Path, version: PolicyVersion) -> Path:
        """A temporary file: from one of a version before where there is one that is sound, else from the store alone."""
        found = self._start(folder, version)
        if found is not None:
            try:
                made = self._advanced(folder, version, *found)
            except IntegrityError:
                pass  # of the file or of the store's bytes; the store alone tells which
            else:
                self.num_deltas += 1
                return made
        made = self._advanced(folder, version, None, chain_of(self.store, version))
        self.num_rebuilt += 1
        return made

    def _start(self, folder: Path, version: PolicyVersion) -> tuple[Path, tuple[Manifest, ...]] | None:
        """The newest file that deltas on the way to `version` stand on, and those deltas."""
        for path in sorted(folder.glob("policy-*.safetensors"), reverse=True):
            digest = _stamped(path).get("weights_sha256", "")
            if not digest or not _is_whole(path, digest):
                continue
            chain = chain_of(self.store, version, {digest})
            if chain and chain[0].kind == "delta":
                return path, chain
        return None

    def _advanced(self, folder: Path, version: PolicyVersion, start: Path | None, chain: Sequence[Manifest]) -> Path:
        """Link by link, each into a file of its own, since a delta's base is read to its end."""
        at = start
        for link in chain:
            made = _temporary(folder)
            with explained(self.store, version.run, link.payload):
                if link.kind == "delta":
                    assert at is not None, "a chain begins with a whole version"
                    _apply(link, at, self.store.get(link.payload), made)
                else:
                    self.store.get_file(link.payload, made)
                    _require_weights(link, weights_sha256(map_weights(made)))
            if at is not None and at != start:
                at.unlink()
            at = made
        assert at is not None, "a version that is not held has a chain"
        return at


def _apply(link: Manifest, base: Path, payload: bytes, made: Path) -> None:
    """Every tensor of the base and of the result is held against its digest."""
    laid = lay_out_like(base, made)
    apply_delta(
        map_weights(base),
        link.entries,
        payload,
        link.payload.uri,
        num_threads=policies.NUM_THREADS,
        out=laid.views,
    )
    laid.flush()
    _require_weights(link, combine_digests(result_digests(link)))


def _require_weights(link: Manifest, found: str) -> None:
    if found != link.weights_sha256:
        raise IntegrityError(f"{link.payload.uri}: expected weights with sha256 {link.weights_sha256}, found {found}")


def _file_name(version: PolicyVersion) -> str:
    kind = "adapter" if version.kind == "adapter" else "policy"
    return f"{kind}-{version.step:06d}-{version.weights_sha256[:16]}.safetensors"


def _stamp(path: Path) -> Path:
    """Beside a file: what it holds and what the file system said of it when it was checked."""
    return path.with_suffix(".stamp")


def _stamped(path: Path) -> Mapping[str, str]:
    try:
        document = json.loads(_stamp(path).read_bytes())
    except (FileNotFoundError, ValueError):  # a crash between the file and its stamp: the file is checked again
        return {}
    return document if isinstance(document, dict) else {}


def _is_whole(path: Path, expected: str) -> bool:
    """By the stamp while the file is as it was when it was checked, else by digest."""
    if not path.exists():
        return False
    if _stamped(path) == _description(path, expected):
        return True
    try:
        found = weights_sha256(map_weights(path))
    except IntegrityError:
        return False
    if found != expected:
        return False
    _write_stamp(path, expected)
    return True


def _give_name(written: Path, path: Path, digest: str) -> None:
    """The file is on the disk before it has its name, and has its stamp last."""
    _stamp(path).unlink(missing_ok=True)
    _sync(written)
    os.replace(written, path)
    _write_stamp(path, digest)


def _write_stamp(path: Path, digest: str) -> None:
    written = _temporary(path.parent)
    written.write_text(json.dumps(_description(path, digest)))
    _sync(written)
    os.replace(written, _stamp(path))


def _temporary(folder: Path) -> Path:
    return folder / f"{uuid.uuid4().hex}.tmp"


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _description(path: Path, digest: str) -> dict[str, str]:
    stat = path.stat()
    return {
        "weights_sha256": digest,
        "size_bytes": str(stat.st_size),
        "mtime_ns": str(stat.st_mtime_ns),
        "ctime_ns": str(stat.st_ctime_ns),
        "inode": str(stat.st_ino),
    }


def _drop_old(folder: Path, current: Path) -> None:
    """Keeps the last KEEP files of a kind that were asked for: an adapter stands on a base, which must not go for it."""
    kind = current.name.partition("-")[0]
    files = [path for path in folder.glob(f"{kind}-*.safetensors") if path != current]
    files.sort(key=lambda path: _stamp(path).stat().st_mtime_ns if _stamp(path).exists() else 0)
    for path in files[: -(KEEP - 1)]:
        path.unlink()
        _stamp(path).unlink(missing_ok=True)
