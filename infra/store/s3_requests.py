"""Single S3 requests, each tried until it is answered.

botocore and not s3fs: an answer lost on the way, a body cut in the middle and a lost race must be told apart, which
s3fs turns into one kind of OSError; and a plain client has no listing cache and no event loop to lose in a fork.
Only one layer retries, this one.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import time
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import botocore.session
from botocore.config import Config
from botocore.exceptions import ClientError

from infra.fence import pass_fence
from infra.store.backend import Content, Stored
from infra.store.errors import StoreDenied, StoreUnavailable
from infra.store.options import StoreOptions
from infra.store.s3_failures import FAILURES, BodyCut, host_of, in_words, meaning, status_of
from k3core.errors import RunError

Answer = TypeVar("Answer")

ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
LOOK_AT = "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION and AWS_ENDPOINT_URL_S3"
# Every object carries the digest of its bytes, so that equal content is known without reading it.
DIGEST = "sha256"
# Equal answers that say something else than the ETag, or the expected digest, before they are taken for what is stored.
NUM_BELIEVED = 3


@dataclass(frozen=True, slots=True)
class Head:
    """`content` is None for an object that somebody else stored, without a digest."""

    etag: str
    size_bytes: int
    content: Content | None


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a range, the version they are of, and the size of the whole object.

    is_as_stored: whether the server's own digest says that no byte changed on the way; None where it has none.
    """

    data: bytes
    etag: str
    total_bytes: int
    is_as_stored: bool | None


class Changed(Exception):
    """The object is another one than when its first piece was read."""


class UploadGone(Exception):
    """The server does not know the upload, or not its parts: completed, aborted or expired."""


