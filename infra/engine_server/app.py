"""The routes: /v1/completions, token-level /generate, /v1/models, /health, /metrics."""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from infra.engine_server.errors import ApiError, refusal
from infra.engine_server.service import Answer, Service
from infra.engine_server.text import TurnText
from k3core.rollout.engine import GenerateRequest
from k3core.rollout.sampling_rules import problems
from k3core.types import SamplingParams


def make_app(service: Service) -> Starlette:
    async def health(_: Request) -> Response:
        status = 200 if service.state == "ready" else 503
        return JSONResponse({"state": service.state, "fault": service.fault}, status)

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def models(_: Request) -> Response:
        model = {"id": service.settings.model_name, "object": "model", "created": 0}
        return JSONResponse({"object": "list", "data": [model]})

    def counted(endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                response = await endpoint(request)
            except ApiError as error:
                response = refusal(error)
            service.metrics.requests.labels(request.url.path, response.status_code).inc()
            return response

        return answer

    async def completions(request: Request) -> Response:
        body = await _body(request)
        prompt = body.get("prompt", "")
        ids = service.tokenizer.encode_text(prompt) if isinstance(prompt, str) else _ids(prompt, "prompt")
        if body.get("n", 1) != 1:
            raise ApiError(400, f"n: only 1 is served, found {body['n']}")
        turn, text = _turn(service, body, body, ids, "max_tokens")
        if body.get("stream"):
            return await _stream(service, request, body, turn, text)
        answer = await _until_left(request, service.start(turn, text, lambda _: None))
        choice = _choice(body, answer.text, answer.finish, [token.token for token in answer.tokens])
        choice["logprobs"] = _logprobs(service, answer) if body.get("logprobs") is not None else None
        if body.get("return_token_ids"):
            choice["prompt_token_ids"] = ids
        return JSONResponse(_envelope(service, turn, [choice]) | {"usage": _usage(turn, answer)})

    async def generate(request: Request) -> Response:
        body = await _body(request)
        ids = _ids(body.get("input_ids"), "input_ids")
        turn, text = _turn(service, body, body.get("sampling_params") or {}, ids, "max_new_tokens")
        answer = await _until_left(request, service.start(turn, text, lambda _: None))
        reason = {"type": answer.finish} | ({} if answer.matched is None else {"matched": answer.matched})
        meta: dict[str, Any] = {
            "id": turn.sequence,
            "finish_reason": reason,
            "prompt_tokens": len(ids),
            "completion_tokens": len(answer.tokens),
            "cached_tokens": answer.cached_tokens,
            "policy_steps": [token.policy_step for token in answer.tokens],
        }
        if body.get("return_logprob"):
            meta["output_token_logprobs"] = [[token.logprob, token.token, None] for token in answer.tokens]
        if body.get("return_routed_experts") and answer.generation is not None:
            routes_TLk = answer.generation.routed_experts_TLk
            meta["routed_experts"] = base64.b64encode(routes_TLk.astype("<i4").tobytes()).decode()
            meta["routed_experts_shape"] = list(routes_TLk.shape)
            meta["routed_experts_first"] = answer.generation.first_routed
            meta["routed_layers"] = list(answer.generation.routed_layers)
        output_ids = [token.token for token in answer.tokens]
        return JSONResponse({"text": answer.text, "output_ids": output_ids, "meta_info": meta})

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/metrics", metrics),
            Route("/v1/models", models),
            Route("/v1/completions", counted(completions), methods=["POST"]),
            Route("/generate", counted(generate), methods=["POST"]),
        ]
    )


async def _body(request: Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.body())
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    return body


def _ids(value: Any, key: str) -> list[int]:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise ApiError(400, f"{key}: expected a list of token ids")
    return value


