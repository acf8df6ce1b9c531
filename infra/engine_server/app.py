"""The routes, and how each answer is counted."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from infra.engine_server.chat_completions import chat_completions
from infra.engine_server.completions import completions
from infra.engine_server.errors import ApiError, refusal
from infra.engine_server.generate import generate
from infra.engine_server.loading import load_adapter, load_policy, unload_adapter
from infra.engine_server.service import Service
from infra.engine_server.token_generate import token_generate

Endpoint = Callable[[Service, Request], Awaitable[Response]]

POSTS: dict[str, Endpoint] = {
    "/v1/chat/completions": chat_completions,
    "/v1/completions": completions,
    "/inference/v1/generate": token_generate,
    "/generate": generate,
    "/load_policy": load_policy,
    "/load_adapter": load_adapter,
    "/unload_adapter": unload_adapter,
}


def make_app(service: Service) -> Starlette:
    async def live(_: Request) -> Response:
        return JSONResponse({"state": service.state})

    async def health(_: Request) -> Response:
        status = 200 if service.state == "ready" else 503
        return JSONResponse({"state": service.state, "fault": service.fault}, status)

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def models(_: Request) -> Response:
        base = service.settings.model_name
        about = {"object": "model", "created": 0, "owned_by": "k3rl", "max_model_len": service.settings.max_length}
        adapters = () if service.engine is None else service.engine.adapters
        data = [{"id": base, **about}] + [{"id": f"{base}:{name}", "parent": base, **about} for name in adapters]
        return JSONResponse({"object": "list", "data": data})

    def counted(endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                response = await endpoint(service, request)
            except ApiError as error:
                response = refusal(error)
            service.metrics.requests.labels(request.url.path, response.status_code).inc()
            return response

        return answer

    gets = {"/live": live, "/health": health, "/metrics": metrics, "/v1/models": models}
    return Starlette(
        routes=[
            *(Route(path, endpoint) for path, endpoint in gets.items()),
            *(Route(path, counted(endpoint), methods=["POST"]) for path, endpoint in POSTS.items()),
        ]
    )
