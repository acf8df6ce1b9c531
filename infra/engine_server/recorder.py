"""Every turn, token for token, as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from k3core.rollout.protocol import GenerateRequest, SampledToken


class Recorder:
    """Appends. A line is written whole and flushed before the client gets its answer; `None` as path records nothing."""

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else path.open("ab", buffering=0)

    def write(
        self, turn: GenerateRequest, tokens: Sequence[SampledToken], end: Literal["stop", "length", "aborted", "fault"]
    ) -> None:
        """Turns that were aborted or that the engine failed have the tokens that were heard."""
        if self._file is None:
            return
        line = {
            "request_id": turn.sequence,
            "adapter": turn.adapter,
            "seed": turn.seed,
            "prompt_ids": list(turn.tokens),
            "output_ids": [token.token for token in tokens],
            "logprobs": [token.logprob for token in tokens],
            "raw_logprobs": [token.raw_logprob for token in tokens],
            "policy_steps": [token.policy_step for token in tokens],
            "end": end,
        }
        self._file.write(json.dumps(line).encode() + b"\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
