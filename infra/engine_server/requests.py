"""What all APIs read of a request: tokens, sampling parameters, whose histories, and what is not served."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request

from infra.engine_server.errors import ApiError
from k3core.rollout.protocol import GenerateRequest
from k3core.rollout.sampling_rules import problems
from k3core.types import SamplingParams

# What would change the answer and is not done here, with the values that ask for nothing. A silent "yes" would be a lie.
NOT_SERVED: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "min_new_tokens": (0,),
    "ignore_eos": (False,),
    "bad_words": ([],),
    "echo": (False,),
    "suffix": ("",),
    "prompt_logprobs": (),
    "logprob_start_len": (-1,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "json_schema": (),
    "regex": (),
    "parallel_tool_calls": (True,),
    "features": (),
}


async def read_body(request: Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.body())
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    return body


def refuse_not_served(body: Mapping[str, Any]) -> None:
    for key, neutral in NOT_SERVED.items():
        value = body.get(key)
        if value is not None and value not in neutral:
            raise ApiError(400, f"{key} {json.dumps(value)}: not served here; leave it out")


def read_ids(value: Any, key: str) -> list[int]:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise ApiError(400, f"{key}: expected a list of token ids")
    return value


def read_string(body: Mapping[str, Any], key: str) -> str | None:
    value = body.get(key)
    if value is not None and not isinstance(value, str):
        raise ApiError(400, f"{key}: expected a string, found {json.dumps(value)}")
    return value


def read_object(body: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = body.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ApiError(400, f"{key}: expected an object, found {json.dumps(value)}")
    return value


def read_sampling(params: Mapping[str, Any], max_keys: Sequence[str], default_max_tokens: int) -> SamplingParams:
    """max_keys: names of the limit, in order of preference. Raises ApiError 400 for a value that makes no sense."""
    refuse_not_served(params)
    strings = params.get("stop") or []
    strings = [strings] if isinstance(strings, str) else strings
    if not isinstance(strings, list) or not all(isinstance(string, str) for string in strings):
        raise ApiError(400, "stop: expected a string or a list of strings")
    max_tokens = next((params[key] for key in max_keys if params.get(key) is not None), default_max_tokens)
    try:
        sampling = SamplingParams(
            temperature=float(_given(params, "temperature", 1.0)),
            top_p=float(_given(params, "top_p", 1.0)),
            top_k=max(0, int(_given(params, "top_k", 0))),  # -1 is the usual word for off
            max_tokens=int(max_tokens),
            min_p=float(_given(params, "min_p", 0.0)),
            stop=tuple(strings),
            stop_token_ids=tuple(read_ids(params.get("stop_token_ids") or [], "stop_token_ids")),
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise ApiError(400, f"sampling parameters: {error}") from error
    if found := problems(sampling):
        raise ApiError(400, "; ".join(found))
    return sampling


def read_turn(
    body: Mapping[str, Any],
    params: Mapping[str, Any],
    tokens: Sequence[int],
    sampling: SamplingParams,
    adapter: str | None,
    prefix: str,
) -> GenerateRequest:
    """The request as the engine takes it, under a name that begins with `prefix` and that no other turn has.

    params: where the API has the seed. cache_salt is the tenant; priority 0 is the most urgent.
    """
    seed = _given(params, "sampling_seed", _given(params, "seed", None))
    priority = _given(body, "priority", 0)
    for key, value in (("seed", 0 if seed is None else seed), ("priority", priority)):
        if type(value) is not int or value < 0:
            raise ApiError(400, f"{key} {json.dumps(value)}: expected a whole number of at least 0")
    return GenerateRequest(
        sequence=f"{prefix}-{secrets.token_hex(12)}",
        tokens=tuple(tokens),
        sampling=sampling,
        seed=secrets.randbits(31) if seed is None else seed,
        adapter=adapter,
        tenant=read_string(body, "cache_salt") or "",
        priority=priority,
    )


def wants_logprobs(value: Any, key: str) -> bool:
    """Numbers ask for the most likely tokens, of which only the sampled one's logprob is known."""
    if value is None or value is False:
        return False
    if value is True or (type(value) is int and value in (0, 1)):
        return True
    raise ApiError(400, f"{key} {json.dumps(value)}: only the sampled token's logprob is known; use 0 or 1")


def _given(params: Mapping[str, Any], key: str, default: Any) -> Any:
    value = params.get(key)
    return default if value is None else value
