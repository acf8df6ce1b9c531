"""Every trajectory, token for token, as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from k3core.rollout.engine import SampledToken


class Recorder:
    """Appends. A line is written whole and flushed before the client gets its answer; `None` as path records nothing."""

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else path.open("ab", buffering=0)

    def write(self, request_id: str, prompt: Sequence[int], tokens: Sequence[SampledToken], end: str) -> None:
        """end: "stop", "length" or "aborted". Aborted turns have the tokens that were heard."""
        if self._file is None:
            return
        line = {
            "request_id": request_id,
            "prompt_ids": list(prompt),
            "output_ids": [token.token for token in tokens],
            "logprobs": [token.logprob for token in tokens],
            "policy_steps": [token.policy_step for token in tokens],
            "end": end,
        }
        self._file.write(json.dumps(line).encode() + b"\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
