import http.client
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from infra.faults.proxy import FaultProxy
from infra.faults.rules import ActiveRule, Fault, Rule, rule_of


class Echo(BaseHTTPRequestHandler):
    """Answers with what it got: a number that grows, the Host header and the body."""

    protocol_version = "HTTP/1.1"
    received: list[tuple[str, bytes]]

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if len(body) < int(self.headers.get("Content-Length", 0)):
            return
        self.received.append((self.command, body))
        answer = json.dumps([len(self.received), self.headers["Host"], body.decode()]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer)

    do_PUT = do_POST = do_HEAD = do_DELETE = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def received() -> list[tuple[str, bytes]]:
    return []


@pytest.fixture
def server(received: list[tuple[str, bytes]]) -> Iterator[str]:
    handler = type("Handler", (Echo,), {"received": received})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def proxy(server: str) -> Iterator[FaultProxy]:
    with FaultProxy(server) as proxy:
        yield proxy


def ask(url: str, method: str = "GET", path: str = "/bucket/key", body: bytes | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)
    try:
        connection.request(method, path, body, {"Host": "signed-host"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_without_rules_everything_passes_unchanged(proxy: FaultProxy) -> None:
    assert ask(proxy.url, "PUT", body=b"text") == (200, b'[1, "signed-host", "text"]')
    assert ask(proxy.url, "HEAD") == (200, b"")
    assert ask(proxy.url) == (200, b'[3, "signed-host", ""]')
    assert [(seen.method, seen.target, seen.status) for seen in proxy.requests] == [
        ("PUT", "/bucket/key", 200),
        ("HEAD", "/bucket/key", 200),
        ("GET", "/bucket/key", 200),
    ]
    assert not proxy.counts


def test_a_connection_is_kept_for_many_requests_also_of_unknown_length(proxy: FaultProxy) -> None:
    connection = http.client.HTTPConnection(proxy.url.removeprefix("http://"), timeout=10)
    for number in range(1, 4):
        connection.request("PUT", "/k", iter([b"in ", b"chunks"]), {"Host": "h"}, encode_chunked=True)
        assert connection.getresponse().read() == f'[{number}, "h", "in chunks"]'.encode()
    connection.close()


@pytest.mark.parametrize(
    ("fault", "status", "code"),
    [
        ("slow_down", 503, b"SlowDown"),
        ("internal_error", 500, b"InternalError"),
        ("throttle", 429, b"TooManyRequests"),
        ("forbid", 403, b"AccessDenied"),
    ],
)
def test_refusals_never_reach_the_server(
    proxy: FaultProxy, received: list[tuple[str, bytes]], fault: Fault, status: int, code: bytes
) -> None:
    proxy.inject(Rule(fault))
    found, body = ask(proxy.url, "PUT", body=b"text")
    assert found == status
    assert b"<Code>" + code + b"</Code>" in body
    assert not received


@pytest.mark.parametrize(("fault", "num_received"), [("reset", 0), ("cut_request", 0), ("lose_answer", 1)])
def test_broken_connections_break_before_or_after_the_server_did_it(
    proxy: FaultProxy, received: list[tuple[str, bytes]], fault: Fault, num_received: int
) -> None:
    proxy.inject(Rule(fault))
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        ask(proxy.url, "PUT", body=b"text")
    assert len(received) == num_received
    assert proxy.requests[0].status == 0


def test_answers_are_cut_with_and_without_saying_so(proxy: FaultProxy) -> None:
    proxy.inject(Rule("truncate"))
    with pytest.raises(http.client.IncompleteRead):
        ask(proxy.url)
    proxy.inject(Rule("truncate_silently"))
    assert ask(proxy.url) == (200, b'[2, "signed')


def test_one_byte_is_altered_on_either_way(proxy: FaultProxy, received: list[tuple[str, bytes]]) -> None:
    proxy.inject(Rule("corrupt_request"))
    ask(proxy.url, "PUT", body=b"abc")
    assert received == [("PUT", b"acc")]
    proxy.inject(Rule("corrupt"))
    assert ask(proxy.url) == (200, b'[2, "signed,host", ""]')


def test_an_old_answer_comes_again(proxy: FaultProxy) -> None:
    proxy.inject(Rule("stale", "GET", "key", limit=1))
    first = ask(proxy.url)
    assert ask(proxy.url) == first
    assert ask(proxy.url) == (200, b'[2, "signed-host", ""]')
    assert proxy.counts == {"stale": 1}


def test_a_late_request_is_done_though_nobody_waits_for_it(
    proxy: FaultProxy, received: list[tuple[str, bytes]]
) -> None:
    proxy.inject(Rule("delay", delay_s=0.3))
    connection = http.client.HTTPConnection(proxy.url.removeprefix("http://"), timeout=0.05)
    connection.request("PUT", "/k", b"late")
    with pytest.raises(TimeoutError):
        connection.getresponse()
    connection.close()
    while not received:
        time.sleep(0.01)
    assert received == [("PUT", b"late")]


def test_rules_choose_by_method_key_order_and_number(proxy: FaultProxy) -> None:
    proxy.inject(
        Rule("slow_down", "PUT|POST", r"partNumber=[23]$", skip=1, limit=1), Rule("forbid", "DELETE", "/protected/")
    )
    asked = [
        ("PUT", "/k?partNumber=1"),
        ("GET", "/k?partNumber=2"),
        ("PUT", "/k?partNumber=2"),
        ("POST", "/k?partNumber=3"),
        ("PUT", "/k?partNumber=2"),
        ("DELETE", "/protected/k"),
        ("DELETE", "/k"),
    ]
    assert [ask(proxy.url, *each)[0] for each in asked] == [200, 200, 200, 503, 200, 403, 200]


def test_equal_seeds_strike_equally() -> None:
    def struck(seed: int) -> list[bool]:
        active = ActiveRule(Rule("reset", probability=0.3, seed=seed))
        return [active.strikes("GET", "/k") for _ in range(200)]

    assert struck(1) == struck(1) != struck(2)
    assert 30 < sum(struck(1)) < 90


def test_rules_are_set_read_and_cleared_while_it_runs(proxy: FaultProxy) -> None:
    rules = json.dumps([{"fault": "slow_down", "method": "GET", "limit": 1}]).encode()
    assert ask(proxy.url, "POST", "/__faults", rules)[0] == 200
    assert [ask(proxy.url)[0] for _ in range(2)] == [503, 200]
    state = json.loads(ask(proxy.url, "GET", "/__faults")[1])
    assert state["counts"] == {"slow_down": 1}
    assert state["requests"] == {"GET": 2}
    assert (state["rules"][0]["num_matched"], state["rules"][0]["num_done"]) == (2, 1)
    assert json.loads(ask(proxy.url, "DELETE", "/__faults")[1]) == {"rules": [], "counts": {}, "requests": {}}


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ("nonsense", "Expecting value"),
        ({"fault": "reset"}, "expected a JSON list"),
        ([{"method": "GET"}], "expected an object with `fault`"),
        ([{"fault": "reset", "when": 1}], "expected an object with `fault`"),
        ([{"fault": "rest"}], "expected one of slow_down"),
        ([{"fault": "reset", "key": "("}], "no regular expression"),
        ([{"fault": "reset", "probability": 2}], "expected a probability"),
    ],
)
def test_rules_that_are_none_are_refused_and_the_old_ones_stay(proxy: FaultProxy, rules: object, words: str) -> None:
    proxy.inject(Rule("slow_down"))
    body = rules if isinstance(rules, str) else json.dumps(rules)
    status, answer = ask(proxy.url, "POST", "/__faults", body.encode())
    assert status == 400
    assert words in json.loads(answer)["error"]
    assert ask(proxy.url)[0] == 503


def test_a_rule_comes_from_what_it_was_written_to() -> None:
    assert rule_of({"fault": "delay", "delay_s": 2.5, "key": "x"}) == Rule("delay", key="x", delay_s=2.5)


def test_a_server_that_is_gone_is_a_bad_gateway() -> None:
    with FaultProxy("http://127.0.0.1:9") as proxy:
        assert ask(proxy.url)[0] == 502


def test_a_target_that_is_no_address_is_refused() -> None:
    with pytest.raises(ValueError, match="expected http://host:port"):
        FaultProxy("localhost:8333")


def test_it_runs_as_a_process(server: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "infra.faults.proxy", "--target", server], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+", url)
        ask(url, "POST", "/__faults", b'[{"fault": "forbid"}]')
        assert ask(url)[0] == 403
    finally:
        process.kill()
        process.communicate()
