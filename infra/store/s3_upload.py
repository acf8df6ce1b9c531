"""A large file to S3 in parts, taken up again where a killed process left it.

A small state file says which upload is under way and which parts are done. It only saves work: what it says is checked
with the server.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from infra.atomic_files import locked, make_directory
from infra.fence import pass_fence
from infra.store.backend import Content, content_of
from infra.store.errors import StoreUnavailable
from infra.store.options import StoreOptions, spans
from infra.store.parallel import in_parallel
from infra.store.s3_requests import S3Requests, UploadGone
from infra.store.transfer_state import read_state, remove_state, write_state
from k3core.errors import RunError


@dataclass(frozen=True, slots=True)
class UploadState:
    """Parts of `size_bytes` bytes with this digest, on their way. `etags` are by part number.

    An ETag that the server gave for a part is believed while the source still has `mtime_ns`.
    """

    uri: str
    sha256: str
    size_bytes: int
    part_bytes: int
    mtime_ns: int
    upload_id: str
    etags: Mapping[str, str]


def upload_file(
    s3: S3Requests, options: StoreOptions, path: str, source: Path, state_folder: Path, *, is_exclusive: bool
) -> Content | None:
    """See `Backend.upload`. Raises RunError when the source changes meanwhile; nothing is stored then."""
    name = f".{source.name}.{hashlib.sha256(path.encode()).hexdigest()[:16]}.upload"
    state_file, lock_file = state_folder / f"{name}.json", state_folder / f"{name}.lock"
    with source.open("rb") as file:
        before = os.fstat(file.fileno())
        if before.st_size <= options.part_bytes:
            return _upload_whole(s3, path, file.read(), is_exclusive=is_exclusive)
        content = Content(hashlib.file_digest(file, "sha256").hexdigest(), before.st_size)
        if is_exclusive and (head := s3.head(path)) is not None:
            if state_file.exists() or lock_file.exists():  # of a try that was killed after it was done
                with locked(lock_file):
                    remove_state(state_file)
            return content if head.content == content else None
        make_directory(state_folder)
        with locked(lock_file):
            upload = _Upload(s3, options, path, content, file.fileno(), before.st_mtime_ns, state_file)
            upload.send_parts()
            after = source.stat()
            if (after.st_ino, after.st_mtime_ns) != (before.st_ino, before.st_mtime_ns):
                raise RunError(f"{source}: changed while it was being stored; nothing was")
            return content if upload.complete(is_exclusive=is_exclusive) else None


def _upload_whole(s3: S3Requests, path: str, data: bytes, *, is_exclusive: bool) -> Content | None:
    content = content_of(data)
    if s3.put(path, data, {"IfNoneMatch": "*"} if is_exclusive else {}) is None and not _holds(s3, path, content):
        return None
    return content


class _Upload:
    """One upload, its state on the disk. The caller holds the lock beside it."""

    def __init__(
        self,
        s3: S3Requests,
        options: StoreOptions,
        path: str,
        content: Content,
        descriptor: int,
        mtime_ns: int,
        state_file: Path,
    ) -> None:
        self._s3, self._path, self._content = s3, path, content
        self._parallelism = options.parallelism
        self._descriptor = descriptor
        self._state_file = state_file
        self._saving = threading.Lock()
        part_bytes = options.part_bytes_of(content.size_bytes)
        self._parts = dict(enumerate(spans(content.size_bytes, part_bytes), 1))
        self._state = self._taken_up_or_begun(
            UploadState(s3.uri(path), content.sha256, content.size_bytes, part_bytes, mtime_ns, "", {})
        )

    def send_parts(self) -> None:
        """Those that the server lacks. Raises StoreUnavailable when it forgot the upload."""

        def send(number: int) -> None:
            etag = self._s3.upload_part(self._path, self._state.upload_id, number, self._read(number))
            with self._saving:
                self._save(replace(self._state, etags={**self._state.etags, str(number): etag}))

        missing = [number for number in self._parts if str(number) not in self._state.etags]
        try:
            in_parallel(send, missing, self._parallelism)
        except UploadGone as error:
            raise self._forgotten() from error

    def complete(self, *, is_exclusive: bool) -> bool:
        """False when other content stands there; the parts are gone then."""
        pass_fence()
        etags = {int(number): etag for number, etag in self._state.etags.items()}
        try:
            if not self._s3.complete_upload(self._path, self._state.upload_id, etags, is_exclusive=is_exclusive):
                self._s3.abort_upload(self._path, self._state.upload_id)
        except UploadGone as error:
            # Done by a try whose answer got lost, or else aborted by somebody.
            if not _holds(self._s3, self._path, self._content):
                raise self._forgotten() from error
        remove_state(self._state_file)
        # Also of one that was first: SeaweedFS looks and writes in two steps, and of two uploads that end at the same
        # moment the later replaces the earlier.
        return not is_exclusive or _holds(self._s3, self._path, self._content)

    def _taken_up_or_begun(self, fresh: UploadState) -> UploadState:
        left = read_state(self._state_file, UploadState)
        if left is not None:
            state = UploadState(**left)
            if replace(state, mtime_ns=fresh.mtime_ns, upload_id="", etags={}) == fresh:
                with suppress(UploadGone):
                    believed = state.etags if state.mtime_ns == fresh.mtime_ns else {}
                    return replace(state, mtime_ns=fresh.mtime_ns, etags=self._confirmed(state.upload_id, believed))
            elif state.uri == fresh.uri:
                self._s3.abort_upload(self._path, state.upload_id)
        state = replace(fresh, upload_id=self._s3.begin_upload(self._path, self._content.sha256))
        self._save(state)
        return state

    def _confirmed(self, upload_id: str, believed: Mapping[str, str]) -> dict[str, str]:
        """The parts that the server has: of the right size, with the ETag it gave us or that the bytes come to."""
        confirmed: dict[str, str] = {}
        for number, etag, size_bytes in self._s3.uploaded_parts(self._path, upload_id):
            start, stop = self._parts.get(number, (0, 0))
            if size_bytes == stop - start and (
                believed.get(str(number)) == etag
                or hashlib.md5(self._read(number), usedforsecurity=False).hexdigest() == etag.strip('"')
            ):
                confirmed[str(number)] = etag
        return confirmed

    def _read(self, number: int) -> bytes:
        start, stop = self._parts[number]
        return os.pread(self._descriptor, stop - start, start)

    def _save(self, state: UploadState) -> None:
        self._state = state
        write_state(self._state_file, state)

    def _forgotten(self) -> StoreUnavailable:
        remove_state(self._state_file)
        return StoreUnavailable(f"{self._s3.uri(self._path)}: the server forgot the upload; the next try begins anew")


def _holds(s3: S3Requests, path: str, content: Content) -> bool:
    head = s3.head(path)
    return head is not None and head.content == content
