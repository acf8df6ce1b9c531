"""Publish: a step's weights become a policy version that engines can load."""

from __future__ import annotations

from infra import policies
from infra.parts import build_environment, eval_suite, rubric_sha256, train_sampling
from infra.pool import load_policy
from infra.stages.context import Context, Inputs
from infra.stages.record import read_record
from k3core.checkpoint.tensors import from_safetensors, from_torch, weights_sha256
from k3core.errors import RunError
from k3core.model.weights import is_adapter_tensor
from k3core.types import PolicyVersion, Ref


class ServedPolicyError(RunError):
    """The engine does not serve what was published."""


def publish_step(inputs: Inputs, root: str, trained: Ref, parent: PolicyVersion | None) -> Ref:
    """Record with the version as `policy`. A base first and every full_every steps, deltas between; adapters whole.

    The engine then loads the version from the store, and what it holds is compared with the published digest: a sync
    that ships the wrong tensors ends the stage (ServedPolicyError), it does not look like staleness.
    """
    context = Context.open(inputs, root)
    cfg, store = context.cfg, context.store
    record = read_record(store, trained)
    source = record.outputs["weights"]
    weights = from_safetensors(store.get(source), source.uri)
    step = record.step
    tags = {"environment_sha256": build_environment(cfg).sha256, "tokenizer_sha256": inputs.tokenizer.sha256}
    is_adapter = cfg.train.mode == "lora" and step > 0
    if is_adapter:
        adapter = {name: tensor for name, tensor in weights.items() if is_adapter_tensor(name)}
        version, stats = policies.publish_adapter(store, cfg.run, step, adapter, tags)
    else:
        publish = cfg.publish
        version, stats = policies.publish(
            store, cfg.run, step, weights, parent, publish.full_every, publish.zstd_level, tags
        )
    served = context.pool.engine_at(version, context.tokenizer()).served_tensors()
    expected = load_policy(cfg, store, version)
    if weights_sha256(from_torch(served)) != weights_sha256(from_torch(expected)):
        raise ServedPolicyError(f"{version.weights.uri}: the engine serves other weights than step {step}'s")
    metrics = {
        "publish/bytes_payload": float(stats.bytes_payload),
        "publish/bytes_full": float(stats.bytes_full),
        "publish/seconds": context.elapsed(),
    }
    if stats.changed_fraction is not None:
        metrics["publish/changed_fraction"] = stats.changed_fraction
    return context.record("publish", step, {"manifest": version.weights}, metrics, policy=version)


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
