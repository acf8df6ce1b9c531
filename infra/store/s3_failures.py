"""What a failed S3 request means: an answer to act on, a refusal, or a reason to try again."""

from __future__ import annotations

import http.client
from typing import Literal

import urllib3.exceptions
from botocore.exceptions import (
    BotoCoreError,
    ChecksumError,
    ClientError,
    ConnectionError,
    CredentialRetrievalError,
    FlexibleChecksumError,
    HTTPClientError,
    IncompleteReadError,
    MetadataRetrievalError,
    NoAuthTokenError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
    TokenRetrievalError,
    UnauthorizedSSOTokenError,
)
from botocore.parsers import ResponseParserError

Meaning = Literal["answer", "denied", "again", "refused"]

# Answers that decide something: not there, not as expected, no such range, no such upload.
ANSWERS = frozenset({404, 412, 416})
ANSWER_CODES = frozenset({"InvalidPart", "InvalidPartOrder", "NoSuchUpload"})
DENIED = frozenset({401, 403})
DENIED_CODES = frozenset(
    {
        "AuthorizationHeaderMalformed",  # another region
        "ExpiredToken",
        "InvalidAccessKeyId",
        "InvalidBucketName",
        "InvalidToken",
        "NoSuchBucket",
        "PermanentRedirect",  # another region
        "SignatureDoesNotMatch",
        "TokenRefreshRequired",
    }
)
AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})
AGAIN_CODES = frozenset(
    {
        "BadDigest",  # altered on the way up
        "ConditionalRequestConflict",  # another writer is at it; who wins is not decided yet
        "IncompleteBody",
        "OperationAborted",
        "RequestThrottled",
        "RequestTimeout",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "XAmzContentSHA256Mismatch",  # altered on the way up
    }
)
NO_CREDENTIALS = (
    CredentialRetrievalError,
    MetadataRetrievalError,
    NoAuthTokenError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
    TokenRetrievalError,
    UnauthorizedSSOTokenError,
)


class BodyCut(Exception):
    """Fewer bytes came than the answer's own header says, or others than its ETag says."""


TRANSPORT = (
    BodyCut,
    ChecksumError,
    ConnectionError,
    FlexibleChecksumError,
    HTTPClientError,
    IncompleteReadError,
    ResponseParserError,
    urllib3.exceptions.HTTPError,
    http.client.HTTPException,
    OSError,
)
FAILURES = (ClientError, BotoCoreError, *TRANSPORT)


def meaning(error: Exception) -> Meaning:
    """`refused`: the server will not do it however often it is asked, and no credentials would help."""
    if isinstance(error, ClientError):
        status, code = status_of(error), code_of(error)
        if code in DENIED_CODES:
            return "denied"
        if code in AGAIN_CODES or status in AGAIN:
            return "again"
        if status in ANSWERS or code in ANSWER_CODES:
            return "answer"
        return "denied" if status in DENIED else "refused"
    if isinstance(error, NO_CREDENTIALS):
        return "denied"
    return "again" if isinstance(error, TRANSPORT) else "refused"


def status_of(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def code_of(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def in_words(error: Exception) -> str:
    """One line without anything that the server or a library says about the request: that may show a key."""
    if isinstance(error, ClientError):
        return f"{code_of(error)} (HTTP {status_of(error)})"
    if isinstance(error, BodyCut):
        return f"truncated answer: {error}"
    reason = error.strerror if isinstance(error, OSError) else None
    return f"{type(error).__name__}: {reason}" if reason else type(error).__name__


def host_of(endpoint: str) -> str:
    """Without the user and password that an address may hold."""
    scheme, mark, rest = endpoint.rpartition("://")
    return scheme + mark + rest.partition("/")[0].rpartition("@")[2]
