"""/load_policy, /load_adapter, /unload_adapter: other weights, while turns run. What is refused changes nothing."""

from __future__ import annotations

import asyncio
import time
from typing import get_args

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from infra.engine_server.errors import ApiError
from infra.engine_server.requests import read_body, read_string
from infra.engine_server.service import Service
from infra.engine_server.weights import read_adapter, read_policy
from k3core.errors import IntegrityError, RunError
from k3core.rollout.protocol import UnknownAdapter, UpdateRule

# Of what a request names; everything else is a fault of the server.
REFUSED = (ValueError, OSError, IntegrityError, RunError)


async def load_policy(service: Service, request: Request) -> Response:
    """{path, step, rule}: a run's folder, or a version's manifest; the version that the run serves without a step."""
    body = await read_body(request)
    path, step, rule = _required(body, "path"), body.get("step"), body.get("rule", "drop")
    if step is not None and (type(step) is not int or step < 0):
        raise ApiError(400, f"step {step!r}: expected a whole number of at least 0")
    if rule not in get_args(UpdateRule):
        raise ApiError(400, f"rule {rule!r}: expected {', '.join(get_args(UpdateRule))}")
    service.ready_engine()
    started = time.monotonic()
    async with service.loading:
        try:
            policy = await asyncio.to_thread(read_policy, path, step, service.settings.model)
            service.ready_engine().load(policy.step, policy.tensors, rule, policy.weights_sha256)
            service.base_sha256, service.fault = policy.base_sha256, None
        except REFUSED as error:
            raise ApiError(400, f"not loaded: {error}") from error
    return _done(policy_step=policy.step, policy=policy.name, seconds=time.monotonic() - started)


async def load_adapter(service: Service, request: Request) -> Response:
    """{name, path}: a PEFT folder, or an adapter among a run's versions. An adapter of that name is replaced."""
    body = await read_body(request)
    name, path = _required(body, "name"), _required(body, "path")
    if ":" in name or name == service.settings.model_name:
        raise ApiError(400, f"name {name!r}: the policy has it, or it has a colon; use another")
    service.ready_engine()
    started = time.monotonic()
    async with service.loading:
        try:
            adapter = await asyncio.to_thread(read_adapter, path, service.settings.model.cfg, service.base_sha256)
            service.ready_engine().load_adapter(name, adapter.tensors, adapter.lora)
        except REFUSED as error:
            raise ApiError(400, f"not loaded: {error}") from error
    return _done(adapters=service.ready_engine().adapters, seconds=time.monotonic() - started)


async def unload_adapter(service: Service, request: Request) -> Response:
    """{name}. Its running turns end with an error."""
    name = _required(await read_body(request), "name")
    async with service.loading:
        try:
            service.ready_engine().unload_adapter(name)
        except UnknownAdapter as error:
            raise ApiError(404, str(error), "not_found_error") from error
    return _done(adapters=service.ready_engine().adapters)


def _required(body: dict[str, object], key: str) -> str:
    value = read_string(body, key)
    if not value:
        raise ApiError(400, f"{key}: missing")
    return value


def _done(**about: object) -> Response:
    return JSONResponse({"success": True, **about})
