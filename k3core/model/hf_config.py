"""config.json <-> K3Config, for both families. What a document says beside the architecture is carried along untouched."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields
from itertools import islice
from typing import Any, Literal

from k3core.model.config import MXFP4, K3Config
from k3core.model.hf_keys import (
    CARRIED,
    FIXED,
    FULL_LAYERS,
    KDA_LAYERS,
    KEYS,
    LAYERS,
    LINEAR,
    MISSING,
    QUANTIZATION,
    REPEATED,
    TIED,
    Key,
    fault,
    find,
    put,
    show,
)
from k3core.model.hf_quantization import mxfp4_block, mxfp4_problem
from k3core.model.hf_released import document_for
from k3core.model.rules import model_problems

Layout = Literal["kimi_k3", "kimi_k3_text", "kimi_linear"]

K3_TEXT_CLASS = "KimiK3LinearForCausalLM"
SHOWN_LAYERS = 20
_LAYER_FIELDS = ("full_attn_layers", LAYERS)


def layout_of(document: Mapping[str, Any]) -> Layout:
    """The form of a checkpoint's files: K3's wrapper with a `text_config`, K3's text model alone, or Kimi-Linear.

    Raises ValueError for a document of another model.
    """
    if not isinstance(document, Mapping):
        raise ValueError(f"expected an object, got {show(document)}")
    kind, text = document.get("model_type"), document.get("text_config")
    if kind == "kimi_k3":
        if not isinstance(text, Mapping):
            raise ValueError(f"text_config: {'missing' if text is None else f'expected an object, got {show(text)}'}")
        if text.get("model_type", "kimi_linear") != "kimi_linear":
            raise ValueError(f'text_config.model_type: must be "kimi_linear", got {show(text["model_type"])}')
        return "kimi_k3"
    if kind != "kimi_linear":
        known = 'must be "kimi_k3" or "kimi_linear"'
        raise ValueError(f"model_type: {'missing' if kind is None else f'got {show(kind)}'}: {known}")
    architectures = document.get("architectures")
    is_k3_text = isinstance(architectures, list) and K3_TEXT_CLASS in architectures
    return "kimi_k3_text" if is_k3_text else "kimi_linear"


def from_hf(document: Mapping[str, Any]) -> K3Config:
    """The architecture that a config.json describes.

    Raises ValueError with one line for each key that is missing, malformed, contradictory, or that asks for something
    which is not implemented: nothing that shapes the model is taken for granted.
    """
    layout = layout_of(document)
    where = "text_config." if layout == "kimi_k3" else ""
    text = document["text_config"] if where else document
    problems: list[str] = []
    values: dict[str, Any] = {}
    faulty: set[str] = set()

    has_linear = isinstance(text.get(LINEAR), Mapping)
    if not has_linear:
        problems.append(f"{where}{LINEAR}: {'missing' if LINEAR not in text else 'must be an object'}")
    is_k3 = layout != "kimi_linear" or any(find(text, key.place) not in (MISSING, None, False) for key in _of_k3())
    for key in KEYS:
        if key.place.startswith(f"{LINEAR}.") and not has_linear:
            faulty.add(key.field)
            continue
        value = find(text, key.place)
        if value is MISSING:
            if _is_required(key, text, is_k3):
                faulty.add(key.field)
                problems.append(f"{where}{key.place}: missing")
            else:
                values[key.field] = key.absent
        elif reason := fault(key, value):
            faulty.add(key.field)
            problems.append(f"{where}{key.place}: {reason}")
        else:
            values[key.field] = float(value) if key.kind == "number" and value is not None else value

    if not has_linear or LAYERS in faulty or values[LAYERS] < 1:
        faulty.update(_LAYER_FIELDS)
    elif reason := _layers_fault(text, values[LAYERS], where):
        faulty.update(_LAYER_FIELDS)
        problems.append(reason)
    else:
        values["full_attn_layers"] = tuple(sorted(text[LINEAR]["full_attn_layers"]))

    for place, block in _quantization_blocks(document, where):
        if reason := mxfp4_problem(block, place):
            problems.append(reason)
        values["expert_quantization"] = MXFP4

    problems += _fixed_problems(document, text, where)
    cfg = K3Config(**{field.name: values[field.name] for field in fields(K3Config) if field.name in values})
    # One fault, one line: rules about a value that could not be read would speak of its stand-in.
    problems += [
        line
        for about, line in model_problems(cfg, lambda field: f"{where}{_PLACES[field]}")
        if faulty.isdisjoint(about) or (about == (LAYERS,) and has_linear)
    ]
    if not faulty:
        for name, expected in REPEATED.items():
            value = text.get(name)
            if value is not None and value != (wanted := expected(cfg)):
                problems.append(f"{where}{name}: found {show(value)}, the other keys say {show(wanted)}")
    if problems:
        raise ValueError("\n".join(problems))
    return cfg


def to_hf(cfg: K3Config, like: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A config.json: `like` with what differs from cfg changed in its place, and nothing else; else one of cfg's family.

    Experts that are not packed leave no quantization block behind. Raises ValueError when `like` is no document that
    `from_hf` reads, or is Kimi-Linear's and cfg has parts of K3, which its readers would ignore.
    """
    document = document_for(cfg) if like is None else copy.deepcopy(dict(like))
    old = from_hf(document)
    if (old.family, cfg.family) == ("kimi_linear", "kimi_k3"):
        raise ValueError("this config.json is Kimi-Linear's, and the model has parts that only K3's can describe")
    layout = layout_of(document)
    text = document["text_config"] if layout == "kimi_k3" else document
    for key in KEYS:
        value = getattr(cfg, key.field)
        if value != getattr(old, key.field):
            put(text, key.place, value)
    layers = list(cfg.full_attn_layers), [i + 1 for i in cfg.kda_layers]
    if layers != (sorted(find(text, FULL_LAYERS)), sorted(find(text, KDA_LAYERS))):
        put(text, FULL_LAYERS, layers[0])
        put(text, KDA_LAYERS, layers[1])
    for name, expected in REPEATED.items():
        if text.get(name) is not None and text[name] != (wanted := expected(cfg)):
            text[name] = wanted
    if cfg.expert_quantization != old.expert_quantization:
        text.pop(QUANTIZATION, None)
        document.pop(QUANTIZATION, None)
        if cfg.expert_quantization is not None:
            text[QUANTIZATION] = mxfp4_block()
    return document