class S3Requests:
    """Paths are `bucket/key`. Credentials, region and endpoint are the environment's at each request.

    Raises StoreDenied at once, StoreUnavailable after all tries, RunError for what the server cannot do.
    """

    def __init__(self, options: StoreOptions) -> None:
        self._options = options

    def uri(self, path: str) -> str:
        return f"s3://{path}"

    def get(self, path: str) -> Stored | None:
        """Checked against the ETag. It may look like a digest and be none: so many equal answers are believed."""
        answers: Counter[bytes] = Counter()

        def ask(client: Any, where: Mapping[str, str]) -> Stored:
            response = client.get_object(**where)
            data: bytes = response["Body"].read()
            if _is_as_stored(response, data) is False:
                answers[hashlib.sha256(data).digest()] += 1
                if answers.most_common(1)[0][1] < NUM_BELIEVED:
                    raise BodyCut(f"{len(data)} bytes that do not match their ETag")
            return Stored(data, response["ETag"])

        return self._unless_missing(path, ask)

    def piece(self, path: str, start: int, stop: int, etag: str | None = None) -> Piece:
        """[start, stop), stop > start. Raises FileNotFoundError, and Changed when the object is not `etag`."""
        condition = {} if etag is None else {"IfMatch": etag}

        def ask(client: Any, where: Mapping[str, str]) -> Piece:
            response = client.get_object(**where, **condition, Range=f"bytes={start}-{stop - 1}")
            data: bytes = response["Body"].read()
            match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", response.get("ContentRange", ""))
            if match is None:  # the whole object, from a server without ranges
                return Piece(data[start:stop], response["ETag"], len(data), _is_as_stored(response, data))
            first, last, total = (int(number) for number in match.groups())
            if first != start or len(data) != last - first + 1:
                raise BodyCut(f"{len(data)} bytes of the range {start}-{stop - 1}")
            is_as_stored = _is_as_stored(response, data) if len(data) == total else None
            return Piece(data, response["ETag"], total, is_as_stored)

        try:
            return self._request(path, ask)
        except ClientError as error:
            if status_of(error) == 412:
                raise Changed(path) from error
            if status_of(error) == 416 and (head := self.head(path)) is not None:
                return Piece(b"", head.etag, head.size_bytes, None)
            raise FileNotFoundError(self.uri(path)) from error

    def head(self, path: str) -> Head | None:
        response = self._unless_missing(path, lambda client, where: client.head_object(**where))
        if response is None:
            return None
        size, digest = int(response["ContentLength"]), response.get("Metadata", {}).get(DIGEST)
        return Head(response["ETag"], size, None if digest is None else Content(digest, size))

    def put(self, path: str, data: bytes, condition: Mapping[str, str]) -> str | None:
        """The ETag; None when the condition does not hold, which is also what a write whose answer got lost leaves."""
        body = {**_body(data), "Metadata": {DIGEST: hashlib.sha256(data).hexdigest()}}
        try:
            response = self._request(path, lambda client, where: client.put_object(**where, **condition, **body))
        except ClientError as error:
            # 404: some servers say so when If-Match meets no object.
            if not condition or status_of(error) not in (404, 412):
                raise
            return None
        return str(response["ETag"])

    def delete(self, path: str) -> None:
        self._unless_missing(path, lambda client, where: client.delete_object(**where))

    def list_paths(self, prefix: str) -> Iterator[str]:
        bucket = prefix.partition("/")[0]
        page: dict[str, str] = {}
        while True:
            answer = self._page(prefix, "list_objects_v2", page)
            for entry in answer.get("Contents", ()):
                if not entry["Key"].endswith("/"):  # a folder, on servers that have them
                    yield f"{bucket}/{entry['Key']}"
            if not answer.get("IsTruncated"):
                return
            page = {"ContinuationToken": answer["NextContinuationToken"]}

    def begin_upload(self, path: str, sha256: str) -> str:
        answer = self._request(
            path, lambda client, where: client.create_multipart_upload(**where, Metadata={DIGEST: sha256})
        )
        return str(answer["UploadId"])

    def upload_part(self, path: str, upload_id: str, number: int, data: bytes) -> str:
        """The part's ETag. Raises UploadGone."""
        body = _body(data)
        answer = self._of_upload(
            path, lambda client, where: client.upload_part(**where, UploadId=upload_id, PartNumber=number, **body)
        )
        return str(answer["ETag"])

    def uploaded_parts(self, path: str, upload_id: str) -> list[tuple[int, str, int]]:
        """Number, ETag and size of the parts that the server has. Raises UploadGone.

        Some servers keep each of those that were sent under one number; the ETag chooses when the upload is completed.
        """
        marker = 0

        def ask(client: Any, where: Mapping[str, str]) -> Any:
            return client.list_parts(**where, UploadId=upload_id, PartNumberMarker=marker)

        found: list[tuple[int, str, int]] = []
        while True:
            answer = self._of_upload(path, ask)
            found += [(part["PartNumber"], part["ETag"], int(part["Size"])) for part in answer.get("Parts", ())]
            if not answer.get("IsTruncated"):
                return found
            marker = answer["NextPartNumberMarker"]

    def complete_upload(self, path: str, upload_id: str, etags: Mapping[int, str], *, is_exclusive: bool) -> bool:
        """False when `is_exclusive` and the object exists, which may be this one. Raises UploadGone."""
        parts = [{"PartNumber": number, "ETag": etags[number]} for number in sorted(etags)]
        condition = {"IfNoneMatch": "*"} if is_exclusive else {}
        try:
            self._of_upload(
                path,
                lambda client, where: client.complete_multipart_upload(
                    **where, **condition, UploadId=upload_id, MultipartUpload={"Parts": parts}
                ),
            )
        except ClientError as error:
            if status_of(error) != 412:
                raise
            return False
        return True

    def abort_upload(self, path: str, upload_id: str) -> None:
        self._unless_missing(path, lambda client, where: client.abort_multipart_upload(**where, UploadId=upload_id))

    def uploads(self, path: str) -> list[str]:
        """Ids of the unfinished uploads to exactly this path."""
        key = path.partition("/")[2]
        found: list[str] = []
        page: dict[str, str] = {}
        while True:
            answer = self._page(path, "list_multipart_uploads", page)
            found += [upload["UploadId"] for upload in answer.get("Uploads", ()) if upload["Key"] == key]
            if not answer.get("IsTruncated"):
                return found
            page = {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}

    def _page(self, path: str, operation: str, page: Mapping[str, str]) -> Any:
        return self._request(
            path,
            lambda client, where: getattr(client, operation)(Bucket=where["Bucket"], Prefix=where["Key"], **page),
        )

    def _unless_missing(self, path: str, ask: Callable[[Any, Mapping[str, str]], Answer]) -> Answer | None:
        try:
            return self._request(path, ask)
        except ClientError as error:
            if status_of(error) != 404:
                raise
            return None

    def _of_upload(self, path: str, ask: Callable[[Any, Mapping[str, str]], Answer]) -> Answer:
        try:
            return self._request(path, ask)
        except ClientError as error:
            if status_of(error) == 412:
                raise
            raise UploadGone(f"{self.uri(path)}: {in_words(error)}") from error

    def _request(self, path: str, ask: Callable[[Any, Mapping[str, str]], Answer]) -> Answer:
        """Raises ClientError only where its meaning is an answer."""
        bucket, _, key = path.partition("/")
        where = {"Bucket": bucket, "Key": key}
        began = time.monotonic()
        num_failed = 0
        while True:
            try:
                return ask(self._connected(), where)
            except FAILURES as error:
                endpoint = _endpoint_shown()
                what = meaning(error)
                if what == "answer":
                    raise
                if what == "denied":
                    raise StoreDenied(
                        f"{self.uri(path)}: no access to bucket {bucket!r} at {endpoint}: {in_words(error)}; "
                        f"see {LOOK_AT}"
                    ) from error
                if what == "refused":
                    raise RunError(f"{self.uri(path)}: {endpoint} refuses the request: {in_words(error)}") from error
                num_failed += 1
                if num_failed == self._options.tries:
                    raise StoreUnavailable(
                        f"{self.uri(path)}: {endpoint} failed {num_failed} tries in {time.monotonic() - began:.1f} s, "
                        f"the last with {in_words(error)}"
                    ) from error
            time.sleep(self._options.pause(num_failed, random.random()))
            pass_fence()

    def _connected(self) -> Any:
        environment = tuple(sorted(item for item in os.environ.items() if item[0].startswith("AWS_")))
        try:
            return _client(os.getpid(), environment, self._options)
        except ValueError as error:
            raise StoreDenied(f"{_endpoint_shown()!r} is no address of an S3 server; see {LOOK_AT}") from error