def _turn(
    service: Service, body: dict[str, Any], params: dict[str, Any], ids: list[int], max_key: str
) -> tuple[GenerateRequest, TurnText]:
    """The request as the engine takes it, and the text that its tokens will make. Stops are the server's own."""
    service.check_model(body.get("model"))
    strings = params.get("stop") or []
    strings = [strings] if isinstance(strings, str) else strings
    if not isinstance(strings, list) or not all(isinstance(string, str) for string in strings):
        raise ApiError(400, "stop: expected a string or a list of strings")
    stop_ids = _ids(params.get("stop_token_ids") or [], "stop_token_ids")
    try:
        sampling = SamplingParams(
            temperature=float(params.get("temperature", 1.0)),
            top_p=float(params.get("top_p", 1.0)),
            top_k=max(0, int(params.get("top_k", 0))),  # -1 is the usual word for off
            max_tokens=int(params.get(max_key) or service.settings.default_max_tokens),
            min_p=float(params.get("min_p", 0.0)),
            stop=tuple(strings),
            stop_token_ids=tuple(stop_ids),
        )
        seed = params.get("sampling_seed", params.get("seed"))
        seed = secrets.randbits(31) if seed is None else int(seed)
    except (TypeError, ValueError) as error:
        raise ApiError(400, f"sampling parameters: {error}") from error
    if found := problems(sampling):
        raise ApiError(400, "; ".join(found))
    text = TurnText(service.tokenizer, service.chat.stop_token, strings, stop_ids)
    sampling = replace(sampling, stop=(), stop_token_ids=())
    return GenerateRequest(f"cmpl-{secrets.token_hex(12)}", tuple(ids), sampling, seed), text


def _envelope(service: Service, turn: GenerateRequest, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": turn.sequence,
        "object": "text_completion",
        "created": int(time.time()),
        "model": service.settings.model_name,
        "choices": choices,
    }


def _choice(body: dict[str, Any], text: str, finish: str | None, tokens: list[int]) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": finish, "logprobs": None}
    return choice | ({"token_ids": tokens} if body.get("return_token_ids") else {})


def _usage(turn: GenerateRequest, answer: Answer) -> dict[str, Any]:
    return {
        "prompt_tokens": len(turn.tokens),
        "completion_tokens": len(answer.tokens),
        "total_tokens": len(turn.tokens) + len(answer.tokens),
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }


def _logprobs(service: Service, answer: Answer) -> dict[str, Any]:
    texts = [service.tokenizer.decode([token.token]) for token in answer.tokens]
    values = [token.logprob for token in answer.tokens]
    return {
        "tokens": texts,
        "token_logprobs": values,
        "top_logprobs": [{text: value} for text, value in zip(texts, values, strict=True)],
        "text_offset": [sum(map(len, texts[:n])) for n in range(len(texts))],
    }


async def _until_left(request: Request, task: asyncio.Task[Answer]) -> Answer:
    """The answer; when the client goes away first, the turn is cancelled."""
    watch = asyncio.create_task(_left(request, task))
    try:
        return await task
    except asyncio.CancelledError:
        raise ApiError(503, "the turn was aborted", "unavailable_error", 1) from None
    finally:
        task.cancel()
        watch.cancel()


async def _left(request: Request, task: asyncio.Task[Answer]) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    task.cancel()


async def _stream(
    service: Service, request: Request, body: dict[str, Any], turn: GenerateRequest, text: TurnText
) -> Response:
    heard: asyncio.Queue[int | None] = asyncio.Queue()
    task = service.start(turn, text, lambda token: heard.put_nowait(token.token))
    task.add_done_callback(lambda _: heard.put_nowait(None))
    first = await heard.get()
    if first is None:
        await _until_left(request, task)  # a refusal still has a status of its own

    async def events() -> AsyncIterator[str]:
        watch = asyncio.create_task(_left(request, task))
        sent, token = 0, first
        try:
            while token is not None:
                new = text.text[sent:]
                sent += len(new)
                yield _event(_envelope(service, turn, [_choice(body, new, None, [token])]))
                token = await heard.get()
            try:
                answer = await task
            except (ApiError, asyncio.CancelledError) as error:
                fault = error if isinstance(error, ApiError) else ApiError(503, "the turn was aborted")
                yield _event(fault.body())
                return
            yield _event(_envelope(service, turn, [_choice(body, answer.text[sent:], answer.finish, [])]))
            if (body.get("stream_options") or {}).get("include_usage"):
                yield _event(_envelope(service, turn, []) | {"usage": _usage(turn, answer)})
            yield "data: [DONE]\n\n"
        finally:
            watch.cancel()
            task.cancel()
            with suppress(ApiError, asyncio.CancelledError):
                await task

    return StreamingResponse(events(), media_type="text/event-stream")


def _event(document: dict[str, Any]) -> str:
    return f"data: {json.dumps(document)}\n\n"
