"""One turn from admission to record, whatever API asked for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

from infra.engine_server.errors import ApiError
from infra.engine_server.metrics import Metrics
from infra.engine_server.recorder import Recorder
from infra.engine_server.settings import ServerSettings
from infra.engine_server.text import TurnText
from k3core.chat import chat_format
from k3core.rollout.engine import QueueFull
from k3core.rollout.protocol import Engine, GenerateRequest, Generation, SampledToken, UnknownAdapter

Hear = Callable[[SampledToken], None]
State = Literal["loading", "ready", "fault", "draining"]
Finish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Answer:
    """tokens: all that were drawn, the one that ended the turn included; text: without it and without a stop string."""

    tokens: tuple[SampledToken, ...]
    text: str
    generation: Generation

    @property
    def finish(self) -> Finish:
        return "stop" if self.generation.stop in ("end_of_turn", "stop") else "length"


@dataclass(frozen=True, slots=True)
class FoundModel:
    """name: as answers give it. adapter None: the policy alone."""

    name: str
    adapter: str | None


class Service:
    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.tokenizer = settings.tokenizer
        self.chat = chat_format(settings.tokenizer)
        self.metrics = Metrics()
        self.recorder = Recorder(settings.record_path)
        self.engine: Engine | None = None
        self.base_sha256: str | None = None  # of the policy that is served, where it is known
        self.is_draining = False
        self.fault: str | None = None
        self.loading = asyncio.Lock()  # weights come one after the other
        self._slots = asyncio.Semaphore(settings.max_running)
        self._turns: set[asyncio.Task[Answer]] = set()
        self._num_waiting = 0
        self.metrics.running.set_function(lambda: len(self._turns) - self._num_waiting)
        self.metrics.waiting.set_function(lambda: self._num_waiting)
        self.metrics.policy_step.set_function(lambda: -1 if self.engine is None else self.engine.policy_step)

    @property
    def state(self) -> State:
        if self.is_draining:
            return "draining"
        if self.engine is None:
            return "loading"
        return "ready" if self.fault is None else "fault"

    def ready_engine(self) -> Engine:
        """Raises ApiError 503 while there is none, and once the server ends."""
        if self.is_draining or self.engine is None:
            raise ApiError(503, f"the server is {self.state}", "unavailable_error", self.settings.retry_after_s)
        return self.engine

    def find_model(self, asked: str | None) -> FoundModel:
        """The policy, or an adapter by its own name or as policy:adapter. Raises ApiError 404 for any other."""
        base, adapters = self.settings.model_name, self.ready_engine().adapters
        if asked in (None, base):
            return FoundModel(base, None)
        assert asked is not None
        name = asked.removeprefix(f"{base}:")
        if name not in adapters:
            known = ", ".join([base, *(f"{base}:{adapter}" for adapter in adapters)])
            raise ApiError(404, f"the model {asked!r} is not served here; known: {known}", "not_found_error")
        return FoundModel(asked, name)

    def start(self, turn: GenerateRequest, text: TurnText, hear: Hear) -> asyncio.Task[Answer]:
        """The turn, under way; cancelling the task frees its slot. Raises ApiError when it is not taken at all."""
        engine = self.ready_engine()
        self._check(turn.tokens)
        task = asyncio.create_task(self._run(engine, turn, text, hear))
        self._turns.add(task)
        task.add_done_callback(self._turns.discard)
        return task

    async def drain(self) -> None:
        """Take nothing more; give what runs `drain_s`, then abort it."""
        self.is_draining = True
        if self._turns:
            _, late = await asyncio.wait(self._turns, timeout=self.settings.drain_s)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)

    def _check(self, prompt: Sequence[int]) -> None:
        settings = self.settings
        if not prompt:
            raise ApiError(400, "the prompt has no tokens")
        if len(prompt) >= settings.max_length:
            raise ApiError(
                400,
                f"the prompt has {len(prompt)} tokens, which leaves no room below this server's length of "
                f"{settings.max_length}: shorten it",
            )
        size = self.tokenizer.vocab_size
        if wrong := [token for token in prompt if not 0 <= token < size]:
            raise ApiError(400, f"the token id {wrong[0]} is outside the vocabulary of {size}")
        if len(self._turns) >= settings.max_running + settings.max_waiting:
            raise ApiError(
                429,
                f"{settings.max_running} turns run and {settings.max_waiting} wait: try again later",
                "rate_limit_error",
                settings.retry_after_s,
            )

    async def _run(self, engine: Engine, turn: GenerateRequest, text: TurnText, hear: Hear) -> Answer:
        arrived = time.monotonic()
        heard: list[SampledToken] = []
        times: list[float] = []

        def on_token(token: SampledToken) -> None:
            heard.append(token)
            times.append(time.monotonic())
            text.feed(token.token)
            hear(token)

        try:
            with self._in_line():
                await self._slots.acquire()
            try:
                generation = await engine.generate(replace(turn, on_token=on_token))
            finally:
                self._slots.release()
                engine.release(turn.sequence)
        except asyncio.CancelledError:
            self.metrics.aborted.inc()
            self.recorder.write(turn, heard, "aborted")
            raise
        except UnknownAdapter as error:
            raise ApiError(404, str(error), "not_found_error") from error
        except QueueFull as error:
            raise ApiError(429, str(error), "rate_limit_error", self.settings.retry_after_s) from error
        except Exception as error:
            if isinstance(error, ValueError) and not heard:  # what was asked makes no sense to the engine
                raise ApiError(400, str(error)) from error
            self.fault = f"{type(error).__name__}: {error}"
            self.metrics.faults.inc()
            self.recorder.write(turn, heard, "fault")
            raise ApiError(
                503, f"the engine failed: {self.fault}", "engine_error", self.settings.retry_after_s
            ) from error
        self.fault = None
        text.finish()
        answer = Answer(tuple(heard), text.text, generation)
        self._count(turn, answer, arrived, times)
        self.recorder.write(turn, answer.tokens, answer.finish)
        return answer

    @contextmanager
    def _in_line(self) -> Iterator[None]:
        self._num_waiting += 1
        try:
            yield
        finally:
            self._num_waiting -= 1

    def _count(self, turn: GenerateRequest, answer: Answer, arrived: float, times: list[float]) -> None:
        metrics = self.metrics
        metrics.prompt_tokens.inc(len(turn.tokens))
        metrics.cached_tokens.inc(answer.generation.num_cached)
        metrics.generated_tokens.inc(len(answer.tokens))
        if times:
            metrics.first_token_s.observe(times[0] - arrived)
        if len(times) > 1:
            metrics.token_s.observe((times[-1] - times[0]) / (len(times) - 1))