@lru_cache(maxsize=8)
def _client(_pid: int, environment: tuple[tuple[str, str], ...], options: StoreOptions) -> Any:
    """One for all stores of a process, as it takes 60 ms; of this process, as connections do not survive a fork."""
    variables = dict(environment)
    endpoint = _endpoint(variables)
    config = Config(
        connect_timeout=options.connect_timeout_s,
        read_timeout=options.read_timeout_s,
        max_pool_connections=4 * options.parallelism,
        retries={"total_max_attempts": 1, "mode": "standard"},
        # A bucket is a path on servers of one's own, whose names have no subdomains.
        s3={"addressing_style": "auto" if endpoint is None else "path"},
        request_checksum_calculation="when_required",  # bodies carry their MD5 digest, which all servers check
    )
    region = variables.get("AWS_REGION") or variables.get("AWS_DEFAULT_REGION")
    return botocore.session.get_session().create_client("s3", region_name=region, endpoint_url=endpoint, config=config)


def _endpoint(variables: Mapping[str, str]) -> str | None:
    return next((url for name in ENDPOINTS if (url := variables.get(name))), None)


def _endpoint_shown() -> str:
    return host_of(_endpoint(os.environ) or "https://s3.amazonaws.com")


def _body(data: bytes) -> dict[str, Any]:
    """With a digest that the server checks before anything is stored."""
    return {"Body": data, "ContentMD5": b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()}


def _is_as_stored(response: Mapping[str, Any], data: bytes) -> bool | None:
    """Whether the ETag is the MD5 digest of a whole body; None where it is no digest: parts and keys make it another."""
    etag = str(response["ETag"]).strip('"')
    has_key = "SSECustomerAlgorithm" in response or "kms" in response.get("ServerSideEncryption", "")
    if has_key or not re.fullmatch(r"[0-9a-f]{32}", etag):
        return None
    return hashlib.md5(data, usedforsecurity=False).hexdigest() == etag
