"""What every API shares: admission, refusals, faults, what leaves early, and weights that change while turns run."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from engines import STOP, TOKENIZER, SlowEngine, client_of, make_service, random_tensors, real_engine

from infra.engine_server.text import TurnText
from k3core.rollout.protocol import GenerateRequest, Generation, UnknownAdapter

URLS = ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate", "/generate")


def body_of(url: str, **more: Any) -> dict[str, Any]:
    """A request for up to 8 tokens in that API's words."""
    sampling = {"max_new_tokens" if url == "/generate" else "max_tokens": 8, "temperature": 0}
    return {
        "/v1/completions": {"prompt": "a", **sampling},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], **sampling},
        "/inference/v1/generate": {"token_ids": [1, 2, 3], "sampling_params": sampling},
        "/generate": {"input_ids": [1, 2, 3], "sampling_params": sampling},
    }[url] | more


def events(text: str) -> list[Any]:
    """Of a stream; its end mark is the string it is."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def test_the_openai_client_completes_and_streams(tmp_path: Path) -> None:
    async def run() -> None:
        service = make_service(SlowEngine(), record_path=tmp_path / "record")
        async with client_of(service) as http:
            api = openai.AsyncOpenAI(api_key="none", base_url="http://engine/v1", http_client=http)
            done = await api.completions.create(model="policy", prompt="a text", max_tokens=5, logprobs=1)
            assert done.choices[0].text == "aaaaa"
            assert done.choices[0].finish_reason == "length"
            assert done.choices[0].logprobs.token_logprobs == [-0.5] * 5
            stream = await api.completions.create(
                model="policy", prompt="a", max_tokens=4, stream=True, stream_options={"include_usage": True}
            )
            parts = [part async for part in stream]
            assert "".join(part.choices[0].text for part in parts if part.choices) == "aaaa"
            assert parts[-1].usage.completion_tokens == 4
        lines = [json.loads(line) for line in (tmp_path / "record").read_text().splitlines()]
        assert [len(line["output_ids"]) for line in lines] == [5, 4]
        assert lines[0]["raw_logprobs"] == [-0.75] * 5

    asyncio.run(run())


@pytest.mark.parametrize("url", URLS)
def test_every_api_refuses_what_it_must_with_the_same_words(url: str) -> None:
    async def run() -> None:
        engine = SlowEngine()
        service = make_service(engine, max_running=1, max_waiting=0)
        key = "input_ids" if url == "/generate" else "token_ids" if "inference" in url else "prompt"
        is_chat = "chat" in url
        async with client_of(service) as http:
            unknown = await http.post(url, json=body_of(url, model="other"))
            assert unknown.status_code == 404
            assert "'other' is not served here; known: policy" in unknown.json()["error"]["message"]
            too_long = {"messages": [{"role": "user", "content": "\x07" * 420}]} if is_chat else {key: [1] * 420}
            long = await http.post(url, json=body_of(url, **too_long))
            assert long.status_code == 400
            assert "length of 400: shorten it" in long.json()["error"]["message"]
            if not is_chat:
                wrong = await http.post(url, json=body_of(url, **{key: [1, 10**6]}))
                assert (wrong.status_code, "1000000" in wrong.text) == (400, True)
            first = asyncio.create_task(http.post("/v1/completions", json={"prompt": "a", "max_tokens": 50}))
            while not engine.running:
                await asyncio.sleep(0.001)
            full = await http.post(url, json=body_of(url))
            assert (full.status_code, full.headers["retry-after"]) == (429, "1")
            draining = asyncio.create_task(service.drain())
            await asyncio.sleep(0)
            assert (await http.post(url, json=body_of(url))).status_code == 503
            assert (await http.get("/health")).json()["state"] == "draining"
            assert (await first).status_code == 200
            await draining

    asyncio.run(run())


def test_a_process_that_still_loads_is_live_and_not_ready() -> None:
    async def run() -> None:
        async with client_of(make_service(None)) as http:
            assert (await http.get("/live")).status_code == 200
            assert (await http.get("/health")).status_code == 503
            assert (await http.post("/generate", json=body_of("/generate"))).status_code == 503

    asyncio.run(run())


@pytest.mark.parametrize("url", URLS)
def test_an_engine_that_fails_in_a_stream_says_so_there_and_then_in_health(url: str, tmp_path: Path) -> None:
    async def run() -> None:
        service = make_service(SlowEngine(fails_after=3), record_path=tmp_path / "record")
        async with client_of(service) as http:
            told = events((await http.post(url, json=body_of(url, stream=True))).text)
            assert told[-1]["error"]["code"] == 503
            assert "a kernel failed" in told[-1]["error"]["message"]
            assert "[DONE]" not in told
            health = await http.get("/health")
            assert (health.status_code, health.json()["state"]) == (503, "fault")
            assert (await http.get("/live")).status_code == 200
            assert (await http.post(url, json=body_of(url))).status_code == 503
        assert json.loads((tmp_path / "record").read_text().splitlines()[0])["end"] == "fault"

    asyncio.run(run())


@pytest.mark.parametrize("url", URLS)
def test_weights_that_come_in_a_stream_show_in_the_tokens_steps(url: str) -> None:
    async def run() -> None:
        engine = real_engine(random_tensors(0), step=4)
        heard: list[str] = []
        async with client_of(make_service(engine)) as http:
            body = body_of(url, stream=True, return_token_ids=True)
            body.get("sampling_params", body)["max_new_tokens" if url == "/generate" else "max_tokens"] = 40
            asking = asyncio.create_task(http.post(url, json=body))
            while not any(turn.drawn for turn in engine._turns.values()):
                await asyncio.sleep(0)
            engine.load(5, random_tensors(1))
            heard = events((await asking).text)
        steps = [step for event in heard[:-1] for step in steps_of(event)]
        steps = steps_of(heard[-2]) if url == "/generate" else steps
        assert set(steps) == {4, 5}
        assert steps == sorted(steps)

    asyncio.run(run())


def steps_of(event: dict[str, Any]) -> list[int]:
    if "meta_info" in event:
        return list(event["meta_info"]["policy_steps"])
    return [step for choice in event["choices"] for step in choice.get("policy_steps", ())]


def test_a_drain_that_runs_out_aborts_the_turn_and_records_what_was_heard(tmp_path: Path) -> None:
    async def run() -> None:
        engine = SlowEngine()
        service = make_service(engine, drain_s=0.05, record_path=tmp_path / "record")
        async with client_of(service) as http:
            asking = asyncio.create_task(http.post("/v1/completions", json={"prompt": "a", "max_tokens": 10**5}))
            while not engine.running:
                await asyncio.sleep(0.001)
            await service.drain()
            answer = await asking
            assert (answer.status_code, "aborted" in answer.text) == (503, True)
            assert engine.running == 0
        line = json.loads((tmp_path / "record").read_text())
        assert line["end"] == "aborted"
        assert len(line["output_ids"]) > 0

    asyncio.run(run())


def test_an_adapter_that_goes_while_its_turn_runs_ends_the_turn_alone() -> None:
    class Forgets(SlowEngine):
        async def generate(self, request: GenerateRequest) -> Generation:
            raise UnknownAdapter(f"adapter {request.adapter!r} was unloaded while the turn ran")

    async def run() -> None:
        engine = Forgets()
        engine.adapters = ("x",)
        async with client_of(make_service(engine)) as http:
            gone = await http.post("/generate", json=body_of("/generate", lora_path="x"))
            assert (gone.status_code, "unloaded" in gone.text) == (404, True)
            assert (await http.get("/health")).status_code == 200

    asyncio.run(run())


def test_tenant_priority_seed_and_adapter_reach_the_engine() -> None:
    async def run() -> None:
        engine = SlowEngine()
        engine.adapters = ("x",)
        async with client_of(make_service(engine)) as http:
            for url in URLS:
                body = body_of(url, model="policy:x", cache_salt="salt", priority=2)
                body.get("sampling_params", body)["seed"] = 7
                assert (await http.post(url, json=body)).status_code == 200, url
            for turn in engine.asked:
                assert (turn.adapter, turn.tenant, turn.priority, turn.seed) == ("x", "salt", 2, 7)
            names = [model["id"] for model in (await http.get("/v1/models")).json()["data"]]
            assert names == ["policy", "policy:x"]
            refused = await http.post("/generate", json=body_of("/generate", priority=-1))
            assert (refused.status_code, "priority -1" in refused.text) == (400, True)

    asyncio.run(run())


def test_a_stop_string_split_over_tokens_is_held_back() -> None:
    text = TurnText(TOKENIZER, (STOP,), ["bc"])
    for letter in "ab":
        text.feed(TOKENIZER.encode_text(letter)[0])
    assert (text.text, text.num_characters) == ("a", 2)
    text.feed(TOKENIZER.encode_text("c")[0])
    text.finish()
    assert text.text == "a"


def test_greedy_and_bad_sampling_parameters_get_their_answers() -> None:
    async def run() -> None:
        async with client_of(make_service(SlowEngine())) as http:
            greedy = await http.post("/v1/completions", json={"prompt": "a", "temperature": 0, "max_tokens": 2})
            assert greedy.status_code == 200
            bad = await http.post("/v1/completions", json={"prompt": "a", "min_p": 1.5, "top_p": 0})
            assert bad.status_code == 400
            assert "min_p 1.5" in bad.json()["error"]["message"]
            assert "top_p 0" in bad.json()["error"]["message"]
            for wrong in ({"max_tokens": 0}, {"stop": 3}, {"n": 2}, {"prompt": ["a", "b"]}, {"seed": "x"}):
                assert (await http.post("/v1/completions", json={"prompt": "a", **wrong})).status_code == 400, wrong

    asyncio.run(run())
