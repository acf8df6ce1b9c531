"""A LoraConfig as the fields of adapter_config.json, and back."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from k3core.checkpoint.adapter_keys import (
    DOWN,
    GATE_UP,
    expert_path,
    is_expert_matrix,
    module_paths,
    parameter_path,
    path_pattern,
    spellings,
)
from k3core.checkpoint.peft_config import ALL_LINEAR, PeftConfig
from k3core.model.config import K3Config
from k3core.model.lora import LoraConfig, LoraOverride, names_path

Shape = tuple[int, ...]
RankAlpha = tuple[int, float]


def to_peft(cfg: K3Config, lora: LoraConfig, matrices: Mapping[str, Shape], base_model: str) -> PeftConfig:
    """matrices: shapes by path (`lora_matrices`). The same fields for every LoraConfig that means the same."""
    values = {path: lora.rank_alpha(path) for path in matrices if lora.is_target(path)}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for end, rank, alpha in _overrides(values, (lora.rank, lora.alpha)):
        if rank != lora.rank:
            ranks[path_pattern(end)] = rank
        if alpha != lora.alpha:
            alphas[path_pattern(end)] = alpha
    config = PeftConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=_target_modules(values, matrices),
        rank_pattern=ranks,
        alpha_pattern=alphas,
        base_model=base_model,
    )
    return _with_parameters(config, values, matrices) if cfg.family == "kimi_linear" else config


def lora_of(values: Mapping[str, RankAlpha], matrices: Mapping[str, Shape], default: RankAlpha) -> LoraConfig:
    """What gives each path of `values` its rank and alpha, in the shortest form."""
    overrides = tuple(LoraOverride(end, rank, alpha) for end, rank, alpha in _overrides(values, default))
    return LoraConfig(*default, shortest_ends(values, matrices), overrides)


def uncrossed_experts(cfg: K3Config, lora: LoraConfig, matrices: Mapping[str, Shape]) -> list[str]:
    """Targeted experts' matrices that peft would leave out, without a word, over transformers' Kimi-Linear.

    Its two fused parameters take w2 alone, or all three when w1 and w3 are scaled alike.
    """
    targeted = {path: lora.rank_alpha(path) for path in matrices if is_expert_matrix(path) and lora.is_target(path)}
    crossing = set(_crossing(targeted))
    return [path for path in targeted if cfg.family == "kimi_linear" and path.rpartition(".")[0] not in crossing]


def covered(config: PeftConfig, cfg: K3Config, matrices: Iterable[str]) -> tuple[set[str], set[str]]:
    """Paths of the matrices that an adapter must hold factors for, and of those that it may."""
    must, may = set(), set()
    for path in matrices:
        if _covers(config, cfg, path):
            must.add(path)
        elif config.target_modules == ALL_LINEAR and (is_expert_matrix(path) or path == "lm_head"):
            # peft leaves the head out, and finds experts only where they are modules.
            may.add(path)
    return must, must | may


def _covers(config: PeftConfig, cfg: K3Config, path: str) -> bool:
    if is_expert_matrix(path):
        experts, _, matrix = path.rpartition(".")
        if config.covers_parameter(parameter_path(experts, DOWN if matrix == "w2" else GATE_UP)):
            return True
        # One expert named is all of them: a file without the others is then found to be incomplete.
        targets = config.target_modules if isinstance(config.target_modules, str) else "".join(config.target_modules)
        numbers = range(cfg.num_experts if "experts" in targets else 1)
        return any(config.covers(p) for e in numbers for p in module_paths(path, cfg, e))
    if config.target_modules == ALL_LINEAR:
        return path != "lm_head" and not any(config.excludes(p) for p in module_paths(path, cfg))
    return any(config.covers(p) for p in module_paths(path, cfg))


def module_rank_alpha(config: PeftConfig, cfg: K3Config, path: str) -> RankAlpha:
    """Of a matrix whose factors are single tensors."""
    found = (config.rank_alpha(p) for p in module_paths(path, cfg))
    return next((value for value in found if value != config.default), config.default)


def _overrides(values: Mapping[str, RankAlpha], default: RankAlpha) -> list[tuple[str, int, float]]:
    """(end of a path, rank, alpha) for the targets whose rank or alpha is not the default; none names a target of
    another."""
    groups = _by_value({path: value for path, value in values.items() if value != default})
    return sorted((end, *value) for value, paths in groups.items() for end in shortest_ends(paths, values))


def _target_modules(values: Mapping[str, RankAlpha], matrices: Mapping[str, Shape]) -> tuple[str, ...]:
    names: list[str] = []
    for end in shortest_ends(values, matrices):
        if is_expert_matrix(f".{end}"):  # of some layers: between its last components is the expert's number
            (path,) = (path for path in values if names_path(end, path))
            names += [name for e in range(matrices[path][0]) for name in spellings(expert_path(end, e))]
        else:
            names += spellings(end)
    return tuple(dict.fromkeys(names))


def _with_parameters(config: PeftConfig, values: Mapping[str, RankAlpha], matrices: Mapping[str, Shape]) -> PeftConfig:
    """With target_parameters, by which peft finds the experts in transformers' Kimi-Linear. There w1 over w3 is one
    parameter, and peft joins their factors block by block to one branch of their ranks' sum."""
    gate_up: dict[str, RankAlpha] = {}
    down: dict[str, RankAlpha] = {}
    for experts in _crossing(values):
        down[parameter_path(experts, DOWN)] = values[f"{experts}.w2"]
        if f"{experts}.w1" in values:
            (r1, alpha1), (r3, alpha3) = values[f"{experts}.w1"], values[f"{experts}.w3"]
            gate_up[parameter_path(experts, GATE_UP)] = (r1 + r3, alpha1 + alpha3)
    layers = dict.fromkeys(path.rpartition(".")[0] for path in matrices if is_expert_matrix(path))
    parameters: list[str] = []
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for name, wanted in ((GATE_UP, gate_up), (DOWN, down)):
        every = [parameter_path(experts, name) for experts in layers]
        parameters += [_at_least(end, f"mlp.experts.{name}") for end in shortest_ends(wanted, every)]
        if all(config.rank_alpha(path) == value for path, value in wanted.items()):
            continue
        for (rank, alpha), paths in _by_value(wanted).items():
            for end in shortest_ends(paths, wanted):
                pattern = re.escape(_at_least(end, f"experts.{name}"))
                ranks[pattern], alphas[pattern] = rank, alpha
    return PeftConfig(
        r=config.r,
        lora_alpha=config.lora_alpha,
        target_modules=config.target_modules,
        target_parameters=tuple(parameters),
        # First, since peft takes the first pattern that matches, and a module's down_proj would match too.
        rank_pattern={**ranks, **config.rank_pattern},
        alpha_pattern={**alphas, **config.alpha_pattern},
        base_model=config.base_model,
    )


