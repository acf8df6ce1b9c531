"""One turn from admission to record, whatever API asked for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Literal

from infra.engine_server.errors import ApiError
from infra.engine_server.metrics import Metrics
from infra.engine_server.recorder import Recorder
from infra.engine_server.settings import ServerSettings
from infra.engine_server.text import TurnText
from k3core.chat import chat_format
from k3core.rollout.engine import Engine, GenerateRequest, Generation, SampledToken

Hear = Callable[[SampledToken], None]

State = Literal["loading", "ready", "fault", "draining"]


@dataclass(frozen=True, slots=True)
class Answer:
    """tokens: all that count, the one that ended the turn included; text: without it and without a stop string.

    generation is None where the turn ended at a stop that only the server knows of.
    """

    tokens: tuple[SampledToken, ...]
    text: str
    finish: Literal["stop", "length"]
    matched: str | int | None
    generation: Generation | None

    @property
    def cached_tokens(self) -> int:
        """Of the prompt, those that were not computed for this turn."""
        return 0 if self.generation is None else self.generation.first_routed


class Service:
    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.tokenizer = settings.tokenizer
        self.chat = chat_format(settings.tokenizer)
        self.metrics = Metrics()
        self.recorder = Recorder(settings.record_path)
        self.engine: Engine | None = None
        self.is_draining = False
        self.fault: str | None = None
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

    def check_model(self, model: str | None) -> None:
        """Raises ApiError 404 for a model that is not served."""
        if model is not None and model != self.settings.model_name:
            known = self.settings.model_name
            raise ApiError(404, f"the model {model!r} is not served here; known: {known}", "not_found_error")

    def start(self, turn: GenerateRequest, text: TurnText, hear: Hear) -> asyncio.Task[Answer]:
        """The turn, under way; cancelling the task frees its slot. Raises ApiError when it is not taken at all."""
        self._check(turn.tokens)
        task = asyncio.create_task(self._run(turn, text, hear))
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
        if self.is_draining or self.engine is None:
            raise ApiError(503, f"the server is {self.state}", "unavailable_error", settings.retry_after_s)
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

    async def _run(self, turn: GenerateRequest, text: TurnText, hear: Hear) -> Answer:
        arrived = time.monotonic()
        heard: list[SampledToken] = []
        times: list[float] = []
        stopped = asyncio.Event()

        def on_token(token: SampledToken) -> None:
            if stopped.is_set():
                return  # sampled before the engine heard of the stop
            heard.append(token)
            times.append(time.monotonic())
            if text.feed(token.token):
                stopped.set()
            hear(token)

        try:
            with self._in_line():
                await self._slots.acquire()
            try:
                generation = await self._generate(replace(turn, on_token=on_token), stopped)
            finally:
                self._slots.release()
        except asyncio.CancelledError:
            self.metrics.aborted.inc()
            self.recorder.write(turn.sequence, turn.tokens, heard, "aborted")
            raise
        except ValueError as error:
            raise ApiError(400, str(error)) from error
        except Exception as error:
            self.fault = f"{type(error).__name__}: {error}"
            self.metrics.faults.inc()
            raise ApiError(
                503, f"the engine failed: {self.fault}", "engine_error", self.settings.retry_after_s
            ) from error
        self.fault = None
        text.finish()
        finish: Literal["stop", "length"] = "length" if text.matched is None else "stop"
        answer = Answer(tuple(heard), text.text, finish, text.matched, generation)
        self._count(turn, answer, arrived, times)
        self.recorder.write(turn.sequence, turn.tokens, answer.tokens, answer.finish)
        return answer

    async def _generate(self, turn: GenerateRequest, stopped: asyncio.Event) -> Generation | None:
        """Until the engine is done, or a stop was found that it does not know of. Each turn is a sequence of its own."""
        assert self.engine is not None
        work = asyncio.create_task(self.engine.generate(turn))
        stop = asyncio.create_task(stopped.wait())
        try:
            await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                await asyncio.sleep(0)  # the engine's own end of the turn brings routes and counts with it
            if work.done():
                return work.result()
            return None
        finally:
            stop.cancel()
            if not work.done():
                work.cancel()
                with suppress(asyncio.CancelledError):
                    await work
            self.engine.release(turn.sequence)

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
        metrics.cached_tokens.inc(answer.cached_tokens)
        metrics.generated_tokens.inc(len(answer.tokens))
        if times:
            metrics.first_token_s.observe(times[0] - arrived)
        if len(times) > 1:
            metrics.token_s.observe((times[-1] - times[0]) / (len(times) - 1))
