"""Weights that a server opens: a run's versions, a checkpoint's folder, adapters. Read and checked before any is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from infra import policies
from infra.init_weights import run_tensors
from infra.lineage import newest_step
from infra.pool import load_policy
from infra.serving import read_served
from infra.stages.context import Context
from infra.stages.prepare import find_inputs
from infra.store import Store
from infra.version_chain import policy_key
from k3core.checkpoint.adapter import Adapter, load_adapter, model_matrices, require_adapter
from k3core.checkpoint.adapter_keys import tensor_name
from k3core.checkpoint.hf import open_checkpoint
from k3core.checkpoint.tensors import to_torch
from k3core.model.config import K3Config
from k3core.model.lora import LoraConfig
from k3core.model.precision import stored_dtype
from k3core.tokenizer import Tokenizer
from k3core.types import PolicyVersion

MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the engine was made for. lora: branches that belong to the policy itself, as those of a run in mode lora.

    dtype: of the weights that it computes with; runs keep theirs in fp32.
    """

    cfg: K3Config
    lora: LoraConfig | None = None
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True)
class Policy:
    """Weights ready to be served. base_sha256: their identity without a branch, weights_sha256 with it; None where nobody
    took it."""

    name: str
    step: int
    tensors: Mapping[str, Tensor]
    base_sha256: str | None
    weights_sha256: str | None = None


@dataclass(frozen=True, slots=True)
class Opened:
    """What a server is made of. read: the first weights, which may take minutes. max_length and thinking: as the run
    has them; None and False of a checkpoint."""

    name: str
    model: ServedModel
    tokenizer: Tokenizer
    read: Callable[[], Policy]
    max_length: int | None = None
    thinking: bool = False


def open_run(root: str, run: str, step: int | None) -> Opened:
    """step None: the version that the run serves, or else its newest. Raises ValueError where there is none, and, as
    `read` does, IntegrityError for broken files."""
    context = _context(root, run)
    version = _version(context.store, run, step)
    return Opened(
        f"{run}@{version.step}",
        _model_of(context),
        context.tokenizer(),
        lambda: _read(context, version),
        context.cfg.environment.max_tokens,
        context.cfg.chat.thinking,
    )


def open_folder(folder: Path) -> Opened:
    """A checkpoint with its tokenizer; it is step 0. Raises ValueError with a line for everything that is wrong."""
    checkpoint = open_checkpoint(folder)
    tokenizer = Tokenizer.from_folder(folder)
    if tokenizer.vocab_size > checkpoint.cfg.vocab_size:
        raise ValueError(
            f"{folder}: its tokenizer has {tokenizer.vocab_size} tokens and its config.json vocab_size "
            f"{checkpoint.cfg.vocab_size}: the files do not belong together"
        )

    def read() -> Policy:
        tensors = dict(run_tensors(checkpoint, checkpoint.cfg, {}, lambda _done, _of: None))
        return Policy(folder.name, 0, tensors, None)

    return Opened(folder.name, ServedModel(checkpoint.cfg), tokenizer, read)


def in_type(policy: Policy, dtype: torch.dtype) -> Policy:
    """Rounded to what a model of type dtype stores."""
    stored = {
        name: t.to(stored_dtype(name, dtype)) if t.is_floating_point() else t for name, t in policy.tensors.items()
    }
    return replace(policy, tensors=stored)


def read_policy(place: str, step: int | None, model: ServedModel) -> Policy:
    """place: a run's folder, or a version's manifest or the folder that holds it; a path or a uri.

    Raises ValueError for a version that is not there or is one of another model, IntegrityError for broken bytes.
    """
    root, run, named_step = _split(place)
    if step is not None and named_step is not None and step != named_step:
        raise ValueError(f"step {step}: {place} is step {named_step}; leave one of them out")
    context = _context(root, run)
    if _model_of(context) != replace(model, dtype=torch.float32):
        raise ValueError(f"run {run!r} in {root} is of another model than is served: serve it with a server of its own")
    policy = _read(context, _version(context.store, run, named_step if step is None else step))
    return in_type(policy, model.dtype)


