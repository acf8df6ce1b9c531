"""LoRA adapters as PEFT folders: adapter_config.json and adapter_model.safetensors, in and out."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from k3core.checkpoint.adapter_keys import tensor_name, written_key
from k3core.checkpoint.names import collapse
from k3core.checkpoint.new_folder import new_folder, sync
from k3core.checkpoint.peft_config import CONFIG_FILE, read_peft_config, to_document
from k3core.checkpoint.peft_targets import covered, lora_of, to_peft
from k3core.checkpoint.peft_tensors import factors_of
from k3core.checkpoint.safetensors_io import encode_header, first_non_finite, read_header, write_bytes
from k3core.errors import IntegrityError
from k3core.model.config import K3Config
from k3core.model.hf_config import Layout
from k3core.model.lora import LoraConfig, attach_lora, lora_matrices, require_matrices
from k3core.model.model import K3Model
from k3core.model.weights import is_adapter_tensor, named_tensors

WEIGHTS_FILE, PICKLE_FILE = "adapter_model.safetensors", "adapter_model.bin"
WORDS = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Adapter:
    """tensors by internal name, as in a policy's versions: `layers.0.self_attn.q_proj.lora_A` [r, in] and lora_B
    [out, r], the experts' one by one (`layers.1.block_sparse_moe.experts.0.w1.lora_A`). base_model names the weights
    that it stands on, and may be empty. repeated: weights of the base that its file holds beside the factors, which
    must be those of the model that it is used with.
    """

    lora: LoraConfig
    tensors: Mapping[str, Tensor]
    base_model: str = ""
    repeated: Mapping[str, Tensor] = field(default_factory=dict)


def adapter_of(model: K3Model, lora: LoraConfig, base_model: str = "") -> Adapter:
    """The factors attached to a model, not copied; `lora` is what they were attached with. Raises ValueError when it
    is not."""
    tensors = {name: t.detach() for name, t in named_tensors(model).items() if is_adapter_tensor(name)}
    adapter = Adapter(lora, tensors, base_model)
    require_adapter(adapter, lora_matrices(model))
    return adapter


def attach_adapter(model: K3Model, adapter: Adapter) -> None:
    """Give a model without LoRA the adapter's branches, to be served or trained on; all else is frozen.

    Factors are held in at least fp32. Raises ValueError listing every factor that is missing, unexpected or misshapen
    before anything is attached, and for an adapter of another base where that shows.
    """
    if any(name.endswith(("lora_A", "lora_B")) for name, _ in model.named_parameters()):
        raise ValueError("the model has an adapter already: merge it or detach_lora first")
    require_adapter(adapter, lora_matrices(model))
    for name in adapter.repeated:
        require_same_base(adapter, name, named_tensors(model)[name])
    attach_lora(model, adapter.lora, torch.Generator())
    own = named_tensors(model)
    with torch.no_grad():
        for name, tensor in adapter.tensors.items():
            own[name].copy_(tensor)


def require_adapter(adapter: Adapter, matrices: Mapping[str, Shape]) -> None:
    """Raises ValueError listing every factor that is missing, unexpected or misshapen for the matrices of a model."""
    require_matrices(adapter.lora, matrices, "the adapter's targets")
    ranks = {path: adapter.lora.rank_alpha(path)[0] for path in matrices if adapter.lora.is_target(path)}
    problems = _misfits(adapter.tensors, ranks, matrices, lambda name: name)
    if not ranks:
        problems.insert(0, "it has no targets")
    if problems:
        raise ValueError("the adapter does not fit the model: " + "; ".join(problems))


def require_same_base(adapter: Adapter, name: str, weight: Tensor) -> None:
    """Raises ValueError where the adapter's file repeats another weight than the base's, up to rounding to the narrower
    type."""
    theirs = adapter.repeated.get(name)
    if theirs is None:
        return
    narrow = min(theirs.dtype, weight.dtype, key=lambda dtype: dtype.itemsize)
    if not torch.equal(theirs.to(weight.device, narrow), weight.to(narrow)):
        raise ValueError(f"{name}: the adapter's file repeats another base's; it was trained on {adapter.base_model!r}")


def _misfits(
    tensors: Mapping[str, Tensor], ranks: Mapping[str, int], matrices: Mapping[str, Shape], said: Callable[[str], str]
) -> list[str]:
    """said: an internal name as the reader of the message knows it."""
    expected = dict(_factor_shapes(ranks, matrices))
    problems = [f"missing: {name}" for name in collapse(said(name) for name in expected if name not in tensors)]
    problems += [f"unexpected: {name}" for name in collapse(said(name) for name in tensors if name not in expected)]
    lines = []
    for name, shape in expected.items():
        tensor = tensors.get(name)
        if tensor is not None and (tuple(tensor.shape) != shape or tensor.dtype not in WORDS):
            lines.append(f"{said(name)}: {tensor.dtype} {list(tensor.shape)} in place of floating point {list(shape)}")
    return problems + collapse(lines)


def _factor_shapes(ranks: Mapping[str, int], matrices: Mapping[str, Shape]) -> Iterator[tuple[str, Shape]]:
    for path, rank in ranks.items():
        *experts, out_features, in_features = matrices[path]
        for expert in range(experts[0]) if experts else [None]:
            yield tensor_name(path, "lora_A", expert), (rank, in_features)
            yield tensor_name(path, "lora_B", expert), (out_features, rank)


def model_matrices(cfg: K3Config) -> dict[str, Shape]:
    """`lora_matrices` of a model of this config, without making one."""
    with torch.device("meta"):
        return lora_matrices(K3Model(replace(cfg, expert_quantization=None)))


def save_adapter(
    folder: Path | str,
    cfg: K3Config,
    adapter: Adapter,
    dtype: torch.dtype | None = None,
    layout: Layout | None = None,
) -> None:
    """Write a new folder for peft and engines: factors in `dtype` or as they are held, keys in the layout of the base's
    files or else the family's. The same adapter gives the same bytes. The folder appears whole or not at all.

    Raises ValueError for an adapter that does not fit the config or holds NaN or infinity, and for a folder that is
    not empty.
    """
    matrices = model_matrices(cfg)
    require_adapter(adapter, matrices)
    tensors = {
        written_key(name, layout or cfg.family): (name, tensor) for name, tensor in sorted(adapter.tensors.items())
    }
    listed = [(key, WORDS[dtype or tensor.dtype], tuple(tensor.shape)) for key, (_, tensor) in tensors.items()]
    header, entries = encode_header(listed, {"format": "pt"})
    document = to_document(to_peft(cfg, adapter.lora, matrices, adapter.base_model))
    with new_folder(Path(folder)) as partial:
        fd = os.open(partial / WEIGHTS_FILE, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            write_bytes(fd, header, 0)
            for key, (name, tensor) in tensors.items():
                host = tensor.detach().to("cpu", dtype or tensor.dtype).contiguous().flatten()
                bad = first_non_finite(host)
                if bad is not None:
                    raise ValueError(f"{name} holds {host[bad].item()}: not written")
                write_bytes(fd, host.view(torch.uint8).numpy().data, entries[key].offset)
            os.fsync(fd)
        finally:
            os.close(fd)
        config = partial / CONFIG_FILE
        config.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", "utf-8")
        sync(config)


def load_adapter(folder: Path | str, cfg: K3Config) -> Adapter:
    """Read a PEFT folder of any of the forms in adapter_keys, for a model of this config; types stay as in the file.

    Raises ValueError with a line for everything that is wrong: in adapter_config.json, and every factor that is
    missing, unexpected, misshapen or not finite, by its key. Raises IntegrityError for a broken file.
    """
    folder = Path(folder)
    path = _weights_file(folder)
    config = read_peft_config(folder / CONFIG_FILE)
    matrices = model_matrices(cfg)
    read_header(path)
    try:
        file = load_file(path)
    except SafetensorError as error:
        raise IntegrityError(f"{path}: cannot be read: {error}") from error
    problems = [
        f"{key} holds {t.flatten()[bad].item()}" for key, t in file.items() if (bad := _not_finite(t)) is not None
    ]
    factors = factors_of(file, config, cfg, matrices)
    must, may = covered(config, cfg, matrices)
    values = {p: factors.rank_alpha[p] for p in matrices if p in must or (p in may and p in factors.present)}
    ranks = {path: rank for path, (rank, _) in values.items()}
    problems += factors.problems
    if not values:
        problems.append(f"{CONFIG_FILE} names no matrix of this model")
    problems += _misfits(
        factors.tensors, ranks, matrices, lambda name: factors.keys.get(name) or written_key(name, cfg.family)
    )
    if problems:
        raise ValueError(f"{path}: {len(problems)} fault(s)\n" + "\n".join(f"  {line}" for line in problems))
    return Adapter(lora_of(values, matrices, config.default), factors.tensors, config.base_model, factors.repeated)


def _not_finite(tensor: Tensor) -> int | None:
    return first_non_finite(tensor.flatten()) if tensor.dtype in WORDS and tensor.numel() else None


def _weights_file(folder: Path) -> Path:
    if not folder.is_dir():
        raise ValueError(f"{folder}: expected a folder with {CONFIG_FILE} and {WEIGHTS_FILE}")
    path = folder / WEIGHTS_FILE
    if not path.exists() and (folder / PICKLE_FILE).exists():
        raise ValueError(
            f"{folder / PICKLE_FILE}: is a pickle, which runs any code that it holds, and is not read: "
            "save the adapter again with peft's save_pretrained(folder, safe_serialization=True)"
        )
    return path
