"""Where an adapter's tensors are in a PEFT folder: keys of the file <-> matrices of the model.

A matrix has a path (`layers.0.self_attn.q_proj`); the experts' matrices of a layer share one
(`layers.1.block_sparse_moe.experts.w1`), and their factors are tensors of single experts inside
(`layers.1.block_sparse_moe.experts.0.w1.lora_A`). A file has them in one of three forms:

    ...experts.0.w1.lora_A.weight         [r, in]        one expert; this is what is written
    ...experts.w1.lora_A.weight           [E or 1, r, in]  stacked; 1 where all experts share the factor (SGLang)
    ...experts.base_layer.lora_A.weight   [E r, in]      peft's ParamWrapper around transformers' fused parameters;
    ...experts.lora_A.weight              [E r, in]      lora_B is [out, r E], rank before expert

Where the head is a target, peft adds the base's own: lm_head.base_layer.weight.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from k3core.checkpoint.names import hf_name, internal_name
from k3core.model.config import K3Config
from k3core.model.hf_config import Layout

PREFIX = "base_model.model."
GATE_UP, DOWN = "gate_up_proj", "down_proj"  # transformers' fused parameters: w1 over w3, and w2

REPEATED = ".base_layer.weight"

_KEY = re.compile(r"^(.+)\.(lora_[AB])(?:\.default)?(?:\.weight)?$")
_EXPERT = re.compile(r"^(.+\.experts)\.(0|[1-9]\d*)\.(w[123])$")
_FUSED = re.compile(r"^(.+\.experts)(?:\.base_layer)?$")
_STACKED = re.compile(r"^(.+\.experts)\.(w[123])$")


@dataclass(frozen=True, slots=True)
class Key:
    """path: of a matrix, or `...experts` where fused. factor: lora_A or lora_B. expert: None but for a single one."""

    path: str
    factor: str
    expert: int | None = None
    is_fused: bool = False


def tensor_name(path: str, factor: str, expert: int | None = None) -> str:
    """Internal name of a factor: `layers.1.block_sparse_moe.experts.0.w1.lora_A`."""
    return f"{path if expert is None else expert_path(path, expert)}.{factor}"


def expert_path(path: str, expert: int) -> str:
    experts, _, matrix = path.rpartition(".")
    return f"{experts}.{expert}.{matrix}"


def matrix_path(name: str) -> str:
    """Path of the matrix that a factor, or a weight without its suffix, belongs to."""
    stem = re.sub(r"\.lora_[AB]$", "", name)
    match = _EXPERT.match(stem)
    return f"{match[1]}.{match[3]}" if match else stem


def parse_key(key: str, cfg: K3Config) -> Key | None:
    """None for what is no factor. The path of a factor that is not of this model equals no matrix's."""
    match = _KEY.match(key.removeprefix(PREFIX))
    if match is None:
        return None
    module = match[1].replace(".self_attn.forget_gate.", ".self_attn.")
    if module.startswith("model.language_model."):
        module = "language_model.model." + module.removeprefix("model.language_model.")
    path = internal_name(f"{module}.weight", cfg).removesuffix(".weight")
    expert, fused = _EXPERT.match(path), _FUSED.match(path)
    if expert:
        return Key(f"{expert[1]}.{expert[3]}", match[2], int(expert[2]))
    if fused:
        # base_layer stays in the path: a folder may have both of a layer's wrappers.
        return Key(path, match[2], is_fused=True)
    return Key(path, match[2])


def repeated_weight(key: str, cfg: K3Config) -> str | None:
    """Internal name of the base's weight that a file repeats under this key."""
    if not key.endswith(REPEATED):
        return None
    return internal_name(key.removeprefix(PREFIX).removesuffix(REPEATED) + ".weight", cfg)


def is_expert_matrix(path: str) -> bool:
    return _STACKED.match(path) is not None


def written_key(name: str, layout: Layout) -> str:
    """Of the factor with this internal name."""
    module, factor = name.rsplit(".", 1)
    path = hf_name(f"{module}.weight", layout).removesuffix(".weight")
    return f"{PREFIX}{path}.{factor}.weight"


def module_paths(path: str, cfg: K3Config, expert: int = 0) -> list[str]:
    """Every path under which adapter_config.json may mean the matrix, the checkpoint's own first; of an experts'
    matrix, that of one expert."""
    if path == "lm_head":
        return ["lm_head", "language_model.lm_head"]
    prefixes = ["language_model.model.", "model.language_model."] if cfg.family == "kimi_k3" else []
    module = expert_path(path, expert) if is_expert_matrix(path) else path
    return [prefix + spelling for prefix in [*prefixes, "model."] for spelling in spellings(module)]


def spellings(path: str) -> list[str]:
    """The path, or the end of one, with transformers' module names beside the checkpoint's."""
    other = path.replace("block_sparse_moe", "mlp")
    other = re.sub(r"\bself_attn\.(f_[ab]_proj)$", r"self_attn.forget_gate.\1", other)
    return list(dict.fromkeys([path, other]))


def path_pattern(end: str) -> str:
    """A regular expression for the modules that an end of a path names, in every spelling."""
    pattern = re.escape(end).replace("block_sparse_moe", "(?:block_sparse_moe|mlp)")
    pattern = re.sub(r"\bself_attn\\\.(f_[ab]_proj)$", r"self_attn(?:\\.forget_gate)?\\.\1", pattern)
    return re.sub(r"\bexperts\\\.(w[123])$", r"experts\\.\\d+\\.\1", pattern)


def parameter_path(experts: str, parameter: str) -> str:
    """Of transformers' fused parameter, GATE_UP or DOWN, where the experts of the layer are at `experts`."""
    return f"model.{experts.replace('block_sparse_moe', 'mlp')}.{parameter}"
