"""What all APIs write of an answer: its envelope, how many tokens it took, and their logprobs."""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from infra.engine_server.service import Answer
from infra.engine_server.text import token_bytes
from k3core.rollout.protocol import GenerateRequest, SampledToken
from k3core.tokenizer import Tokenizer

Document = dict[str, Any]


def envelope(name: str, kind: str, model: str, choices: list[Document]) -> Document:
    return {"id": name, "object": kind, "created": int(time.time()), "model": model, "choices": choices}


def usage(turn: GenerateRequest, answer: Answer) -> Document:
    num_prompt, num_drawn = len(turn.tokens), len(answer.tokens)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_drawn,
        "total_tokens": num_prompt + num_drawn,
        "prompt_tokens_details": {"cached_tokens": answer.generation.num_cached},
    }


def wants_usage(body: Mapping[str, Any]) -> bool:
    options = body.get("stream_options")
    return isinstance(options, dict) and bool(options.get("include_usage"))


def ids_and_steps(tokens: Sequence[SampledToken]) -> Document:
    """For `return_token_ids`: what trains needs the ids, and which version drew each."""
    return {
        "token_ids": [token.token for token in tokens],
        "policy_steps": [token.policy_step for token in tokens],
    }


def chat_logprobs(tokens: Sequence[SampledToken], tokenizer: Tokenizer, with_top: bool) -> Document:
    """The chat API's form, with text and bytes of each token; its list of top tokens has the sampled one alone."""
    content = []
    for token in tokens:
        data = token_bytes(tokenizer, token.token)
        entry = {"token": data.decode("utf-8", "replace"), "logprob": token.logprob, "bytes": list(data)}
        content.append({**entry, "top_logprobs": [entry] if with_top else []})
    return {"content": content, "refusal": None}


def token_logprobs(tokens: Sequence[SampledToken]) -> Document:
    """The chat API's form with ids in place of texts, as token-level clients read it."""
    entries = [{"token": f"token_id:{token.token}", "logprob": token.logprob, "bytes": None} for token in tokens]
    return {"content": [{**entry, "top_logprobs": [entry]} for entry in entries]}


def npy_base64(array: np.ndarray) -> str:
    """The bytes of a .npy file, so that dtype and shape travel with the numbers."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return base64.b64encode(file.getbuffer()).decode()
