"""Token ids in and out: vLLM's and SGLang's forms of it, over the real tiny engine."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import numpy as np
from engines import CHAT, MODEL, STOP, TOKENIZER, client_of, make_service, random_tensors, real_engine
from test_engine_server import events

PROMPT = list(range(1, 40))
NUM_PROMPT = len(PROMPT)


def ask(talk: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    async def run() -> None:
        async with client_of(make_service(real_engine(random_tensors()))) as http:
            await talk(http)

    asyncio.run(run())


def sglang_body(**more: Any) -> dict[str, Any]:
    return {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 6, "seed": 1}, "return_logprob": True, **more}


def vllm_body(**more: Any) -> dict[str, Any]:
    params = {"max_tokens": 6, "seed": 1, "logprobs": 1}
    return {"request_id": "mine", "token_ids": PROMPT, "sampling_params": params, **more}


def test_routes_cover_every_input_also_those_from_the_cache() -> None:
    async def talk(http: httpx.AsyncClient) -> None:
        first, again = [
            (await http.post("/generate", json=sglang_body(return_routed_experts=True))).json() for _ in range(2)
        ]
        assert again["output_ids"] == first["output_ids"]
        assert first["meta_info"]["cached_tokens"] == 0
        assert again["meta_info"]["cached_tokens"] > 0
        shape = again["meta_info"]["routed_experts_shape"]
        num_inputs = NUM_PROMPT + len(again["output_ids"]) - 1
        assert shape == [num_inputs, len(MODEL.cfg.moe_layers), MODEL.cfg.num_experts_per_token]
        assert len(again["meta_info"]["routed_layers"]) == shape[1]
        routes = np.frombuffer(base64.b64decode(again["meta_info"]["routed_experts"]), "<i4").reshape(shape)
        assert 0 <= routes.min() <= routes.max() < MODEL.cfg.num_experts
        assert again["meta_info"]["routed_experts"] == first["meta_info"]["routed_experts"]

        vllm = (await http.post("/inference/v1/generate", json=vllm_body())).json()["choices"][0]
        array = np.load(io.BytesIO(base64.b64decode(vllm["routed_experts"])))
        assert vllm["token_ids"] == first["output_ids"]
        assert np.array_equal(array, routes)

    ask(talk)


def test_generate_gives_both_kinds_of_logprobs_and_what_sampling_kept() -> None:
    async def talk(http: httpx.AsyncClient) -> None:
        body = sglang_body(return_supports=True)
        body["sampling_params"] |= {"temperature": 0.5, "top_k": 3}
        meta = (answer := (await http.post("/generate", json=body)).json())["meta_info"]
        for key in ("output_token_logprobs", "output_token_raw_logprobs"):
            assert [token for _, token, _ in meta[key]] == answer["output_ids"]
        assert meta["output_token_logprobs"] != meta["output_token_raw_logprobs"]
        for token, support in zip(answer["output_ids"], meta["output_token_supports"], strict=True):
            assert token in support
            assert len(support) == 3

    ask(talk)


def test_a_stream_of_generate_ends_with_the_whole_answer() -> None:
    async def talk(http: httpx.AsyncClient) -> None:
        whole = (await http.post("/generate", json=sglang_body())).json()
        *parts, last, done = events((await http.post("/generate", json=sglang_body(stream=True))).text)
        assert done == "[DONE]"
        assert [part["output_ids"] for part in parts] == [whole["output_ids"][: n + 1] for n in range(len(parts))]
        assert [part["meta_info"]["finish_reason"] for part in parts] == [None] * len(parts)
        assert all(whole["text"].startswith(part["text"]) for part in parts)
        for answer in (whole, last):  # every turn has a name, and the second one found the first in the cache
            del answer["meta_info"]["id"], answer["meta_info"]["cached_tokens"]
        assert last == whole

    ask(talk)


def test_generate_reads_text_as_the_tokenizer_does_and_stops_at_ids() -> None:
    async def talk(http: httpx.AsyncClient) -> None:
        body = sglang_body()
        whole = (await http.post("/generate", json=body)).json()["output_ids"]
        body["sampling_params"]["stop_token_ids"] = [whole[2]]
        answer = (await http.post("/generate", json=body)).json()
        end = whole.index(whole[2])
        assert answer["output_ids"] == whole[: end + 1]
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": whole[2]}
        assert answer["text"] == TOKENIZER.decode(whole[:end])
        by_text = {"text": "Oslo", "sampling_params": {"max_new_tokens": 2, "seed": 3}}
        by_ids = {"input_ids": TOKENIZER.encode_text("Oslo"), "sampling_params": {"max_new_tokens": 2, "seed": 3}}
        answers = [(await http.post("/generate", json=each)).json()["output_ids"] for each in (by_text, by_ids)]
        assert answers[0] == answers[1]
        both = await http.post("/generate", json=by_text | by_ids)
        assert (both.status_code, "give one of them" in both.text) == (400, True)

    ask(talk)


def test_vllms_answer_has_its_fields_whole_and_streamed() -> None:
    async def talk(http: httpx.AsyncClient) -> None:
        whole = (await http.post("/inference/v1/generate", json=vllm_body())).json()
        assert (whole["request_id"], whole["model"], whole["prompt_logprobs"]) == ("mine", "policy", None)
        choice = whole["choices"][0]
        ids = choice["token_ids"]
        assert [entry["token"] for entry in choice["logprobs"]["content"]] == [f"token_id:{token}" for token in ids]
        assert choice["finish_reason"] == ("stop" if ids[-1] == STOP else "length")
        assert whole["usage"]["total_tokens"] == NUM_PROMPT + len(ids)
        body = vllm_body(stream=True, stream_options={"include_usage": True})
        *parts, usage, done = events((await http.post("/inference/v1/generate", json=body)).text)
        assert done == "[DONE]"
        assert [token for part in parts for token in part["choices"][0]["token_ids"]] == ids
        logprobs = [e for part in parts[:-1] for e in part["choices"][0]["logprobs"]["content"]]
        assert logprobs == choice["logprobs"]["content"]
        assert parts[-1]["choices"][0]["routed_experts"] == choice["routed_experts"]
        assert [part["choices"][0]["finish_reason"] for part in parts] == [None] * len(ids) + [choice["finish_reason"]]
        assert usage["usage"]["prompt_tokens_details"]["cached_tokens"] > 0

    ask(talk)


def test_another_tenant_finds_nothing_of_ours_in_the_cache() -> None:
    async def talk(http: httpx.AsyncClient) -> None:
        cached = []
        for salt in ("one", "two", "one"):
            answer = (await http.post("/inference/v1/generate", json=vllm_body(cache_salt=salt))).json()
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert cached[:2] == [0, 0]
        assert cached[2] > 0

    ask(talk)


def test_ids_that_only_the_model_has_are_answered_as_unknown_characters() -> None:
    from infra.engine_server.text import TurnText

    text = TurnText(TOKENIZER, (CHAT.stop_token,))
    text.feed(TOKENIZER.vocab_size + 5)
    text.finish()
    assert text.text == "\ufffd"
