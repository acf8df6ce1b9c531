"""/v1/completions: a text or token ids, continued."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from infra.engine_server.answers import Document, envelope, ids_and_steps, usage, wants_usage
from infra.engine_server.errors import ApiError
from infra.engine_server.requests import read_body, read_ids, read_sampling, read_string, read_turn, wants_logprobs
from infra.engine_server.service import Answer, Service
from infra.engine_server.streaming import stream, whole
from infra.engine_server.text import TurnText, token_bytes
from k3core.rollout.protocol import GenerateRequest, SampledToken
from k3core.tokenizer import Tokenizer


async def completions(service: Service, request: Request) -> Response:
    body = await read_body(request)
    model = service.find_model(read_string(body, "model"))
    ids = _prompt(body.get("prompt"), service.tokenizer)
    sampling = read_sampling(body, ("max_tokens", "max_completion_tokens"), service.settings.default_max_tokens)
    turn = read_turn(body, body, ids, sampling, model.adapter, "cmpl")
    text = TurnText(service.tokenizer, (service.chat.stop_token, *sampling.stop_token_ids), sampling.stop)
    writer = _Writer(service.tokenizer, body, turn, text, model.name, wants_logprobs(body.get("logprobs"), "logprobs"))
    if body.get("stream"):
        return await stream(service, request, turn, text, writer)
    answer = await whole(service, request, turn, text)
    return JSONResponse(writer.whole(answer))


def _prompt(prompt: Any, tokenizer: Tokenizer) -> list[int]:
    match prompt:
        case [str() | list()]:
            return _prompt(prompt[0], tokenizer)
        case [str() | list(), *_]:
            raise ApiError(400, f"prompt: one at a time, found {len(prompt)}; send a request for each")
        case str():
            try:
                return tokenizer.encode_text(prompt)
            except ValueError as error:
                raise ApiError(400, f"prompt: {error}") from error
    return read_ids(prompt, "prompt")


@dataclass(slots=True)
class _Writer:
    tokenizer: Tokenizer
    body: Mapping[str, Any]
    turn: GenerateRequest
    text: TurnText
    model: str
    with_logprobs: bool
    num_sent: int = 0  # characters

    def whole(self, answer: Answer) -> Document:
        choice = self._choice(answer.text, answer.tokens, answer, 0)
        if self.body.get("return_token_ids"):
            choice["prompt_token_ids"] = list(self.turn.tokens)
        return self._envelope([choice]) | {"usage": usage(self.turn, answer)}

    def opening(self) -> Iterator[Document]:
        return iter(())

    def of_token(self, token: SampledToken) -> Iterator[Document]:
        start, self.num_sent = self.num_sent, len(self.text.text)
        yield self._envelope([self._choice(self.text.text[start:], (token,), None, start)])

    def closing(self, answer: Answer) -> Iterator[Document]:
        yield self._envelope([self._choice(answer.text[self.num_sent :], (), answer, self.num_sent)])
        if wants_usage(self.body):
            yield self._envelope([]) | {"usage": usage(self.turn, answer)}

    def _envelope(self, choices: list[Document]) -> Document:
        return envelope(self.turn.sequence, "text_completion", self.model, choices)

    def _choice(self, text: str, tokens: tuple[SampledToken, ...], answer: Answer | None, offset: int) -> Document:
        choice: Document = {
            "index": 0,
            "text": text,
            "logprobs": self._logprobs(tokens, offset) if self.with_logprobs else None,
            "finish_reason": None if answer is None else answer.finish,
            "stop_reason": None if answer is None else answer.generation.matched,
        }
        return choice | (ids_and_steps(tokens) if self.body.get("return_token_ids") else {})

    def _logprobs(self, tokens: tuple[SampledToken, ...], offset: int) -> Document:
        texts = [token_bytes(self.tokenizer, token.token).decode("utf-8", "replace") for token in tokens]
        values = [token.logprob for token in tokens]
        return {
            "tokens": texts,
            "token_logprobs": values,
            "top_logprobs": [{text: value} for text, value in zip(texts, values, strict=True)],
            "text_offset": [offset + sum(map(len, texts[:n])) for n in range(len(texts))],
        }
