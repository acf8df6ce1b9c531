"""Engines for the tests of the server: the real one over a tiny model that knows a conversation by heart, and one
whose time is the test's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import httpx
import numpy as np
import torch
from torch import Tensor

from infra.config import load
from infra.engine_server.app import make_app
from infra.engine_server.service import Service
from infra.engine_server.settings import Made, ServerSettings
from infra.engine_server.weights import ServedModel
from k3core.chat import ChatSettings, chat_format, training_texts
from k3core.model.lora import LoraConfig
from k3core.model.model import K3Model
from k3core.model.weights import named_tensors
from k3core.rl.optim import OptimConfig
from k3core.rl.supervised import demonstration, supervised_step
from k3core.rl.trainer import Trainer
from k3core.rollout.engine import K3Engine
from k3core.rollout.protocol import GenerateRequest, Generation, SampledToken, UpdateRule
from k3core.tokenizer import Tokenizer
from k3core.types import Message, ToolCall

MAX_LENGTH = 400

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
ASKED = Message("user", "weather in Oslo?")
CALLED = Message("assistant", "let me see", tool_calls=(ToolCall("weather", {"city": "Oslo", "days": 2}),))
RESULT = Message("tool", "3 degrees", tool="weather", index=1)
ANSWERED = Message("assistant", "It is cold: 3 °.")
THOUGHT = Message("assistant", "Cold.", thinking="it is Oslo")

TOKENIZER = Tokenizer.train(training_texts([ASKED, CALLED, RESULT, ANSWERED], ChatSettings(tools=(TOOL,))), 400)
CHAT = chat_format(TOKENIZER)
STOP = CHAT.stop_token
MODEL = ServedModel(
    replace(
        load("tiny", []).model,
        vocab_size=TOKENIZER.vocab_size,
        hidden_size=64,
        num_hidden_layers=3,
        full_attn_layers=(3,),
    )
)


@cache
def taught_tensors() -> dict[str, Tensor]:
    """Weights of a model that says CALLED to ASKED where it has the tool, ANSWERED to RESULT, and THOUGHT to ASKED when
    it may think."""
    demonstrations = [
        demonstration([ASKED, CALLED, RESULT, ANSWERED], TOKENIZER, ChatSettings(tools=(TOOL,))),
        demonstration([ASKED, THOUGHT], TOKENIZER, ChatSettings(thinking=True)),
    ]
    trainer = Trainer(MODEL.cfg, OptimConfig(), None, 0)
    for _ in range(100):
        if supervised_step(trainer, demonstrations, 2, 6e-3).loss < 0.01:
            break
    return {name: tensor.clone() for name, tensor in trainer.save()[0].items()}


def random_tensors(seed: int = 0) -> dict[str, Tensor]:
    model = K3Model(MODEL.cfg)
    model.init_weights(torch.Generator().manual_seed(seed))
    return {name: tensor.detach().clone() for name, tensor in named_tensors(model).items()}


def real_engine(tensors: Mapping[str, Tensor], step: int = 4) -> K3Engine:
    engine = K3Engine(MODEL.cfg, STOP, 32, MAX_LENGTH, tokenizer=TOKENIZER)
    engine.load(step, tensors)
    return engine


class SlowEngine:
    """Says "a" for ever, a token every millisecond; each knows the step that was loaded when it was drawn."""

    def __init__(self, fails_after: int | None = None) -> None:
        self.policy_step = 3
        self.running = 0
        self.adapters: tuple[str, ...] = ()
        self.asked: list[GenerateRequest] = []
        self._fails_after = fails_after

    def load(self, step: int, tensors: Mapping[str, Tensor], rule: UpdateRule = "drop") -> None:
        del tensors, rule
        self.policy_step = step

    def load_adapter(self, name: str, tensors: Mapping[str, Tensor], config: LoraConfig) -> None:
        del tensors, config
        self.adapters = (*self.adapters, name)

    def unload_adapter(self, name: str) -> None:
        self.adapters = tuple(other for other in self.adapters if other != name)

    async def generate(self, request: GenerateRequest) -> Generation:
        self.asked.append(request)
        self.running += 1
        token, drawn = TOKENIZER.encode_text("a")[0], []
        try:
            for n in range(T := request.sampling.max_tokens):
                if n == self._fails_after:
                    raise RuntimeError("a kernel failed")
                drawn.append(SampledToken(token, -0.5, -0.75, self.policy_step))
                assert request.on_token is not None
                request.on_token(drawn[-1])
                await asyncio.sleep(0.001)
        finally:
            self.running -= 1
        steps_T = np.array([each.policy_step for each in drawn], np.int32)
        routes_TLk = np.zeros((len(request.tokens) + T - 1, 1, 2), np.uint8)
        numbers_T = np.full(T, -0.5, np.float32), np.full(T, -0.75, np.float32)
        return Generation(
            np.full(T, token, np.int32), *numbers_T, steps_T, (None,) * T, 0, routes_TLk, ("layers.1",), "max_tokens"
        )

    def release(self, sequence: str) -> None: ...


def make_service(engine: Any, **settings: Any) -> Service:
    """engine None: it is still loading."""
    service = Service(ServerSettings(lambda: Made(engine), TOKENIZER, MODEL, MAX_LENGTH, **settings))
    service.engine = engine
    return service


@asynccontextmanager
async def client_of(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(make_app(service)), base_url="http://engine") as http:
        yield http
