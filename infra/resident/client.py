"""A trainer or an engine that stays in memory on its node, by URL: stages run there, versions are loaded there."""

from __future__ import annotations

import builtins
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python

from infra.stages.inputs import Inputs
from k3core import errors
from k3core.types import PolicyVersion, Ref

TOKEN = "K3_RESIDENT_TOKEN"
START_S = 120.0  # its supervisor restarts a resident that died; until then nobody answers
SILENCE_S = 30.0  # it says every second that it lives
_REF = TypeAdapter(Ref)


class ResidentLost(OSError):
    """The resident cannot be reached, died in the middle of a call, or fell silent. Another try may find a new one."""


@dataclass(frozen=True, slots=True)
class Resident:
    """start_s: how long to wait for one that is not there (yet)."""

    url: str
    start_s: float = START_S

    def run_stage(self, name: str, arguments: Mapping[str, Any], progress: Callable[[int, int], None]) -> Ref:
        """Runs the stage there; closing the connection, however this process ends, cancels it there."""
        result = self._call(f"/stages/{name}", arguments, progress)
        return _REF.validate_python(result)

    def load(self, inputs: Inputs, root: str, policy: PolicyVersion) -> str:
        """The engine serves this version from now on; the digest of the tensors that it holds then."""
        arguments = {"inputs": inputs, "root": root, "policy": policy}
        return str(self._call("/load", arguments, lambda _done, _of: None))

    def canary(self, inputs: Inputs, root: str, policy: PolicyVersion) -> str:
        """What the engine samples at this version: `infra.canary.from_text` reads it."""
        arguments = {"inputs": inputs, "root": root, "policy": policy}
        return str(self._call("/canary", arguments, lambda _done, _of: None))

    def health(self) -> dict[str, Any]:
        answer: dict[str, Any] = httpx.get(f"{self.url}/health", timeout=10.0).raise_for_status().json()
        return answer

    def _call(self, path: str, arguments: Mapping[str, Any], progress: Callable[[int, int], None]) -> Any:
        body = to_jsonable_python(dict(arguments))
        headers = {"Authorization": f"Bearer {os.environ.get(TOKEN, '')}"}
        deadline = time.monotonic() + self.start_s
        while True:
            try:
                with httpx.stream(
                    "POST", self.url + path, json=body, headers=headers, timeout=httpx.Timeout(SILENCE_S, connect=10.0)
                ) as response:
                    if response.status_code != httpx.codes.OK:
                        response.read()
                        raise RuntimeError(f"{self.url}{path}: {response.status_code} {response.text[:500]}")
                    return self._listen(response, path, progress)
            except httpx.ConnectError as error:
                if time.monotonic() > deadline:
                    raise ResidentLost(f"{self.url}: nobody answers for {self.start_s:g} s: {error}") from error
                time.sleep(0.5)
            except httpx.TransportError as error:
                raise ResidentLost(f"{self.url}{path}: lost on the way: {type(error).__name__}: {error}") from error

    def _listen(self, response: httpx.Response, path: str, progress: Callable[[int, int], None]) -> Any:
        for line in response.iter_lines():
            message = json.loads(line)
            if "progress" in message:
                progress(*message["progress"])
            elif "error" in message:
                raise _rebuilt(message["error"], message["text"])
            elif "result" in message:
                return message["result"]
        raise ResidentLost(f"{self.url}{path}: the resident closed the connection without a result")


def _rebuilt(kind: str, text: str) -> Exception:
    """The exception's own class where callers decide on it, else RuntimeError: what is retried must not change."""
    if kind == "IntegrityError":
        return errors.IntegrityError(text)
    if kind == "ValueError":
        return ValueError(text)
    if kind.endswith("RunError"):
        return errors.RunError(text)
    known = getattr(builtins, kind, None)
    if isinstance(known, type) and issubclass(known, OSError):
        return known(text)
    return RuntimeError(f"{kind}: {text}")
