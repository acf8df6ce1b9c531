"""Prepare: pin a run's config and tokenizer, once. Everything later hangs on their digests."""

from __future__ import annotations

import tomllib
from dataclasses import asdict

from infra.config import RunConfig
from infra.parts import build_tokenizer
from infra.stages.context import Inputs, stage_config
from infra.store import Store
from k3core.types import Ref


def prepare_run(cfg: RunConfig) -> Inputs:
    """Raises ValueError, key by key, when the run was started with a config that gives other weights."""
    store = Store(cfg.root)
    text = stage_config(cfg)
    inputs = find_inputs(store, cfg.run)
    if inputs is None:
        config = store.put(f"{cfg.run}/config.toml", text.encode())
        tokenizer = store.put(f"{cfg.run}/tokenizer.json", build_tokenizer(cfg).to_bytes())
        store.commit(_key(cfg.run), {"config": asdict(config), "tokenizer": asdict(tokenizer)})
        return Inputs(config, tokenizer)
    before = store.get(inputs.config).decode()
    if before != text:
        raise ValueError(
            f"run {cfg.run!r} in {cfg.root} was started with {_differences(before, text)};"
            " give the new one a name of its own (run=NAME, or --fresh), or use the old settings"
        )
    return inputs


def find_inputs(store: Store, run: str) -> Inputs | None:
    """What the run was pinned to; None when it was never started here."""
    pinned = store.read_manifest(_key(run))
    return None if pinned is None else Inputs(Ref(**pinned["config"]), Ref(**pinned["tokenizer"]))


def _key(run: str) -> str:
    return f"{run}/run.json"


def _differences(before: str, after: str) -> str:
    old, new = _flat(tomllib.loads(before)), _flat(tomllib.loads(after))
    changed = [
        f"{key} = {old.get(key)} (now {new.get(key)})" for key in sorted({*old, *new}) if old.get(key) != new.get(key)
    ]
    return ", ".join(changed)


def _flat(tree: dict[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