def unread_keys(document: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys of a document that `from_hf` neither reads nor knows to be without effect on the text model."""
    known = {key.place for key in KEYS} | {FULL_LAYERS, KDA_LAYERS, LINEAR, QUANTIZATION}
    known |= {fixed.key for fixed in FIXED} | set(REPEATED) | CARRIED
    is_wrapper = layout_of(document) == "kimi_k3"
    text = document["text_config"] if is_wrapper else document
    linear = text.get(LINEAR)
    names = [*text, *(f"{LINEAR}.{name}" for name in (linear if isinstance(linear, Mapping) else ()))]
    unread = [f"text_config.{name}" if is_wrapper else name for name in names if name not in known]
    return tuple(([name for name in document if name not in known] if is_wrapper else []) + unread)


_PLACES = {key.field: key.place for key in KEYS} | {
    "full_attn_layers": FULL_LAYERS,
    "expert_quantization": QUANTIZATION,
}


def _of_k3() -> Iterator[Key]:
    return (key for key in KEYS if key.when == "in K3")


def _is_required(key: Key, text: Mapping[str, Any], is_k3: bool) -> bool:
    return {
        "always": True,
        "in K3": is_k3,
        "with situ": text.get("hidden_act") == "situ",
        "with latent experts": text.get("routed_expert_hidden_size") is not None,
        "if not the default": False,
    }[key.when]


def _layers_fault(text: Mapping[str, Any], num_layers: int, where: str) -> str | None:
    """One line when the two lists do not split the layers 1..L between them."""
    lists = []
    for path in (FULL_LAYERS, KDA_LAYERS):
        value = find(text, path)
        if value is MISSING:
            return f"{where}{path}: missing"
        if not isinstance(value, list) or not all(type(layer) is int for layer in value):
            return f"{where}{path}: expected a list of layer numbers, got {show(value)}"
        lists.append(value)
    full, kda = lists
    times = Counter([*full, *kda])
    lacking = (layer for layer in range(1, num_layers + 1) if layer not in times)
    found = {
        "twice": sorted(layer for layer, count in times.items() if count > 1),
        "in neither": list(islice(lacking, SHOWN_LAYERS)),
        "no layers": sorted(layer for layer in times if not 1 <= layer <= num_layers),
    }
    if not any(found.values()):
        return None
    said = ", ".join(f"{what} {show(layers)}" for what, layers in found.items() if layers)
    return (
        f"{where}{FULL_LAYERS} and kda_layers must split the layers 1..{num_layers} between them "
        f"(counted from 1): {said}"
    )


def _quantization_blocks(document: Mapping[str, Any], where: str) -> Iterator[tuple[str, object]]:
    """Where it stands in the release, and where other programs put it."""
    places = [(where, document["text_config"])] if where else []
    for prefix, part in [*places, ("", document)]:
        if part.get(QUANTIZATION) is not None:
            yield f"{prefix}{QUANTIZATION}", part[QUANTIZATION]


def _fixed_problems(document: Mapping[str, Any], text: Mapping[str, Any], where: str) -> Iterator[str]:
    for fixed in FIXED:
        # The wrapper's word counts too for the one key of these that it repeats.
        parts = [(where, text)] + ([("", document)] if where and fixed.key == TIED else [])
        for prefix, part in parts:
            if fixed.key not in part:
                if fixed.required:
                    yield f"{prefix}{fixed.key}: missing"
            elif fixed.refuses(part[fixed.key]):
                yield f"{prefix}{fixed.key}: got {show(part[fixed.key])}: {fixed.why_not}"
    ropes = text.get("rope_parameters")
    if isinstance(ropes, Mapping) and ropes.get("rope_type", "default") != "default":
        yield f"{where}rope_parameters: got {show(ropes['rope_type'])}: there are no rotary positions to scale"
