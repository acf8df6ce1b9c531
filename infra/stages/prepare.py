"""Prepare: pin a run's config, tokenizer and checkpoint, once. Everything later hangs on their digests."""

from __future__ import annotations

import tomllib
from dataclasses import asdict

from infra.config import ConfigError, RunConfig, parse
from infra.init_checkpoint import absence, folder_of
from infra.init_identity import heads_of, to_document
from infra.parts import build_environment, build_tokenizer, chat_settings
from infra.stages.context import Inputs, stage_config
from infra.stages.init import changes_since
from infra.store import Store
from k3core.checkpoint.hf import open_checkpoint
from k3core.sealed import canonical_json
from k3core.types import Ref


def prepare_run(cfg: RunConfig) -> Inputs:
    """Raises ValueError, key by key, when the run was started with a config that gives other weights, and file by file
    when the checkpoint that it started from has changed since."""
    store = Store(cfg.root)
    text = stage_config(cfg)
    inputs = find_inputs(store, cfg.run)
    if inputs is None:
        return _pin(store, cfg, text)
    before = store.get(inputs.config).decode()
    if before != text and not _means(before, text):
        raise ValueError(
            f"run {cfg.run!r} in {cfg.root} was started with {_differences(before, text)};"
            " give the new one a name of its own (run=NAME, or --fresh), or use the old settings"
        )
    if changed := changes_since(store, cfg, inputs):
        raise ValueError(
            "\n".join(changed)
            + f"\nrun {cfg.run!r} in {cfg.root} started from what was there before: put it back, or start from what is"
            " there now under a name of its own (run=NAME, or --fresh)"
        )
    return inputs


def find_inputs(store: Store, run: str) -> Inputs | None:
    """What the run was pinned to; None when it was never started here."""
    pinned = store.read_manifest(_key(run))
    if pinned is None:
        return None
    init = pinned.get("init")
    return Inputs(Ref(**pinned["config"]), Ref(**pinned["tokenizer"]), None if init is None else Ref(**init))


def _pin(store: Store, cfg: RunConfig, text: str) -> Inputs:
    if cfg.warm_start.init is not None and (problem := absence(cfg.warm_start.init)) is not None:
        raise ValueError(str(problem))
    tokenizer = build_tokenizer(cfg)
    chat_settings(cfg, build_environment(cfg), tokenizer)  # refused before anything is stored
    init: Ref | None = None
    if cfg.warm_start.init is not None:
        heads = heads_of(open_checkpoint(folder_of(cfg.warm_start.init)))
        init = store.put(f"{cfg.run}/init.json", canonical_json(to_document(heads)))
    inputs = Inputs(
        store.put(f"{cfg.run}/config.toml", text.encode()),
        store.put(f"{cfg.run}/tokenizer.json", tokenizer.to_bytes()),
        init,
    )
    pinned = {"config": asdict(inputs.config), "tokenizer": asdict(inputs.tokenizer)}
    store.commit(_key(cfg.run), pinned if init is None else {**pinned, "init": asdict(init)})
    return inputs


def _means(before: str, text: str) -> bool:
    """Whether a config that was pinned before some of today's settings existed says the same: they had their defaults."""
    try:
        return stage_config(parse(before, "")) == text
    except ConfigError:
        return False


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
