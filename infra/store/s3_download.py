"""A large file from S3 in parts, taken up again where a killed process left it.

The parts go into a hidden file beside the target, which becomes the target once its digest is right.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from infra.atomic_files import locked, make_directory, sync
from infra.store.backend import Content, mismatch
from infra.store.errors import StoreUnavailable
from infra.store.options import StoreOptions, spans
from infra.store.parallel import in_parallel
from infra.store.s3_requests import NUM_BELIEVED, Changed, Head, S3Requests
from infra.store.transfer_state import read_state, remove_state, write_state
from k3core.checkpoint.new_folder import sync as sync_directory
from k3core.errors import IntegrityError


@dataclass(frozen=True, slots=True)
class DownloadState:
    """Of which version the parts are, and where those begin that are in the file."""

    uri: str
    etag: str
    part_bytes: int
    done: tuple[int, ...]


def download_file(s3: S3Requests, options: StoreOptions, path: str, content: Content, target: Path) -> None:
    """See `Backend.download`. Wrong bytes are believed when they come three times."""
    name = f".{target.name}.{content.sha256[:16]}.download"
    partial, state_file = target.with_name(name), target.with_name(f"{name}.json")
    make_directory(target.parent)
    with locked(target.with_name(f"{name}.lock")):
        answers: Counter[Content] = Counter()
        for _ in range(options.tries):
            head = s3.head(path)
            if head is None:
                raise FileNotFoundError(s3.uri(path))
            if head.size_bytes != content.size_bytes:
                raise IntegrityError(mismatch(s3.uri(path), content, Content("", head.size_bytes)))
            with suppress(Changed):
                found = _fetch(s3, options, path, head, partial, state_file)
                remove_state(state_file)
                if found == content:
                    os.replace(partial, target)
                    sync_directory(target.parent)
                    return
                partial.unlink()
                answers[found] += 1
                if answers[found] == NUM_BELIEVED:
                    raise IntegrityError(mismatch(s3.uri(path), content, found))
    raise StoreUnavailable(f"{s3.uri(path)}: replaced, or other bytes, in each of {options.tries} reads")


def _fetch(s3: S3Requests, options: StoreOptions, path: str, head: Head, partial: Path, state_file: Path) -> Content:
    """Adds the parts that `partial` lacks; what it then holds, on the disk. Raises Changed."""
    state = _left(DownloadState(s3.uri(path), head.etag, options.part_bytes, ()), partial, state_file)
    saving = threading.Lock()
    with partial.open("r+b" if state.done else "w+b") as file:

        def fetch(span: tuple[int, int]) -> None:
            nonlocal state
            _write_at(file.fileno(), s3.piece(path, *span, head.etag).data, span[0])
            with saving:
                state = replace(state, done=(*state.done, span[0]))
                write_state(state_file, state)

        missing = [span for span in spans(head.size_bytes, options.part_bytes) if span[0] not in state.done]
        write_state(state_file, state)
        in_parallel(fetch, missing, options.parallelism)
        sync(file)
        file.seek(0)
        return Content(hashlib.file_digest(file, "sha256").hexdigest(), os.fstat(file.fileno()).st_size)


def _left(fresh: DownloadState, partial: Path, state_file: Path) -> DownloadState:
    left = read_state(state_file, DownloadState) if partial.exists() else None
    if left is None:
        return fresh
    state = DownloadState(**{**left, "done": tuple(left["done"])})
    return state if replace(state, done=()) == fresh else fresh


def _write_at(descriptor: int, data: bytes, start: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, start)
        data, start = data[written:], start + written