def read_adapter(place: str, cfg: K3Config, base_sha256: str | None) -> Adapter:
    """place: a PEFT folder, or an adapter among a run's versions, as `read_policy` names them.

    base_sha256: of the policy that is served, None where that is not known. Raises ValueError for what is no adapter
    of this model, IntegrityError for broken bytes.
    """
    if not _is_version(place):
        adapter = load_adapter(place, cfg)
        if adapter.repeated:
            first = next(iter(adapter.repeated))
            raise ValueError(f"{place}: it repeats weights of its base, {first} among them: save the adapter alone")
        return adapter
    root, run, step = _split(place)
    context = _context(root, run)
    version, lora = _version(context.store, run, step), context.cfg.train.lora
    if version.kind != "adapter" or lora is None:
        raise ValueError(f"{version.weights.uri}: whole weights, no adapter: load them as a policy")
    stands_on = _base_sha256(context.store, version)
    if None not in (base_sha256, stands_on) and base_sha256 != stands_on:
        raise ValueError(f"{version.weights.uri}: it stands on {run}@0, and the policy that is served is another")
    adapter = Adapter(lora, to_torch(policies.load(context.store, version)), f"{run}@0")
    require_adapter(adapter, model_matrices(cfg))
    return adapter


def _context(root: str, run: str) -> Context:
    inputs = find_inputs(Store(root), run)
    if inputs is None:
        raise ValueError(f"run {run!r} was never started in {root}")
    return Context.open(inputs, root)


def _model_of(context: Context) -> ServedModel:
    return ServedModel(context.cfg.model, context.cfg.train.lora)


def _version(store: Store, run: str, step: int | None) -> PolicyVersion:
    if step is None:
        served = read_served(store, run)
        step = newest_step(store, run) if served is None else served.version.step
    version = None if step is None else policies.read_version(store, run, step)
    if version is None:
        where = store.uri(policy_key(run, step or 0, MANIFEST))
        raise ValueError(f"{where}: run {run!r} has published no version there")
    return version


def _read(context: Context, version: PolicyVersion) -> Policy:
    cfg, lora = context.cfg.model, context.cfg.train.lora
    fresh = {} if lora is None else _adapter_that_changes_nothing(cfg, lora)
    tensors = load_policy(context.store, version, fresh)
    base = _base_sha256(context.store, version)
    return Policy(f"{version.run}@{version.step}", version.step, tensors, base, f"{base} {version.weights_sha256}")


def _base_sha256(store: Store, version: PolicyVersion) -> str | None:
    base = policies.read_version(store, version.run, 0) if version.kind == "adapter" else version
    return None if base is None else base.weights_sha256


def _adapter_that_changes_nothing(cfg: K3Config, lora: LoraConfig) -> dict[str, Tensor]:
    zeros: dict[str, Tensor] = {}
    for path, (*experts, out_features, in_features) in model_matrices(cfg).items():
        if lora.is_target(path):
            rank, _ = lora.rank_alpha(path)
            for expert in range(experts[0]) if experts else (None,):
                zeros[tensor_name(path, "lora_A", expert)] = torch.zeros(rank, in_features)
                zeros[tensor_name(path, "lora_B", expert)] = torch.zeros(out_features, rank)
    return zeros


def _is_version(place: str) -> bool:
    parts = place.rstrip("/").removesuffix(f"/{MANIFEST}").split("/")
    return len(parts) > 2 and parts[-2] == "policies" and parts[-1].isdecimal()


def _split(place: str) -> tuple[str, str, int | None]:
    """root, run and step; the step only of a version's manifest or folder."""
    parts = place.rstrip("/").removesuffix(f"/{MANIFEST}").split("/")
    step = int(parts[-1]) if _is_version(place) else None
    *above, run = parts if step is None else parts[:-2]
    if not run:
        raise ValueError(f"{place}: expected a run's folder, or ROOT/RUN/policies/STEP/{MANIFEST}")
    return "/".join(above) or ("/" if place.startswith("/") else "."), run, step
