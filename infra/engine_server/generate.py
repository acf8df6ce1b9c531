"""/generate: text or token ids in, both out, in SGLang's form. While it streams, each event holds all there is so far."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from infra.engine_server.answers import Document
from infra.engine_server.errors import ApiError
from infra.engine_server.requests import (
    read_body,
    read_ids,
    read_object,
    read_sampling,
    read_string,
    read_turn,
    refuse_not_served,
)
from infra.engine_server.service import Answer, Service
from infra.engine_server.streaming import stream, whole
from infra.engine_server.text import TurnText
from k3core.rollout.protocol import GenerateRequest, Generation, SampledToken
from k3core.tokenizer import Tokenizer


async def generate(service: Service, request: Request) -> Response:
    body = await read_body(request)
    refuse_not_served(body)
    model = service.find_model(read_string(body, "lora_path") or read_string(body, "model"))
    ids = _prompt(body, service.tokenizer)
    params = read_object(body, "sampling_params")
    sampling = read_sampling(params, ("max_new_tokens",), service.settings.default_max_tokens)
    turn = read_turn(body, params, ids, sampling, model.adapter, read_string(body, "rid") or "gen")
    text = TurnText(service.tokenizer, (service.chat.stop_token, *sampling.stop_token_ids), sampling.stop)
    writer = _Writer(body, turn, text)
    if body.get("stream"):
        return await stream(service, request, turn, text, writer)
    return JSONResponse(writer.whole(await whole(service, request, turn, text)))


def _prompt(body: Mapping[str, Any], tokenizer: Tokenizer) -> list[int]:
    text = read_string(body, "text")
    if (text is None) == (body.get("input_ids") is None):
        raise ApiError(400, "text, input_ids: give one of them")
    if text is None:
        return read_ids(body["input_ids"], "input_ids")
    try:
        return tokenizer.encode_text(text)
    except ValueError as error:
        raise ApiError(400, f"text: {error}") from error


@dataclass(slots=True)
class _Writer:
    body: Mapping[str, Any]
    turn: GenerateRequest
    text: TurnText
    heard: list[SampledToken] = field(default_factory=list)

    def whole(self, answer: Answer) -> Document:
        reason: Document = {"type": answer.finish}
        if answer.generation.matched is not None:
            reason["matched"] = answer.generation.matched
        meta = {"finish_reason": reason, "cached_tokens": answer.generation.num_cached}
        if self.body.get("return_routed_experts"):
            meta |= _routes(answer.generation)
        return self._document(answer.text, answer.tokens, meta)

    def opening(self) -> Iterator[Document]:
        return iter(())

    def of_token(self, token: SampledToken) -> Iterator[Document]:
        self.heard.append(token)
        yield self._document(self.text.text, self.heard, {"finish_reason": None})

    def closing(self, answer: Answer) -> Iterator[Document]:
        yield self.whole(answer)

    def _document(self, text: str, tokens: Sequence[SampledToken], meta: Document) -> Document:
        about: Document = {
            "id": self.turn.sequence,
            "prompt_tokens": len(self.turn.tokens),
            "completion_tokens": len(tokens),
            "policy_steps": [token.policy_step for token in tokens],
            **meta,
        }
        if self.body.get("return_logprob"):
            about["output_token_logprobs"] = [[token.logprob, token.token, None] for token in tokens]
            about["output_token_raw_logprobs"] = [[token.raw_logprob, token.token, None] for token in tokens]
        if self.body.get("return_supports"):
            supports = (token.support for token in tokens)
            about["output_token_supports"] = [None if ids is None else ids.tolist() for ids in supports]
        return {"text": text, "output_ids": [token.token for token in tokens], "meta_info": about}


def _routes(generation: Generation) -> Document:
    """int32, little-endian, [inputs, layers, experts of a token]; the inputs are the prompt and all drawn tokens but
    the last."""
    routes_TLk = generation.routed_experts_TLk
    return {
        "routed_experts": base64.b64encode(routes_TLk.astype("<i4").tobytes()).decode(),
        "routed_experts_shape": list(routes_TLk.shape),
        "routed_layers": list(generation.routed_layers),
    }
