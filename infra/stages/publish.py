"""Publish: a step's weights become a policy version, and every engine loads it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

from infra import policies
from infra.canary import Canary, compare_canary, from_text, play_canary
from infra.parts import build_environment, eval_suite, rubric_sha256, train_sampling
from infra.policies import PublishStats
from infra.pruned import find_mark
from infra.resident.client import Resident
from infra.serving import ServedPolicyError as ServedPolicyError
from infra.serving import ServingEngine, acked_base, read_served, serve
from infra.stages.context import Context, Inputs
from infra.stages.record import StageRecord, read_record, stage_key
from k3core.checkpoint.tensors import Weights, from_safetensors, weights_sha256
from k3core.errors import IntegrityError
from k3core.model.weights import is_adapter_tensor
from k3core.parity import Played
from k3core.types import PolicyVersion, Ref

SERVE_TIMEOUT_S = 600.0


def publish_step(
    inputs: Inputs, root: str, trained: Ref, parent: PolicyVersion | None, engines: tuple[str, ...] = ()
) -> Ref:
    """Record with the version as `policy`. A base first and every full_every steps, deltas between; adapters whole.

    A delta stands on the version that every engine has acknowledged, which is `parent` or an older one. The engines
    (those at the URLs, else this process's own) then load the version from the store and answer with the digest of
    what they hold, and sample a canary batch, which the trainer computes again before anybody is shown the version
    (`infra.canary`). Raises NotServed, which another try may mend, when one of them did not answer,
    ServedPolicyError when one holds other weights: a sync that ships the wrong tensors must not look like staleness,
    and NumericDrift when the canary's log-probabilities differ by more than publish.max_numeric_drift.
    """
    context = Context.open(inputs, root)
    store, record = context.store, read_record(context.store, trained)
    step = record.step
    version, stats = _publish(context, record)
    served, canaries = read_served(store, version.run), list[Canary]()
    if served is None or served.version.step <= step:  # else it was served in its time, and this is a replay
        serving = _serving(context, engines)
        serve(
            *(store, version, serving, SERVE_TIMEOUT_S),
            lambda: canaries.extend(_compare_canaries(context, record, version, serving)),
        )
    metrics = {
        "publish/bytes_payload": float(stats.bytes_payload),
        "publish/bytes_full": float(stats.bytes_full),
        "publish/seconds": context.elapsed(),
    }
    if stats.changed_fraction is not None:
        metrics["publish/changed_fraction"] = stats.changed_fraction
    if canaries:
        metrics |= reduce(Canary.__add__, canaries).metrics
    read = {"trained": trained, "parent": None if parent is None else parent.weights, "tokenizer": inputs.tokenizer}
    return context.record("publish", step, {"manifest": version.weights}, metrics, policy=version, inputs=read)


def _publish(context: Context, record: StageRecord) -> tuple[PolicyVersion, PublishStats]:
    cfg, store, step = context.cfg, context.store, record.step
    tokenizer_sha256 = context.inputs.tokenizer.sha256
    tags = {"environment_sha256": build_environment(cfg).sha256, "tokenizer_sha256": tokenizer_sha256}
    weights = _trained_weights(context, record)
    if weights is None:
        version = policies.read_version(store, cfg.run, step)
        assert version is not None, "gc takes the trainer's copy of what is published"
        return version, policies.stats(store, cfg.run, [step])[step]
    if cfg.train.mode == "lora" and step > 0:
        adapter = {name: tensor for name, tensor in weights.items() if is_adapter_tensor(name)}
        _refuse_moved_base(context, record, weights)
        return policies.publish_adapter(store, cfg.run, step, adapter, tags)
    base, publish = acked_base(store, cfg.run, step), cfg.publish
    return policies.publish(store, cfg.run, step, weights, base, publish.full_every, publish.zstd_level, tags)


def _trained_weights(context: Context, record: StageRecord) -> Weights | None:
    """None when gc took the trainer's copy, which it does once the version is published and served."""
    source, store = record.outputs["weights"], context.store
    try:
        return from_safetensors(store.get(source), source.uri)
    except IntegrityError:
        key = stage_key(record.run, record.step, source.uri.rpartition("/")[2])
        if find_mark(store, record.run, source.sha256, key) is None or store.size(key) is not None:
            raise
        return None


def _refuse_moved_base(context: Context, record: StageRecord, weights: Weights) -> None:
    """An adapter carries its own tensors only: a change in others would be trained on, and never served."""
    base = policies.read_version(context.store, context.cfg.run, 0)
    frozen = {name: tensor for name, tensor in weights.items() if not is_adapter_tensor(name)}
    if base is not None and weights_sha256(frozen) != base.weights_sha256:
        raise ServedPolicyError(
            f"step {record.step} of run {record.run!r} changed tensors outside its adapter, which would be lost: "
            "train.mode lora freezes them"
        )


@dataclass(frozen=True, slots=True)
class _Remote:
    """A resident engine by its URL, as `serve` asks for it."""

    name: str
    context: Context

    def load(self, version: PolicyVersion) -> str:
        return Resident(self.name).load(self.context.inputs, self.context.cfg.root, version)

    def play_canary(self, version: PolicyVersion) -> list[Played]:
        return from_text(Resident(self.name).canary(self.context.inputs, self.context.cfg.root, version))


def _serving(context: Context, urls: Sequence[str]) -> Sequence[ServingEngine]:
    if urls:
        return [_Remote(url, context) for url in urls]
    return context.pool.serving_engines(context.tokenizer())


def _compare_canaries(
    context: Context, trained: StageRecord, version: PolicyVersion, engines: Sequence[ServingEngine]
) -> Iterator[Canary]:
    """One an engine. Raises NumericDrift."""
    if (limit := context.cfg.publish.max_numeric_drift) is None:
        return
    optimizer = trained.outputs.get("optimizer")
    for engine in engines:
        played = engine.play_canary(version) if isinstance(engine, _Remote) else play_canary(context, version)
        yield compare_canary(context, version, optimizer, limit, played, engine.name)


def version_tags(inputs: Inputs, root: str) -> dict[str, str]:
    """What else identifies a version in the registry: environment, rubric, tokenizer, engine settings."""
    context = Context.open(inputs, root)
    cfg = context.cfg
    return {
        "environment_sha256": build_environment(cfg).sha256,
        "rubric_sha256": rubric_sha256(eval_suite(cfg)),
        "tokenizer_sha256": inputs.tokenizer.sha256,
        "config_sha256": inputs.config.sha256,
        "engine": f"K3Engine slots={cfg.rollout.max_running} max_length={cfg.environment.max_tokens} {train_sampling(cfg)}",
    }