def _crossing(values: Mapping[str, RankAlpha]) -> list[str]:
    """Paths of the layers' experts whose targets two fused parameters can take."""
    found = []
    for experts in dict.fromkeys(path.rpartition(".")[0] for path in values if is_expert_matrix(path)):
        w1, w2, w3 = (values.get(f"{experts}.{matrix}") for matrix in ("w1", "w2", "w3"))
        is_alike = w1 is not None and w3 is not None and w1[1] * w3[0] == w3[1] * w1[0]
        if w2 is not None and (is_alike or (w1 is None and w3 is None)):
            found.append(experts)
    return found


def _at_least(end: str, shortest: str) -> str:
    return end if names_path(shortest, end) else shortest


def shortest_ends(selected: Iterable[str], paths: Iterable[str]) -> tuple[str, ...]:
    """Ends of paths that name the selected ones of `paths` and no other, each as short as it can be; sorted."""
    wanted, known = set(selected), list(paths)
    ends: list[str] = []
    for path in known:
        if path not in wanted or any(names_path(end, path) for end in ends):
            continue
        parts = path.split(".")
        candidates = (".".join(parts[-n:]) for n in range(1, len(parts) + 1) if not parts[-n].isdigit())
        ends.append(next(end for end in candidates if all(p in wanted for p in known if names_path(end, p))))
    return tuple(sorted(ends))


def _by_value(values: Mapping[str, RankAlpha]) -> dict[RankAlpha, list[str]]:
    groups: dict[RankAlpha, list[str]] = {}
    for path, value in values.items():
        groups.setdefault(value, []).append(path)
    return groups
