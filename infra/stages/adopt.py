"""Adopt: a version of another run becomes the first version of this one, so that this run can go on from it."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from infra import policies
from infra.stages.context import Context, Inputs
from infra.store import Store
from infra.version_chain import as_version, chain_of, policy_key
from k3core.checkpoint.chain import Manifest
from k3core.checkpoint.tensors import to_safetensors
from k3core.types import PolicyVersion, Ref


def adopt_policy(inputs: Inputs, root: str, version: PolicyVersion) -> Ref:
    """Record, under the name of a publication, with the adopted version as `policy`.

    A version that is stored whole is adopted by reference, without a copy; one that is a delta becomes a base.
    An adapter stands on its run's step 0, so that is adopted too.
    """
    context = Context.open(inputs, root)
    if version.kind == "adapter":
        base = policies.read_version(context.store, version.run, 0)
        if base is None:
            raise ValueError(f"{version.weights.uri}: an adapter, but step 0 of run {version.run!r} is not published")
        _adopt(context, base)
    return _adopt(context, version)


def _adopt(context: Context, version: PolicyVersion) -> Ref:
    store, run = context.store, context.cfg.run
    manifest = _whole(store, version, run)
    adopted = as_version(manifest, store.commit(policy_key(run, version.step, "manifest.json"), manifest.to_json()))
    policies.load(store, adopted)  # reads back as what it says
    name = f"{version.run}@{version.step}"
    return context.record(
        "adopt",
        version.step,
        {"manifest": adopted.weights},
        {},
        policy=adopted,
        name="publish",
        inputs={"policy": version.weights},
        provenance={"adopted": name},
    )


def _whole(store: Store, version: PolicyVersion, run: str) -> Manifest:
    chain = chain_of(store, version)
    newest = chain[-1]
    payload = newest.payload
    if len(chain) > 1:
        data = to_safetensors(policies.load(store, version))
        name = f"payload-{hashlib.sha256(data).hexdigest()[:16]}.safetensors"
        payload = store.put(policy_key(run, version.step, name), data)
    return replace(
        newest,
        run=run,
        kind="adapter" if newest.kind == "adapter" else "base",
        parent=None,
        payload=payload,
        entries=(),
        tags={"adopted": f"{version.run}@{version.step}", "adopted_manifest_sha256": version.weights.sha256},
    )
