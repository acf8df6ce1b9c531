"""adapter_config.json as peft 0.21 writes it: which modules an adapter covers, and how each branch is scaled."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CONFIG_FILE = "adapter_config.json"
ALL_LINEAR = "all-linear"

# What these ask for is not W + scale B A over the base's own weights. A value that is empty or false asks for nothing.
_REFUSED = {
    "use_dora": "DoRA normalises the merged weight",
    "use_qalora": "QALoRA pools the inputs",
    "use_bdlora": "BD-LoRA's factors are block diagonal",
    "arrow_config": "Arrow routes between adapters",
    "kasa_config": "KaSA changes the base's weights",
    "monteclora_config": "MonteCLoRA samples around the factors",
    "alora_invocation_tokens": "aLoRA begins in the middle of a sequence",
    "lora_bias": "no linear of this model has a bias",
    "modules_to_save": "whole modules beside the factors are weights, not an adapter; merge them where they were trained",
    "trainable_token_indices": "embeddings beside the factors are weights, not an adapter; merge them where they were trained",
    "layer_replication": "it repeats layers of the base",
    "fan_in_fan_out": "this model's weights are [out, in]",
}
_BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Of training, of other software, or of no effect on what the adapter computes.
_IGNORED = (
    *(
        "auto_mapping",
        "base_model_name_or_path",
        "inference_mode",
        "peft_type",
        "peft_version",
        "revision",
        "task_type",
    ),
    *("corda_config", "ensure_weight_tying", "eva_config", "init_lora_weights", "loftq_config", "lora_dropout"),
    *("lora_ga_config", "megatron_config", "megatron_core", "qalora_group_size", "runtime_config", "velora_config"),
)
_READ = (
    *("r", "lora_alpha", "use_rslora", "bias", "rank_pattern", "alpha_pattern"),
    *("target_modules", "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern"),
)


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The fields that decide what an adapter computes, with peft's meaning.

    target_modules are names or ends of module paths, or one regular expression for whole paths, or "all-linear".
    target_parameters are ends of parameter paths (transformers keeps a layer's experts in two 3-D parameters).
    """

    r: int
    lora_alpha: float
    target_modules: tuple[str, ...] | str = ()
    target_parameters: tuple[str, ...] = ()
    exclude_modules: tuple[str, ...] | str = ()
    layers_to_transform: tuple[int, ...] | None = None
    layers_pattern: tuple[str, ...] = ()
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    use_rslora: bool = False
    base_model: str = ""

    def covers(self, path: str) -> bool:
        """Whether the module at `path` is a target; "all-linear" is for the caller to resolve."""
        if self.excludes(path) or not _matches(self.target_modules, path):
            return False
        if isinstance(self.target_modules, str) or self.layers_to_transform is None:
            return True
        layer = self._layer(path)
        return layer is not None and layer in self.layers_to_transform

    def excludes(self, path: str) -> bool:
        return bool(self.exclude_modules) and _matches(self.exclude_modules, path)

    def covers_parameter(self, path: str) -> bool:
        return _matches(self.target_parameters, path)

    def rank_alpha(self, path: str) -> tuple[int, float]:
        """Of the module or parameter at `path`. Its branch is scaled by alpha / rank, also where use_rslora is set."""
        return self._scaled(
            _of_pattern(self.rank_pattern, path, self.r), _of_pattern(self.alpha_pattern, path, self.lora_alpha)
        )

    @property
    def default(self) -> tuple[int, float]:
        """`rank_alpha` where no pattern matches."""
        return self._scaled(self.r, self.lora_alpha)

    def _scaled(self, rank: int, alpha: float) -> tuple[int, float]:
        return rank, alpha * math.sqrt(rank) if self.use_rslora else alpha

    def _layer(self, path: str) -> int | None:
        # The first number of the path is the layer; a later one is an expert.
        for prefix in [rf"(?:^|.*?\.){pattern}" for pattern in self.layers_pattern] or [r".*?\.[^.]*"]:
            match = re.match(rf"{prefix}\.(\d+)\.", path)
            if match:
                return int(match[1])
        return None


def _matches(targets: tuple[str, ...] | str, path: str) -> bool:
    if isinstance(targets, str):
        return re.fullmatch(targets, path) is not None
    return path in targets or any(path.endswith(f".{target}") for target in targets)


def _of_pattern(pattern: Mapping[str, Any], path: str, default: Any) -> Any:
    for key, value in pattern.items():
        if re.match(rf"(.*\.)?({key})$", path):
            return value
    return default


