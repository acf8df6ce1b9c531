"""An HTTP proxy in front of an S3 server that does to requests what networks and busy servers do.

As a process: `python -m infra.faults.proxy --listen PORT --target URL`; as an object: `with FaultProxy(url) as proxy`.
`/__faults` sets rules while it runs: POST a JSON list of rules, GET rules and counts, DELETE both. Requests pass
unchanged, Host included, so that signatures stay right. Messages are held in memory one at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import socket
import struct
import sys
import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from urllib.parse import urlsplit

from infra.faults.rules import ActiveRule, Fault, Rule, rule_of

CONTROL = "/__faults"
MAX_HEAD_BYTES = 1 << 20
REQUESTS_KEPT = 100_000
# What the proxy answers itself: status, reason, S3's code.
ERRORS: dict[Fault, tuple[int, str, str]] = {
    "slow_down": (503, "Slow Down", "SlowDown"),
    "internal_error": (500, "Internal Server Error", "InternalError"),
    "throttle": (429, "Too Many Requests", "TooManyRequests"),
    "forbid": (403, "Forbidden", "AccessDenied"),
}
# Between one hop and the next; S3 signs none of them.
HOP_HEADERS = (b"connection", b"expect", b"keep-alive", b"transfer-encoding")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Message:
    """A request or an answer: its first line, its headers as sent, its body without chunks."""

    first: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes

    @property
    def status(self) -> int:
        """Of an answer."""
        return int(self.first.split()[1])

    def header(self, name: bytes) -> bytes | None:
        return next((value for key, value in self.headers if key.lower() == name), None)

    def head(self, length: int | None) -> bytes:
        """length: of the body to announce; None leaves what the other side said, as an answer to HEAD needs."""
        dropped = HOP_HEADERS if length is None else (*HOP_HEADERS, b"content-length")
        lines = [self.first, *(b"%s: %s" % each for each in self.headers if each[0].lower() not in dropped)]
        if length is not None:
            lines.append(b"Content-Length: %d" % length)
        return b"\r\n".join([*lines, b"", b""])


@dataclass(frozen=True, slots=True)
class Seen:
    """A request that came by. status: of the answer the client got, 0 when it got none."""

    method: str
    target: str
    status: int
    fault: Fault | None


class FaultProxy:
    """Runs in a thread of its own between `with` and its end. Only loopback reaches it."""

    def __init__(self, target: str, port: int = 0) -> None:
        parts = urlsplit(target)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"target {target!r}: expected http://host:port")
        self._target = (parts.hostname, parts.port or 80)
        self._port = port
        self._rules: list[ActiveRule] = []
        self._earlier: dict[tuple[str, str, bytes], Message] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: asyncio.Event | None = None
        self._thread: threading.Thread | None = None
        self.counts: Counter[str] = Counter()
        self.requests: deque[Seen] = deque(maxlen=REQUESTS_KEPT)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def inject(self, *rules: Rule) -> None:
        """These rules instead of those before; of several that strike a request the first does. None: no faults."""
        self._rules = [ActiveRule(rule) for rule in rules]
        self._earlier = {}

    def clear(self) -> None:
        self.inject()
        self.counts.clear()
        self.requests.clear()

    def __enter__(self) -> FaultProxy:
        is_listening = threading.Event()

        async def live() -> None:
            self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
            server = await self.listen()
            is_listening.set()
            await self._end.wait()
            server.close()

        self._thread = threading.Thread(target=asyncio.run, args=(live(),), daemon=True)
        self._thread.start()
        if not is_listening.wait(timeout=30):
            raise OSError(f"no proxy on port {self._port}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._loop is not None
        assert self._end is not None
        assert self._thread is not None
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    async def listen(self) -> asyncio.Server:
        server = await asyncio.start_server(self._serve, "127.0.0.1", self._port, limit=MAX_HEAD_BYTES)
        self._port = server.sockets[0].getsockname()[1]
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Takes one request after the other from a client and gives each its answer, until either side ends it."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)  # asyncio itself forgets it when the client goes away first
        try:
            while (request := await _read_request(reader, writer)) is not None:
                method, target = request.first.decode("latin-1").split(" ")[:2]
                if target == CONTROL:
                    await _send(writer, self._control(method, request.body), method)
                elif not await self._pass_on(method, target, request, writer):
                    return
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client went away, or the proxy ends
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _pass_on(self, method: str, target: str, request: Message, writer: asyncio.StreamWriter) -> bool:
        """False when the client's connection is over."""
        key = (method, target, request.header(b"range") or b"")
        able = (active for active in self._rules if active.rule.fault != "stale" or key in self._earlier)
        rule = next((active.rule for active in able if active.strikes(method, target)), None)
        fault = None if rule is None else rule.fault
        if fault is not None:
            self.counts[fault] += 1
            log.info("%s: %s %s", fault, method, target)
        if rule is not None and fault == "delay":
            await asyncio.sleep(rule.delay_s)
        answer = await self._answer(request, method, fault, key)
        # Before the client has it: whoever got an answer finds the request counted.
        self.requests.append(Seen(method, target, 0 if answer is None else answer.status, fault))
        if answer is None:
            _reset(writer)
            return False
        await _send(writer, answer, method, is_cut=fault == "truncate")
        return fault != "truncate"

    async def _answer(
        self, request: Message, method: str, fault: Fault | None, key: tuple[str, str, bytes]
    ) -> Message | None:
        """None: the client gets none."""
        if fault in ERRORS:
            return _error(method, *ERRORS[fault])
        if fault == "reset":
            return None
        if fault == "stale":
            return self._earlier[key]
        if fault == "cut_request":
            await self._forward(request, method, is_cut=True)
            return None
        if fault == "corrupt_request":
            request = replace(request, body=_altered(request.body))
        try:
            answer = await self._forward(request, method)
        except (OSError, asyncio.IncompleteReadError):
            answer = None
        if answer is None:
            return _error(method, 502, "Bad Gateway", "BadGateway")
        if fault == "lose_answer":
            return None
        if fault == "truncate_silently":
            return replace(answer, body=answer.body[: len(answer.body) // 2])
        if fault == "corrupt":
            return replace(answer, body=_altered(answer.body))
        if any(active.rule.fault == "stale" and active.rule.matches(key[0], key[1]) for active in self._rules):
            self._earlier[key] = answer
        return answer

    async def _forward(self, request: Message, method: str, is_cut: bool = False) -> Message | None:
        """The server's answer. Its connection ends with it. None: half of the body was sent and no answer awaited."""
        reader, writer = await asyncio.open_connection(*self._target, limit=MAX_HEAD_BYTES)
        try:
            has_body = request.body or request.header(b"content-length") is not None
            writer.write(request.head(len(request.body) if has_body else None))
            writer.write(request.body[: len(request.body) // 2] if is_cut else request.body)
            await writer.drain()
            return None if is_cut else await _read_answer(reader, method)
        finally:
            writer.close()

    def _control(self, method: str, body: bytes) -> Message:
        if method == "POST":
            try:
                documents = json.loads(body)
                if not isinstance(documents, list):
                    raise ValueError("expected a JSON list of rules")
                self.inject(*(rule_of(document) for document in documents))
            except (ValueError, TypeError) as error:
                return _json(400, "Bad Request", {"error": str(error)})
        elif method == "DELETE":
            self.clear()
        rules = [
            {**asdict(each.rule), "num_matched": each.num_matched, "num_done": each.num_done} for each in self._rules
        ]
        requests = Counter(seen.method for seen in self.requests)
        return _json(200, "OK", {"rules": rules, "counts": dict(self.counts), "requests": dict(requests)})


async def _read_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Message | None:
    """None when the client has no more."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise
        return None
    message = _parse_head(head)
    if (message.header(b"expect") or b"").lower() == b"100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        await writer.drain()
    return replace(message, body=await _read_body(reader, message))


async def _read_answer(reader: asyncio.StreamReader, method: str) -> Message:
    while True:
        message = _parse_head(await reader.readuntil(b"\r\n\r\n"))
        if message.status >= 200:
            break
    if method == "HEAD" or message.status in (204, 304):
        return message
    has_length = message.header(b"content-length") is not None or message.header(b"transfer-encoding") is not None
    return replace(message, body=await (_read_body(reader, message) if has_length else reader.read()))


async def _read_body(reader: asyncio.StreamReader, message: Message) -> bytes:
    if b"chunked" not in (message.header(b"transfer-encoding") or b"").lower():
        return await reader.readexactly(int(message.header(b"content-length") or 0))
    body = bytearray()
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    while await reader.readuntil(b"\r\n") != b"\r\n":
        pass
    return bytes(body)


async def _send(writer: asyncio.StreamWriter, answer: Message, method: str, is_cut: bool = False) -> None:
    has_no_body = method == "HEAD" or answer.status in (204, 304)
    writer.write(answer.head(None if has_no_body else len(answer.body)))
    writer.write(answer.body[: len(answer.body) // 2] if is_cut else answer.body)
    await writer.drain()


def _parse_head(head: bytes) -> Message:
    first, *lines = head[:-4].split(b"\r\n")
    pairs = (line.partition(b":") for line in lines)
    return Message(first, tuple((name, value.strip()) for name, _, value in pairs), b"")


def _error(method: str, status: int, reason: str, code: str) -> Message:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>injected fault</Message></Error>".encode()
    headers = ((b"Content-Type", b"application/xml"),)
    return Message(f"HTTP/1.1 {status} {reason}".encode(), headers, b"" if method == "HEAD" else body)


def _json(status: int, reason: str, document: object) -> Message:
    body = json.dumps(document).encode()
    return Message(f"HTTP/1.1 {status} {reason}".encode(), ((b"Content-Type", b"application/json"),), body)


def _altered(body: bytes) -> bytes:
    middle = len(body) // 2
    return body[:middle] + bytes(byte ^ 1 for byte in body[middle : middle + 1]) + body[middle + 1 :]


def _reset(writer: asyncio.StreamWriter) -> None:
    """RST instead of FIN: what the client sees when a machine is gone."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def _run(proxy: FaultProxy) -> None:
    server = await proxy.listen()
    print(proxy.url, flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        server.close()


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m infra.faults.proxy", description=__doc__.splitlines()[0])
    parser.add_argument("--listen", type=int, default=0, metavar="PORT", help="0: a free one; its address is printed")
    parser.add_argument("--target", required=True, metavar="URL")
    parsed = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    proxy = FaultProxy(parsed.target, parsed.listen)
    try:
        asyncio.run(_run(proxy))
    except KeyboardInterrupt:
        log.info("%s", dict(proxy.counts))


if __name__ == "__main__":
    main(sys.argv[1:])
