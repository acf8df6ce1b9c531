"""The service over the real tiny engine, and what a slow one shows: aborts, a full queue, a drain."""

from __future__ import annotations

import asyncio
import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import torch

from infra.config import load
from infra.engine_server.app import make_app
from infra.engine_server.service import Service
from infra.engine_server.settings import ServerSettings
from infra.engine_server.text import TurnText
from k3core.chat import chat_format
from k3core.rollout.engine import GenerateRequest, Generation, K3Engine, SampledToken
from k3core.tokenizer import Tokenizer
from k3core.types import SamplingParams

TOKENIZER = Tokenizer.train(["a text to learn merges from, a text"], 270)
STOP = chat_format(TOKENIZER).stop_token


class SlowEngine:
    """Says "a" for ever, a token every millisecond."""

    policy_step = 3
    running = 0

    async def generate(self, request: GenerateRequest) -> Generation:
        self.running += 1
        token, T = TOKENIZER.encode_text("a")[0], request.sampling.max_tokens
        try:
            for _ in range(T):
                assert request.on_token is not None
                request.on_token(SampledToken(token, -0.5, -0.5, 3))
                await asyncio.sleep(0.001)
        finally:
            self.running -= 1
        steps_T, logprobs_T = np.full(T, 3), np.full(T, -0.5)
        return Generation(np.full(T, token), logprobs_T, steps_T, 0, np.zeros((T, 0, 0), np.uint8), (), "max_tokens")

    def release(self, sequence: str) -> None: ...


def make_service(engine: Any, **settings: Any) -> Service:
    service = Service(ServerSettings(lambda: engine, TOKENIZER, max_length=100, **settings))
    service.engine = engine
    return service


def client(service: Service) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(make_app(service)), base_url="http://engine/v1")


def test_the_openai_client_completes_and_streams(tmp_path: Path) -> None:
    async def run() -> None:
        service = make_service(SlowEngine(), record_path=tmp_path / "record")
        api = openai.AsyncOpenAI(api_key="none", base_url="http://engine/v1", http_client=client(service))
        done = await api.completions.create(model="policy", prompt="a text", max_tokens=5, logprobs=1)
        assert done.choices[0].text == "aaaaa"
        assert done.choices[0].finish_reason == "length"
        assert done.choices[0].logprobs.token_logprobs == [-0.5] * 5
        parts = [
            part
            async for part in await api.completions.create(
                model="policy", prompt="a", max_tokens=4, stream=True, stream_options={"include_usage": True}
            )
        ]
        assert "".join(part.choices[0].text for part in parts if part.choices) == "aaaa"
        assert parts[-1].usage.completion_tokens == 4
        lines = [json.loads(line) for line in (tmp_path / "record").read_text().splitlines()]
        assert [len(line["output_ids"]) for line in lines] == [5, 4]

    asyncio.run(run())


def test_refusals_name_what_is_wrong() -> None:
    async def run() -> None:
        service = make_service(SlowEngine(), max_running=1, max_waiting=0)
        async with client(service) as http:
            unknown = await http.post("completions", json={"model": "other", "prompt": "a"})
            assert unknown.status_code == 404
            assert "policy" in unknown.json()["error"]["message"]
            long = await http.post("completions", json={"prompt": [1] * 120})
            assert long.status_code == 400
            assert "120" in long.json()["error"]["message"]
            assert "100" in long.json()["error"]["message"]
            first = asyncio.create_task(http.post("completions", json={"prompt": "a", "max_tokens": 50}))
            await asyncio.sleep(0.02)
            full = await http.post("completions", json={"prompt": "a"})
            assert (full.status_code, full.headers["retry-after"]) == (429, "1")
            draining = asyncio.create_task(service.drain())
            await asyncio.sleep(0)
            assert (await http.get("http://engine/health")).status_code == 503
            assert (await http.post("completions", json={"prompt": "a"})).status_code == 503
            assert (await first).status_code == 200
            await draining

    asyncio.run(run())


def test_a_stop_string_split_over_tokens_is_found_and_held_back() -> None:
    text = TurnText(TOKENIZER, STOP, ["bc"])
    for letter in "ab":
        assert not text.feed(TOKENIZER.encode_text(letter)[0])
    assert text.text == "a"
    assert text.feed(TOKENIZER.encode_text("c")[0])
    assert (text.text, text.matched) == ("a", "bc")


def test_our_engine_answers_token_level_requests_with_routes() -> None:
    async def run() -> None:
        tiny = replace(load("tiny", []).model, vocab_size=TOKENIZER.vocab_size)
        engine = K3Engine(tiny, STOP, 32, 100)
        engine.model.init_weights(torch.Generator().manual_seed(0))
        engine.load(4, engine.served_tensors())
        async with client(make_service(engine)) as http:
            body = {
                "input_ids": [1, 2, 3],
                "sampling_params": {"max_new_tokens": 6, "seed": 1},
                "return_logprob": True,
                "return_routed_experts": True,
            }
            answer = (await http.post("http://engine/generate", json=body)).json()
            again = (await http.post("http://engine/generate", json=body)).json()
        assert "output_ids" in answer, answer
        num_tokens = len(answer["output_ids"])
        assert answer["output_ids"] == again["output_ids"]
        assert answer["meta_info"]["policy_steps"] == [4] * num_tokens
        shape = answer["meta_info"]["routed_experts_shape"]
        assert shape == [3 + num_tokens - 1, len(tiny.moe_layers), tiny.num_experts_per_token]
        routes = np.frombuffer(base64.b64decode(answer["meta_info"]["routed_experts"]), "<i4").reshape(shape)
        assert routes.min() >= 0
        assert routes.max() < tiny.num_experts
        assert [token for _, token, _ in answer["meta_info"]["output_token_logprobs"]] == answer["output_ids"]

    asyncio.run(run())


def test_our_engine_streams_each_token_as_it_is_drawn() -> None:
    async def run() -> None:
        tiny = replace(load("tiny", []).model, vocab_size=TOKENIZER.vocab_size)
        engine = K3Engine(tiny, -1, 32, 100)
        engine.model.init_weights(torch.Generator().manual_seed(0))
        engine.load(4, engine.served_tensors())
        heard: list[SampledToken] = []
        seen_in_between: list[int] = []

        async def watch() -> None:
            while len(heard) < 8:
                seen_in_between.append(len(heard))
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        request = GenerateRequest("s", [1, 2, 3], SamplingParams(temperature=0.7, max_tokens=8), 5, heard.append)
        generation = await engine.generate(request)
        await watching
        assert {2, 4, 7} <= set(seen_in_between)
        assert [token.token for token in heard] == generation.tokens_T.tolist()
        assert np.array_equal(np.float32([token.logprob for token in heard]), generation.logprobs_T)
        assert all(token.raw_logprob != token.logprob for token in heard)

    asyncio.run(run())


def test_greedy_and_bad_sampling_parameters_get_their_answers() -> None:
    async def run() -> None:
        async with client(make_service(SlowEngine())) as http:
            greedy = await http.post("completions", json={"prompt": "a", "temperature": 0, "max_tokens": 2})
            assert greedy.status_code == 200
            bad = await http.post("completions", json={"prompt": "a", "min_p": 1.5, "top_p": 0})
            assert bad.status_code == 400
            assert "min_p 1.5" in bad.json()["error"]["message"]
            assert "top_p 0" in bad.json()["error"]["message"]

    asyncio.run(run())
