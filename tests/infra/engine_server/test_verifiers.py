"""The two clients of verifiers, as they are: its evaluation over the chat API, its trainer's over token ids."""

from __future__ import annotations

import asyncio
import io
from base64 import b64decode
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import openai
import pytest
import uvicorn
import verifiers.v1 as vf
from engines import ANSWERED, ASKED, CALLED, CHAT, MAX_LENGTH, STOP, TOOL, make_service, real_engine, taught_tensors
from renderers import OverlongPromptError
from renderers.base import ParsedResponse
from renderers.client import generate

from infra.engine_server.app import make_app
from infra.engine_server.service import Service
from k3core.chat import ChatSettings


@asynccontextmanager
async def served() -> AsyncIterator[tuple[str, Service]]:
    """At a real address: verifiers' programs reach a model through a server of its own."""
    service = make_service(real_engine(taught_tensors()))
    server = uvicorn.Server(uvicorn.Config(make_app(service), port=0, log_level="warning", lifespan="off"))
    serving = asyncio.create_task(server.serve())
    try:
        while not server.started:
            await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1", service
    finally:
        server.should_exit = True
        await serving


def test_verifiers_evaluates_a_task_with_a_tool_over_the_chat_api() -> None:
    agent: dict[str, Any] = {"harness": {"id": "weather_questions"}, "runtime": {"type": "subprocess"}}
    config = vf.environment_class("weather_questions")
    env = config(vf.env_config_type("weather_questions")(taskset={"id": "weather_questions"}, agent=agent))

    async def run() -> list[vf.Episode]:
        async with served() as (url, service), env.serving():
            client = vf.EvalClientConfig(base_url=url, api_key_var="K3_NO_KEY")
            context = vf.ModelContext("policy", client, vf.Sampling(temperature=0, max_tokens=100))
            slots = [slot for task in env.taskset for slot in env.slots(task, 2)]
            episodes = await asyncio.gather(*(env.run_slot(slot, context) for slot in slots))
            assert service.fault is None
            return list(episodes)

    for episode in asyncio.run(run()):
        assert episode.ok, [error.message for error in episode.errors]
        trace = episode.traces[0]
        assert (trace.reward, trace.num_turns, trace.last_reply) == (1.0, 2, ANSWERED.content)
        called = trace.assistant_messages[0]
        assert (called.content, [call.name for call in called.tool_calls or ()]) == (CALLED.content, ["weather"])
        assert trace.usage is not None
        assert trace.usage.completion_tokens == sum(len(CHAT.render_turn(m, False)) for m in (CALLED, ANSWERED))


@dataclass(frozen=True)
class Rendered:
    """What the trainer's client asks of a renderer when it is given the prompt as ids."""

    supports_tools: bool = True

    def get_stop_token_ids(self) -> list[int]:
        return [STOP]

    def parse_response(self, token_ids: Sequence[int], **_: Any) -> ParsedResponse:
        return ParsedResponse(content=CHAT.parse_turn(token_ids, False).content)


def test_the_trainers_client_gets_ids_logprobs_and_routes() -> None:
    prompt = CHAT.render_messages([ASKED], ChatSettings(tools=(TOOL,))) + CHAT.generation_stub(False)

    async def run() -> dict[str, Any]:
        async with served() as (url, _), openai.AsyncOpenAI(api_key="none", base_url=url, max_retries=0) as api:
            ask: dict[str, Any] = {"client": api, "renderer": Rendered(), "messages": [], "model": "policy"}
            with pytest.raises(OverlongPromptError, match=str(MAX_LENGTH)):
                await generate(**ask, prompt_ids=[1] * (MAX_LENGTH + 1))
            sampling = {"temperature": 0, "max_tokens": 100}
            return await generate(**ask, prompt_ids=prompt, sampling_params=sampling, cache_salt="salt", priority=1)

    answer = asyncio.run(run())
    turn = CHAT.render_turn(CALLED, thinking=False)
    assert answer["completion_ids"] == turn
    assert answer["completion_logprobs"] == [0.0] * len(turn)
    assert (answer["finish_reason"], answer["content"]) == ("stop", CALLED.content)
    assert len(np.load(io.BytesIO(b64decode(answer["routed_experts"])))) == len(prompt) + len(turn) - 1
