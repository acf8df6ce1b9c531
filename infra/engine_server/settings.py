"""What a server is started with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from infra.engine_server.weights import ServedModel
from k3core.rollout.protocol import Engine
from k3core.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Made:
    """base_sha256: of the weights that the engine holds, without a branch; None where nobody took it."""

    engine: Engine
    base_sha256: str | None = None


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """make_engine runs in a thread of its own once the server listens; until it returned, /health says "loading".

    model: what weights that are loaded later must fit. max_running turns are in the engine at a time and max_waiting
    more stand in line; the next one gets a 429. max_length: of prompt and output, in tokens. thinking: a chat's turns
    have a think channel unless the request says otherwise. drain_s: how long running turns may go on after SIGTERM.
    """

    make_engine: Callable[[], Made]
    tokenizer: Tokenizer
    model: ServedModel
    max_length: int
    model_name: str = "policy"
    host: str = "127.0.0.1"
    port: int = 8000
    max_running: int = 32
    max_waiting: int = 256
    default_max_tokens: int = 1024
    thinking: bool = False
    drain_s: float = 30.0
    retry_after_s: int = 1
    record_path: Path | None = None
