"""A store in S3: conditional writes decide, parts move large objects, digests say what arrived."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from infra.atomic_files import synced_file
from infra.store.backend import Content, Stored, content_of, mismatch
from infra.store.errors import StoreUnavailable
from infra.store.options import StoreOptions, spans
from infra.store.parallel import in_parallel
from infra.store.s3_download import download_file
from infra.store.s3_requests import NUM_BELIEVED, Changed, Piece, S3Requests
from infra.store.s3_upload import upload_file
from k3core.errors import IntegrityError


class S3Backend:
    """Paths are `bucket/key`."""

    scheme = "s3"

    def __init__(self, options: StoreOptions) -> None:
        self._options = options
        self._s3 = S3Requests(options)
        self.num_reads = options.tries

    def uri(self, path: str) -> str:
        return f"s3://{path}"

    def path(self, uri: str) -> str:
        return uri.removeprefix("s3://").rstrip("/")

    def read(self, path: str) -> Stored | None:
        return self._s3.get(path)

    def read_verified(self, path: str, content: Content) -> bytes:
        """Other bytes are read again, until it is sure that they are stored like that."""
        answers: Counter[Content] = Counter()
        for num_failed in range(1, self._options.tries + 1):
            with suppress(Changed):
                data, found, piece = self._read(path, content.size_bytes)
                if found == content:
                    return data
                answers[found] += piece.is_as_stored is not False
                is_sure = piece.is_as_stored or answers[found] >= NUM_BELIEVED
                # An old copy from in between agrees with its own ETag, but not with what HEAD knows.
                if is_sure and (head := self._s3.head(path)) is not None and head.etag == piece.etag:
                    raise IntegrityError(mismatch(self.uri(path), content, found))
            time.sleep(self._options.pause(num_failed, 0.0))
        raise StoreUnavailable(f"{self.uri(path)}: other bytes at each of {self._options.tries} reads, or replaced")

    def read_range(self, path: str, start: int, stop: int) -> bytes:
        return self._s3.piece(path, start, stop).data

    def size(self, path: str) -> int | None:
        head = self._s3.head(path)
        return None if head is None else head.size_bytes

    def write(self, path: str, data: bytes) -> None:
        if len(data) <= self._options.part_bytes:
            self._s3.put(path, data, {})
            return
        parts = spans(len(data), self._options.part_bytes_of(len(data)))
        upload_id = self._s3.begin_upload(path, content_of(data).sha256)
        try:
            etags = in_parallel(
                lambda part: self._s3.upload_part(path, upload_id, part[0], data[part[1][0] : part[1][1]]),
                enumerate(parts, 1),
                self._options.parallelism,
            )
            self._s3.complete_upload(path, upload_id, dict(enumerate(etags, 1)), is_exclusive=False)
        except BaseException:
            # What went wrong is the news. Parts that cannot be removed either cost space until `abort_uploads`.
            with suppress(StoreUnavailable):
                self._s3.abort_upload(path, upload_id)
            raise

    def create(self, path: str, data: bytes) -> bool:
        return self._s3.put(path, data, {"IfNoneMatch": "*"}) is not None

    def replace(self, path: str, data: bytes, version: str | None) -> str | None:
        return self._s3.put(path, data, {"IfNoneMatch": "*"} if version is None else {"IfMatch": version})

    def delete(self, path: str) -> None:
        self._s3.delete(path)

    def list_paths(self, prefix: str) -> Iterator[str]:
        return self._s3.list_paths(prefix)

    def upload(self, path: str, source: Path, state_folder: Path, /, *, is_exclusive: bool) -> Content | None:
        return upload_file(self._s3, self._options, path, source, state_folder, is_exclusive=is_exclusive)

    def download(self, path: str, content: Content, target: Path) -> None:
        if content.size_bytes > self._options.part_bytes:
            download_file(self._s3, self._options, path, content, target)
            return
        with synced_file(target, self.read_verified(path, content)) as written:
            written.replace(target)

    def abort_uploads(self, path: str) -> None:
        for upload_id in self._s3.uploads(path):
            self._s3.abort_upload(path, upload_id)

    def _read(self, path: str, size_bytes: int) -> tuple[bytes, Content, Piece]:
        """The bytes, what they are, and the first piece of them. Raises Changed, FileNotFoundError."""
        first, *others = spans(size_bytes, self._options.part_bytes) or [(0, 1)]
        piece = self._s3.piece(path, *first)
        if piece.total_bytes != size_bytes:
            return b"", Content("", piece.total_bytes), piece
        rest = in_parallel(lambda part: self._s3.piece(path, *part, piece.etag).data, others, self._options.parallelism)
        data = b"".join([piece.data, *rest]) if rest else piece.data
        return data, content_of(data), piece
