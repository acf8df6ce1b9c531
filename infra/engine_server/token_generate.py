"""/inference/v1/generate: token ids in and out, in vLLM's form, with the experts that every input was sent to."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from infra.engine_server.answers import Document, npy_base64, token_logprobs, usage, wants_usage
from infra.engine_server.requests import (
    read_body,
    read_ids,
    read_object,
    read_sampling,
    read_string,
    read_turn,
    refuse_not_served,
    wants_logprobs,
)
from infra.engine_server.service import Answer, Service
from infra.engine_server.streaming import stream, whole
from infra.engine_server.text import TurnText
from k3core.rollout.protocol import GenerateRequest, SampledToken


async def token_generate(service: Service, request: Request) -> Response:
    body = await read_body(request)
    refuse_not_served(body)
    model = service.find_model(read_string(body, "model"))
    ids = read_ids(body.get("token_ids"), "token_ids")
    params = read_object(body, "sampling_params")
    sampling = read_sampling(params, ("max_tokens",), service.settings.default_max_tokens)
    given = read_string(body, "request_id")
    turn = read_turn(body, params, ids, sampling, model.adapter, given or "gen")
    text = TurnText(service.tokenizer, (service.chat.stop_token, *sampling.stop_token_ids), sampling.stop)
    with_logprobs = wants_logprobs(params.get("logprobs"), "logprobs")
    writer = _Writer(body, turn, model.name, given or turn.sequence, with_logprobs)
    if body.get("stream"):
        return await stream(service, request, turn, text, writer)
    return JSONResponse(writer.whole(await whole(service, request, turn, text)))


@dataclass(slots=True)
class _Writer:
    body: Mapping[str, Any]
    turn: GenerateRequest
    model: str
    request_id: str
    with_logprobs: bool

    def whole(self, answer: Answer) -> Document:
        return self._document([self._choice(answer.tokens, answer)]) | {
            "usage": usage(self.turn, answer),
            "prompt_logprobs": None,
        }

    def opening(self) -> Iterator[Document]:
        return iter(())

    def of_token(self, token: SampledToken) -> Iterator[Document]:
        yield self._document([self._choice((token,), None)])

    def closing(self, answer: Answer) -> Iterator[Document]:
        yield self._document([self._choice((), answer)])
        if wants_usage(self.body):
            yield self._document([]) | {"usage": usage(self.turn, answer)}

    def _document(self, choices: list[Document]) -> Document:
        return {
            "request_id": self.request_id,
            "model": self.model,
            "created": int(time.time()),
            "choices": choices,
        }

    def _choice(self, tokens: tuple[SampledToken, ...], answer: Answer | None) -> Document:
        """The rows of routed_experts are the inputs: the prompt, and all drawn tokens but the last."""
        choice: Document = {
            "index": 0,
            "logprobs": token_logprobs(tokens) if self.with_logprobs else None,
            "finish_reason": None if answer is None else answer.finish,
            "token_ids": [token.token for token in tokens],
            "policy_steps": [token.policy_step for token in tokens],
        }
        if answer is not None:
            choice["stop_reason"] = answer.generation.matched
            choice["routed_experts"] = npy_base64(answer.generation.routed_experts_TLk)
        return choice
