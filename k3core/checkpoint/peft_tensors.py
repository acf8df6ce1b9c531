"""The tensors of adapter_model.safetensors as factors of single matrices and experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from k3core.checkpoint.adapter_keys import (
    DOWN,
    GATE_UP,
    Key,
    is_expert_matrix,
    parameter_path,
    parse_key,
    repeated_weight,
    tensor_name,
)
from k3core.checkpoint.peft_config import PeftConfig
from k3core.checkpoint.peft_targets import RankAlpha, Shape, module_rank_alpha
from k3core.model.config import K3Config


@dataclass(frozen=True, slots=True)
class Factors:
    """tensors and keys (of the file) by internal name, rank_alpha by path for every matrix of the model; present:
    paths that any tensor is for; repeated: weights of the base by internal name. Views of the file's tensors: a factor
    that experts share is the same memory."""

    tensors: dict[str, Tensor]
    keys: dict[str, str]
    rank_alpha: dict[str, RankAlpha]
    present: set[str]
    repeated: dict[str, Tensor]
    problems: list[str]


def factors_of(file: Mapping[str, Tensor], config: PeftConfig, cfg: K3Config, matrices: Mapping[str, Shape]) -> Factors:
    """matrices: shapes by path. Whether all are there, and in their shapes, is not looked at here."""
    found = Factors({}, {}, {path: module_rank_alpha(config, cfg, path) for path in matrices}, set(), {}, [])
    fused: dict[str, dict[str, str]] = {}
    for key in sorted(file):
        parsed, repeated = parse_key(key, cfg), repeated_weight(key, cfg)
        if repeated == "lm_head.weight" and tuple(file[key].shape) == matrices["lm_head"]:
            found.repeated[repeated] = file[key]
        elif parsed is None:
            found.problems.append(f"unexpected: {key}{_hint(key)}")
        elif parsed.is_fused:
            pair = fused.setdefault(parsed.path, {})
            if parsed.factor in pair:
                found.problems.append(f"there twice: {pair[parsed.factor]} and {key}")
            pair[parsed.factor] = key
        else:
            for name, tensor in _single(parsed, file[key], cfg.num_experts):
                _add(found, parsed.path, name, key, tensor)
    for path, pair in fused.items():
        _split(found, path, pair, file, config, matrices)
    return found


def _single(key: Key, tensor: Tensor, num_experts: int) -> Iterator[tuple[str, Tensor]]:
    if key.expert is not None or not is_expert_matrix(key.path) or tensor.ndim != 3:
        yield tensor_name(key.path, key.factor, key.expert), tensor
        return
    is_shared = len(tensor) == 1
    for expert in range(num_experts if is_shared else len(tensor)):
        yield tensor_name(key.path, key.factor, expert), tensor[0 if is_shared else expert]


def _add(found: Factors, path: str, name: str, key: str, tensor: Tensor) -> None:
    if name in found.tensors:
        found.problems.append(f"there twice: {found.keys[name]} and {key}")
    found.tensors[name], found.keys[name] = tensor, key
    found.present.add(path)


def _split(
    found: Factors,
    path: str,
    pair: Mapping[str, str],
    file: Mapping[str, Tensor],
    config: PeftConfig,
    matrices: Mapping[str, Shape],
) -> None:
    """A ParamWrapper's pair into those of its matrices, per expert. Which parameter it is for shows in its shapes: the
    names only say in which order peft wrapped them."""
    experts = path.removesuffix(".base_layer")
    if f"{experts}.w1" not in matrices:
        found.problems.extend(f"unexpected: {key}" for key in pair.values())
        return
    if len(pair) != 2:
        ((factor, key),) = pair.items()
        other = {"lora_A": "lora_B", "lora_B": "lora_A"}[factor]
        found.problems.append(f"missing: {key.replace(factor, other)}")
        return
    A, B = file[pair["lora_A"]], file[pair["lora_B"]]
    E, F, R = matrices[f"{experts}.w1"]
    rows = {
        (R, 2 * F): (GATE_UP, (("w1", slice(0, F)), ("w3", slice(F, None)))),
        (F, R): (DOWN, (("w2", slice(None)),)),
    }
    is_pair = A.ndim == B.ndim == 2 and A.shape[0] == B.shape[1] >= E and A.shape[0] % E == 0
    if not is_pair or (A.shape[1], B.shape[0]) not in rows:
        found.problems.append(
            f"{pair['lora_A']} {list(A.shape)} and lora_B {list(B.shape)}: fit neither {GATE_UP} "
            f"([r x {E}, {R}] and [{2 * F}, r x {E}]) nor {DOWN} ([r x {E}, {F}] and [{R}, r x {E}])"
        )
        return
    parameter, parts = rows[A.shape[1], B.shape[0]]
    A_ErI, B_OrE = A.reshape(E, -1, A.shape[1]), B.reshape(B.shape[0], -1, E)
    for matrix, span in parts:
        matrix_path = f"{experts}.{matrix}"
        found.rank_alpha[matrix_path] = config.rank_alpha(parameter_path(experts, parameter))
        for expert in range(E):
            _add(found, matrix_path, tensor_name(matrix_path, "lora_A", expert), pair["lora_A"], A_ErI[expert])
            _add(found, matrix_path, tensor_name(matrix_path, "lora_B", expert), pair["lora_B"], B_OrE[span, :, expert])


def _hint(key: str) -> str:
    if "lora_magnitude_vector" in key:
        return " (DoRA)"
    if "lora_embedding" in key:
        return " (embed_tokens cannot be a target: LoRA adapts products, the embedding is a look-up)"
    return ""
