"""What every stage opens first: the config behind its reference, the store, the tokenizer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from infra.config import RunConfig, dump, parse
from infra.pool import Pool, pool_for
from infra.stages.inputs import Inputs as Inputs
from infra.stages.record import StageRecord, find_record, stage_key, write_record
from infra.store import Store
from k3core.tokenizer import Tokenizer
from k3core.types import PolicyVersion, Ref

Progress = Callable[[int, int], None]  # (done, of)


def no_progress(done: int, of: int) -> None:
    del done, of


@dataclass(slots=True)
class Context:
    cfg: RunConfig
    store: Store
    inputs: Inputs
    started: float = field(default_factory=time.perf_counter)

    @classmethod
    def open(cls, inputs: Inputs, root: str) -> Context:
        store = Store(root)
        cfg = parse(store.get(inputs.config).decode(), inputs.config.uri)
        return cls(replace(cfg, root=root), store, inputs)

    @property
    def pool(self) -> Pool:
        return pool_for(self.cfg, self.inputs.config.sha256, self.store)

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_bytes(self.store.get(self.inputs.tokenizer))

    def elapsed(self) -> float:
        """Seconds since the stage began."""
        return time.perf_counter() - self.started

    def done(self, step: int, name: str, inputs: Mapping[str, Ref | None]) -> Ref | None:
        """The record of this very work, when it was done before: by a try that died after it, or on another machine.

        What gc took away since then is not made again for a reader that only needs the record.
        """
        found = find_record(self.store, stage_key(self.cfg.run, step, f"{name}.json"))
        return found[1] if found is not None and found[0].inputs == self._read(inputs) else None

    def _read(self, inputs: Mapping[str, Ref | None]) -> dict[str, Ref]:
        return {"config": self.inputs.config} | {role: ref for role, ref in inputs.items() if ref is not None}

    def record(
        self,
        stage: str,
        step: int,
        outputs: Mapping[str, Ref],
        metrics: Mapping[str, float],
        *,
        policy: PolicyVersion | None = None,
        notes: Mapping[str, str] | None = None,
        name: str | None = None,
        inputs: Mapping[str, Ref | None] | None = None,
        provenance: Mapping[str, Any] | None = None,
    ) -> Ref:
        """Write the stage's record last: until then nothing of it exists for anybody else.

        inputs: what the stage read besides the config; None for what there was none of.
        """
        finished_ms = int(time.time() * 1000)
        record = StageRecord(
            stage,
            self.cfg.run,
            step,
            outputs,
            metrics,
            self.elapsed(),
            finished_ms,
            policy,
            dict(notes or {}),
            self._read(inputs or {}),
            dict(provenance or {}),
        )
        return write_record(self.store, record, name)


def stage_config(cfg: RunConfig) -> str:
    """The config without what only the flow reads: more steps, other retries or another tracker change no stage."""
    defaults = RunConfig()
    neutral = replace(cfg, root=defaults.root, steps=defaults.steps, control=defaults.control, tasks=defaults.tasks)
    neutral = replace(neutral, pools=defaults.pools, gates=defaults.gates)
    neutral = replace(neutral, evaluate=replace(cfg.evaluate, every=defaults.evaluate.every, between=False))
    return dump(replace(neutral, tracking=defaults.tracking))