def read_peft_config(path: Path) -> PeftConfig:
    """Raises ValueError with one line for every field that is wrong or asks for what cannot be honoured."""
    try:
        document = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}; an adapter folder has this file") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected a JSON object: {error}") from error
    if not isinstance(document, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(document).__name__}")
    problems = _refused(document) + _malformed(document)
    if problems:
        raise ValueError("\n".join(f"{path}: {problem}" for problem in problems))
    layers = document.get("layers_to_transform")
    return PeftConfig(
        r=document["r"],
        lora_alpha=document["lora_alpha"],
        target_modules=_names(document.get("target_modules")),
        target_parameters=tuple(document.get("target_parameters") or ()),
        exclude_modules=_names(document.get("exclude_modules")),
        # peft reads an empty list as no restriction.
        layers_to_transform=(layers,) if isinstance(layers, int) else tuple(layers) if layers else None,
        layers_pattern=_as_tuple(document.get("layers_pattern")),
        rank_pattern=document.get("rank_pattern") or {},
        alpha_pattern=document.get("alpha_pattern") or {},
        use_rslora=bool(document.get("use_rslora")),
        base_model=document.get("base_model_name_or_path") or "",
    )


def _names(value: Any) -> tuple[str, ...] | str:
    return value if isinstance(value, str) else tuple(value or ())


def _as_tuple(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) and value else tuple(value or ())


def _refused(document: Mapping[str, Any]) -> list[str]:
    problems = []
    kind = document.get("peft_type")
    if kind != "LORA":
        problems.append(f"peft_type {kind!r}: only LORA adapters are read")
    problems += [f"{key} {document[key]!r}: {why}" for key, why in _REFUSED.items() if document.get(key)]
    bias = document.get("bias", "none")
    if bias != "none":
        problems.append(f"bias {bias!r}: no linear of this model has a bias; train with bias none")
    init = document.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower().startswith(_BASE_CHANGING_INITS):
        problems.append(
            f"init_lora_weights {init!r}: the factors stand on changed base weights; save the adapter with peft's "
            "path_initial_model_for_weight_conversion"
        )
    for key in sorted(document.keys() - {*_REFUSED, *_IGNORED, *_READ}):
        if document[key]:
            problems.append(
                f"{key} {document[key]!r} is not known; remove it if the adapter computes the same without it"
            )
    return problems


def _malformed(document: Mapping[str, Any]) -> list[str]:
    problems = []

    def expect(key: str, is_right: bool, what: str) -> None:
        if not is_right:
            problems.append(f"{key}: expected {what}, found {document.get(key)!r}")

    expect("r", _is_rank(document.get("r")), "a rank of at least 1")
    base = document.get("base_model_name_or_path")
    expect("base_model_name_or_path", base is None or isinstance(base, str), "a name")
    expect("lora_alpha", _is_number(document.get("lora_alpha")), "a number")
    targets, parameters = document.get("target_modules"), document.get("target_parameters")
    expect("target_modules", _is_names_or_regex(targets), "a list of names, a regular expression or all-linear")
    expect("target_parameters", parameters is None or _is_names(parameters), "a list of names")
    expect(
        "exclude_modules",
        _is_names_or_regex(document.get("exclude_modules")),
        "a list of names or a regular expression",
    )
    if not targets and not parameters:
        problems.append("target_modules: names no module, and there are no target_parameters")
    layers = document.get("layers_to_transform")
    expect("layers_to_transform", layers is None or _is_layers(layers), "a layer number or a list of them")
    if isinstance(targets, str) and layers is not None:
        problems.append("layers_to_transform: only for a list of target_modules; write the layers into the expression")
    pattern = document.get("layers_pattern")
    expect(
        "layers_pattern", pattern is None or isinstance(pattern, str) or _is_names(pattern), "a name or a list of names"
    )
    for key, is_value in (("rank_pattern", _is_rank), ("alpha_pattern", _is_number)):
        value = document.get(key)
        is_right = value is None or (
            isinstance(value, dict) and all(_is_regex(k) and is_value(v) for k, v in value.items())
        )
        expect(
            key,
            is_right,
            "an object of expressions for module paths and " + ("ranks" if is_value is _is_rank else "numbers"),
        )
    return problems


def _is_rank(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_names_or_regex(value: Any) -> bool:
    return value is None or _is_names(value) or (isinstance(value, str) and _is_regex(value))


def _is_regex(value: str) -> bool:
    try:
        re.compile(value)
    except re.error:
        return False
    return True


def _is_layers(value: Any) -> bool:
    return type(value) is int or (isinstance(value, list) and all(type(layer) is int for layer in value))


def to_document(config: PeftConfig) -> dict[str, Any]:
    """The fields of adapter_config.json for a LoRA without anything else; patterns and parameters only where used."""
    document: dict[str, Any] = {
        "base_model_name_or_path": config.base_model,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": _plain(config.lora_alpha),
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": config.r,
        "target_modules": _listed(config.target_modules),
        "task_type": "CAUSAL_LM",
    }
    if config.rank_pattern:
        document["rank_pattern"] = dict(config.rank_pattern)
    if config.alpha_pattern:
        document["alpha_pattern"] = {key: _plain(alpha) for key, alpha in config.alpha_pattern.items()}
    if config.target_parameters:
        document["target_parameters"] = list(config.target_parameters)
    return document


def _listed(names: Iterable[str] | str) -> list[str] | str:
    return names if isinstance(names, str) else list(names)


def _plain(number: float) -> float:
    """2 rather than 2.0, as people write it."""
    return int(number) if float(number).is_integer() else number
