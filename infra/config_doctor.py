"""Whether this machine can run this config."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from infra.config import RunConfig
from infra.doctor import Finding, check_root, size
from infra.init_checkpoint import absence, folder_of
from infra.parts import build_environment, build_tokenizer, chat_settings
from infra.policies import read_version
from infra.store import Store, StoreUnavailable
from k3core.chat import chat_format
from k3core.checkpoint.adapter import model_matrices
from k3core.checkpoint.hf import open_checkpoint
from k3core.errors import IntegrityError, RunError
from k3core.model.config import K3Config
from k3core.model.lora import LoraConfig, require_matrices
from k3core.model.model import K3Model
from k3core.model.sizes import stored_bytes

TRAINING_BYTES = 16  # float32 weight, gradient and AdamW's two moments


def diagnose_config(cfg: RunConfig) -> list[Finding]:
    """A required finding that is not ok means: do not start."""
    model = _model(cfg)
    bases = 1 + (cfg.steps // cfg.publish.full_every if cfg.train.mode == "full" else 0)
    return [
        model,
        *_checkpoint(cfg),
        *_adapter(cfg),
        *_environment(cfg),
        *check_root(cfg.root, bases * weight_bytes(cfg.model) if model.ok else 0),
    ]


def num_parameters(model: K3Config) -> int:
    """Exact, from shapes alone: nothing is allocated. Packed experts count by their values."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in K3Model(replace(model, expert_quantization=None)).parameters())


def weight_bytes(model: K3Config) -> int:
    """Of a version: everything in float32, but for packed experts."""
    return sum(stored_bytes(model, torch.float32).values())


def memory_bytes() -> int:
    """Of this machine, or of its GPUs together where those have more."""
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpus = [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]
    return max(host, sum(gpus))


def _model(cfg: RunConfig) -> Finding:
    parameters = num_parameters(cfg.model)
    needed = parameters * TRAINING_BYTES
    if cfg.train.lora is not None:
        needed = weight_bytes(cfg.model) + _adapter_parameters(cfg.model, cfg.train.lora) * TRAINING_BYTES
    have = memory_bytes()
    packed = "" if cfg.model.expert_quantization is None else ", experts packed"
    detail = f"{parameters:,} parameters{packed}, {size(needed)} to train of {size(have)} memory"
    remedy = "this run needs GPUs with that much memory; `tiny` runs anywhere" if needed > have else ""
    return Finding("model", needed <= have, True, detail, remedy)


def _adapter_parameters(model: K3Config, lora: LoraConfig) -> int:
    count = 0
    for path, (*experts, out_features, in_features) in model_matrices(model).items():
        if lora.is_target(path):
            rank, _ = lora.rank_alpha(path)
            count += rank * (out_features + in_features) * (experts[0] if experts else 1)
    return count


def _checkpoint(cfg: RunConfig) -> Iterator[Finding]:
    """One finding for each fault of the folder; a run that has read its checkpoint needs none any more."""
    init = cfg.warm_start.init
    if init is None:
        return
    missing = absence(init)
    if missing is not None and _has_begun(cfg):
        yield Finding("checkpoint", True, True, f"{init}: gone; run {cfg.run} has read it")
        return
    if missing is not None:
        yield Finding("checkpoint", False, True, missing.detail, missing.remedy)
        return
    try:
        checkpoint = open_checkpoint(folder_of(init))
    except (ValueError, IntegrityError) as error:
        lines = [line.strip() for line in str(error).splitlines()]
        heading = f"{lines.pop(0).rpartition(': ')[0]}: " if len(lines) > 1 and lines[0].endswith("fault(s)") else ""
        for line in lines:
            yield Finding("checkpoint", False, True, f"{heading}{line}", "fetch it again, or name another checkpoint")
        return
    packed = "" if checkpoint.cfg.expert_quantization is None else ", experts packed"
    amount = f"{len(checkpoint.tensors):,} tensors, {len(checkpoint.headers)} files, {size(checkpoint.total_bytes)}"
    yield Finding("checkpoint", True, True, f"{init}: {checkpoint.cfg.family}, {amount}{packed}")
    try:
        tokenizer = build_tokenizer(cfg)
        chat_format(tokenizer)
    except ValueError as error:
        yield Finding("tokenizer", False, True, str(error), "put the checkpoint's own tokenizer files into its folder")
        return
    yield Finding("tokenizer", True, True, f"{tokenizer.vocab_size:,} tokens, from {init}")
    try:
        chat_settings(cfg, build_environment(cfg), tokenizer)
    except ValueError as error:
        detail, _, remedy = str(error).rpartition("; ")
        yield Finding("chat", False, True, detail, remedy)


def _has_begun(cfg: RunConfig) -> bool:
    try:
        return read_version(Store(cfg.root), cfg.run, 0) is not None
    except (StoreUnavailable, RunError):  # a finding of its own
        return False


def _adapter(cfg: RunConfig) -> Iterator[Finding]:
    """Whether every target of mode "lora" names a matrix of this model."""
    if cfg.train.lora is None:
        return
    try:
        require_matrices(cfg.train.lora, model_matrices(cfg.model), "train.lora_targets")
    except ValueError as error:
        yield Finding("adapter", False, True, str(error), "name those of this model")


def _environment(cfg: RunConfig) -> Iterator[Finding]:
    if cfg.environment.path is not None:
        ok = Path(cfg.environment.path).is_dir()
        detail = f"{cfg.environment.name} at {cfg.environment.path}"
        yield Finding("environment", ok, True, detail, "" if ok else "no such folder: correct environment.path")
