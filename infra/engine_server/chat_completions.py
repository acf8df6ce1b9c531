"""/v1/chat/completions: messages in the tokenizer's chat format, and the turn that answers them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from infra.engine_server.answers import Document, chat_logprobs, envelope, ids_and_steps, usage, wants_usage
from infra.engine_server.chat_messages import read_messages, written_calls
from infra.engine_server.chat_text import ChatText, ChatTurn
from infra.engine_server.errors import ApiError
from infra.engine_server.requests import (
    read_body,
    read_object,
    read_sampling,
    read_string,
    read_turn,
    refuse_not_served,
    wants_logprobs,
)
from infra.engine_server.service import Answer, Service
from infra.engine_server.streaming import stream, whole
from k3core.chat import ChatFormat, ChatSettings
from k3core.rollout.protocol import GenerateRequest, SampledToken
from k3core.tokenizer import Tokenizer


async def chat_completions(service: Service, request: Request) -> Response:
    body = await read_body(request)
    model = service.find_model(read_string(body, "model"))
    settings = _chat_settings(body, service.settings.thinking)
    ids = _prompt(service.chat, body, settings)
    max_keys = ("max_completion_tokens", "max_tokens")
    sampling = read_sampling(body, max_keys, service.settings.default_max_tokens)
    turn = read_turn(body, body, ids, sampling, model.adapter, "chatcmpl")
    text = ChatText(service.tokenizer, service.chat, settings.thinking, sampling.stop_token_ids, sampling.stop)
    with_logprobs = wants_logprobs(body.get("logprobs"), "logprobs")
    with_top = wants_logprobs(body.get("top_logprobs"), "top_logprobs") and body["top_logprobs"] != 0
    writer = _Writer(service.tokenizer, body, turn, text, model.name, with_logprobs, with_top)
    if body.get("stream"):
        return await stream(service, request, turn, text, writer)
    answer = await whole(service, request, turn, text)
    return JSONResponse(writer.whole(answer))


def _chat_settings(body: Mapping[str, Any], thinking: bool) -> ChatSettings:
    refuse_not_served(body)
    said = read_object(body, "chat_template_kwargs").get("thinking", thinking)
    if not isinstance(said, bool):
        raise ApiError(400, f"chat_template_kwargs.thinking {json.dumps(said)}: expected true or false")
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(map(_is_function, tools)):
        raise ApiError(400, 'tools: expected a list of {"type": "function", "function": {"name": "..."}}')
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        line = f'tool_choice {json.dumps(choice)}: nothing makes the policy call a tool here; use "auto" or "none"'
        raise ApiError(400, line)
    return ChatSettings(
        thinking=said,
        tools=tuple(tools),
        thinking_effort=body.get("reasoning_effort"),
        tool_choice="none" if choice == "none" and tools else None,
    )


def _is_function(tool: Any) -> bool:
    match tool:
        case {"type": "function", "function": {"name": str()}}:
            return True
    return False


def _prompt(chat: ChatFormat, body: Mapping[str, Any], settings: ChatSettings) -> list[int]:
    messages = read_messages(body.get("messages"), settings.thinking)
    try:
        return chat.render_messages(messages, settings) + chat.generation_stub(settings.thinking)
    except ValueError as error:
        raise ApiError(400, str(error)) from error


@dataclass(slots=True)
class _Writer:
    tokenizer: Tokenizer
    body: Mapping[str, Any]
    turn: GenerateRequest
    text: ChatText
    model: str
    with_logprobs: bool
    with_top: bool
    num_sent: int = 0  # characters of the content
    has_sent_reasoning: bool = False

    def whole(self, answer: Answer) -> Document:
        said = self.text.turn()
        message: Document = {"role": "assistant", "content": said.content}
        if said.reasoning is not None:
            message["reasoning_content"] = said.reasoning
        if said.calls:
            message |= {"content": said.content or None, "tool_calls": written_calls(said.calls)}
        choice = {"index": 0, "message": message, **self._of_tokens(answer.tokens), **_end(answer, said)}
        document = envelope(self.turn.sequence, "chat.completion", self.model, [choice])
        return document | self._prompt_ids() | {"usage": usage(self.turn, answer)}

    def opening(self) -> Iterator[Document]:
        yield self._chunk({"role": "assistant", "content": ""}, ()) | self._prompt_ids()

    def of_token(self, token: SampledToken) -> Iterator[Document]:
        delta = self._delta(self.text.reasoning, self.text.content)
        if delta or self.with_logprobs or self.body.get("return_token_ids"):
            yield self._chunk(delta, (token,))

    def closing(self, answer: Answer) -> Iterator[Document]:
        said = self.text.turn()
        delta = self._delta(said.reasoning, said.content)
        if said.calls:
            delta["tool_calls"] = [{"index": n, **call} for n, call in enumerate(written_calls(said.calls))]
        if delta:
            yield self._chunk(delta, ())
        yield self._chunk({}, (), _end(answer, said))
        if wants_usage(self.body):
            document = envelope(self.turn.sequence, "chat.completion.chunk", self.model, [])
            yield document | {"usage": usage(self.turn, answer)}

    def _delta(self, reasoning: str | None, content: str) -> Document:
        """What is new since the last one."""
        delta: Document = {}
        if reasoning is not None and not self.has_sent_reasoning:
            delta["reasoning_content"], self.has_sent_reasoning = reasoning, True
        if len(content) > self.num_sent:
            delta["content"], self.num_sent = content[self.num_sent :], len(content)
        return delta

    def _chunk(self, delta: Document, tokens: tuple[SampledToken, ...], end: Document | None = None) -> Document:
        ending = end or {"finish_reason": None}
        choice = {"index": 0, "delta": delta, **self._of_tokens(tokens), **ending}
        return envelope(self.turn.sequence, "chat.completion.chunk", self.model, [choice])

    def _of_tokens(self, tokens: tuple[SampledToken, ...]) -> Document:
        has_logprobs = self.with_logprobs and tokens
        logprobs = chat_logprobs(tokens, self.tokenizer, self.with_top) if has_logprobs else None
        return {"logprobs": logprobs} | (ids_and_steps(tokens) if self.body.get("return_token_ids") else {})

    def _prompt_ids(self) -> Document:
        return {"prompt_token_ids": list(self.turn.tokens)} if self.body.get("return_token_ids") else {}


def _end(answer: Answer, said: ChatTurn) -> Document:
    is_calling = said.calls and answer.finish == "stop"
    return {
        "finish_reason": "tool_calls" if is_calling else answer.finish,
        "stop_reason": answer.generation.matched,
    }
