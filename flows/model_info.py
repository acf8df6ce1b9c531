"""What `k3 model info` shows: layers, parameters by part, bytes by type, state of a sequence, and what is on disk."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from rich import box
from rich.table import Table

from flows.model_source import ModelSource, find_model
from flows.quantities import amount, count, size
from flows.tables import print_line, print_table
from k3core.checkpoint.hf import Checkpoint, open_checkpoint
from k3core.errors import IntegrityError
from k3core.model.config import K3Config
from k3core.model.hf_config import layout_of, unread_keys
from k3core.model.sizes import (
    bank_rows,
    conv_window_bytes,
    kda_state_bytes,
    mla_cache_bytes,
    num_active_parameters,
    num_parameters,
    num_tensors,
    part_sizes,
    stored_bytes,
)

FAMILIES = {"kimi_k3": "Kimi K3", "kimi_linear": "Kimi-Linear"}
ACTIVE = "active: all but the experts that a token does not choose; embedding and head count whole"
SHOWN_FAULTS = 5
_WORDS = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}


def print_info(name: str, as_json: bool) -> int:
    """1 when the folder's files are not those that its config describes."""
    source = find_model(name)
    found, faults = _open(source)
    facts = _facts(source, found, faults)
    if as_json:
        print(json.dumps(facts, indent=1))
    else:
        _print(source, facts, found, faults)
    return 1 if faults else 0


def _open(source: ModelSource) -> tuple[Checkpoint | None, list[str]]:
    if source.folder is None or not source.has_weights:
        return None, []
    try:
        return open_checkpoint(source.folder), []
    except (ValueError, IntegrityError) as error:
        return None, str(error).splitlines()


def _facts(source: ModelSource, found: Checkpoint | None, faults: list[str]) -> dict[str, Any]:
    cfg = source.cfg
    embedding = cfg.vocab_size * cfg.hidden_size
    facts: dict[str, Any] = {
        "model": source.name,
        "family": cfg.family,
        "layout": layout_of(source.document),
        "config": asdict(cfg),
        "layers": {  # counted from 1, as the config counts them
            "kda": [i + 1 for i in cfg.kda_layers],
            "mla": [i + 1 for i in cfg.mla_layers],
            "dense": [i + 1 for i in range(cfg.num_hidden_layers) if not cfg.is_moe(i)],
            "moe": [i + 1 for i in cfg.moe_layers],
            "attn_res_blocks": _blocks(cfg),
        },
        "parameters": {
            "total": num_parameters(cfg),
            "active": num_active_parameters(cfg),
            "active_means": ACTIVE,
            "active_without_embedding": num_active_parameters(cfg) - embedding,
            "parts": {part: asdict(sizes) for part, sizes in part_sizes(cfg).items()},
        },
        "stored": {
            "tensors": num_tensors(cfg),
            "bytes": sum(stored_bytes(cfg).values()),
            "by_type": stored_bytes(cfg),
        },
        "sequence": {
            "mla_cache_bytes_per_token": mla_cache_bytes(cfg),
            "kda_state_bytes": kda_state_bytes(cfg),
            "conv_window_bytes": conv_window_bytes(cfg),
            "bank_rows": bank_rows(cfg),
            "bank_row_bytes": cfg.hidden_size * 2 if bank_rows(cfg) else 0,
        },
        "unread_keys": list(unread_keys(source.document)),
    }
    if found is not None:
        facts["on_disk"] = _on_disk(found)
    if faults:
        facts["faults"] = faults
    return facts


def _on_disk(found: Checkpoint) -> dict[str, Any]:
    by_type: dict[str, int] = {}
    model = found.model_tensors
    for name, stored in model.items():
        kind = "mxfp4 codes" if name.endswith("_packed") else "mxfp4 scales" if name.endswith("_scale") else None
        kind = kind or _WORDS.get(stored.entry.dtype, stored.entry.dtype)
        by_type[kind] = by_type.get(kind, 0) + stored.entry.num_bytes
    return {
        "files": len(found.headers),
        "tensors": len(model),
        "bytes": sum(by_type.values()),
        "by_type": by_type,
        "vision_tensors": len(found.tensors) - len(model),
        "vision_bytes": found.total_bytes - sum(by_type.values()),
    }


def _print(source: ModelSource, facts: dict[str, Any], found: Checkpoint | None, faults: list[str]) -> None:
    cfg, layers = source.cfg, facts["layers"]
    print_line(f"{source.name}: {FAMILIES[cfg.family]}, {cfg.num_hidden_layers} layers of width {cfg.hidden_size:,}")
    print_line(f"{count(num_parameters(cfg))} parameters, {count(num_active_parameters(cfg))} active on a token")
    print_table(_rows(_layer_rows(cfg, layers)))
    print_table(_parts(cfg))
    print_line(ACTIVE)
    without = facts["parameters"]["active_without_embedding"]
    print_line(f"without the embedding, of which a token reads one row: {count(without)} active")
    print_table(_bytes(facts["stored"], facts.get("on_disk")))
    sequence = facts["sequence"]
    rows = [
        ("MLA cache, a token", sequence["mla_cache_bytes_per_token"], "bf16, all MLA layers"),
        ("KDA state, a sequence", sequence["kda_state_bytes"], "fp32, all KDA layers"),
        ("convolution window, a sequence", sequence["conv_window_bytes"], "bf16, all KDA layers"),
    ]
    if sequence["bank_rows"]:
        rows.append(("AttnRes bank, a token", sequence["bank_row_bytes"] * sequence["bank_rows"], _bank(cfg)))
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("what runs keep")
    table.add_column("bytes", justify="right")
    table.add_column("")
    table.add_column("")
    for what, num_bytes, note in rows:
        table.add_row(what, f"{num_bytes:,}", size(num_bytes), note)
    print_table(table)
    if facts["unread_keys"]:
        print_line(f"keys that are carried along without being read: {', '.join(facts['unread_keys'])}")
    if found is not None and (vision := facts["on_disk"]["vision_tensors"]):
        print_line(f"besides: {vision} tensors of the vision parts, {size(facts['on_disk']['vision_bytes'])}")
    for line in faults[:SHOWN_FAULTS]:
        print(line)
    if len(faults) > SHOWN_FAULTS:
        print(f"  and {len(faults) - SHOWN_FAULTS} more: `k3 model check {source.folder}`")


def _layer_rows(cfg: K3Config, layers: dict[str, list[Any]]) -> Iterator[tuple[str, str, str]]:
    gate = "full-rank gate" if cfg.use_full_rank_gate else "low-rank gate"
    decay = "softplus decay" if cfg.gate_lower_bound is None else f"log decay over {cfg.gate_lower_bound:g}"
    yield _layers("KDA", layers["kda"], f"{cfg.kda_num_heads} heads x {cfg.kda_head_dim}, {gate}, {decay}")
    latent = f"{cfg.num_attention_heads} heads, latent {cfg.kv_lora_rank} + {cfg.qk_rope_head_dim}"
    yield _layers("MLA", layers["mla"], latent + (", gated" if cfg.mla_use_output_gate else ""))
    yield _layers("dense", layers["dense"], f"width {cfg.intermediate_size:,}, {cfg.hidden_act}")
    width = cfg.routed_expert_hidden_size
    experts = f"{cfg.num_experts_per_token} of {cfg.num_experts} experts + {cfg.num_shared_experts} shared, width {cfg.moe_intermediate_size:,}"
    yield _layers("MoE", layers["moe"], experts + (f" in a latent space of {width:,}" if width else ""))
    if blocks := layers["attn_res_blocks"]:
        yield "AttnRes", f"{len(blocks)} blocks", ", ".join(f"{first}-{last}" for first, last in blocks)


def _layers(kind: str, numbers: list[int], note: str) -> tuple[str, str, str]:
    return kind, f"{len(numbers)}", f"{note}\nlayers {_ranges(numbers)}" if numbers else note


def _rows(rows: Iterable[tuple[str, str, str]]) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False)
    for heading in ("kind", "number", ""):
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _parts(cfg: K3Config) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))  # exact numbers, within 80 columns
    table.add_column("part")
    for heading in ("parameters", "", "active", "", "bytes"):
        table.add_column(heading, justify="right", no_wrap=True)
    for part, sizes in part_sizes(cfg).items():
        table.add_row(part, *_counts(sizes.parameters, sizes.active), size(sizes.stored_bytes))
    table.add_section()
    total = sum(stored_bytes(cfg).values())
    table.add_row("all", *_counts(num_parameters(cfg), num_active_parameters(cfg)), size(total))
    return table


def _counts(parameters: int, active: int) -> tuple[str, str, str, str]:
    return f"{parameters:,}", amount(parameters), f"{active:,}", amount(active)


def _bytes(stored: dict[str, Any], on_disk: dict[str, Any] | None) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("stored as")
    for heading in ("bytes", "", *(("on disk", "") if on_disk else ())):
        table.add_column(heading, justify="right")
    kinds = [*stored["by_type"], *(kind for kind in (on_disk or stored)["by_type"] if kind not in stored["by_type"])]
    for kind in kinds:
        table.add_row(kind, *_pair(stored, kind), *(_pair(on_disk, kind) if on_disk else ()))
    table.add_section()
    disk = (f"{on_disk['bytes']:,}", size(on_disk["bytes"])) if on_disk else ()
    table.add_row(f"{stored['tensors']:,} tensors", f"{stored['bytes']:,}", size(stored["bytes"]), *disk)
    return table


def _pair(facts: dict[str, Any], kind: str) -> tuple[str, str]:
    num_bytes = facts["by_type"].get(kind, 0)
    return f"{num_bytes:,}", size(num_bytes)


def _bank(cfg: K3Config) -> str:
    return f"bf16, {bank_rows(cfg)} rows of {cfg.hidden_size:,} at the last layer"


def _blocks(cfg: K3Config) -> list[tuple[int, int]]:
    """First and last layer of each AttnRes block, counted from 1."""
    block, last = cfg.attn_res_block_size, cfg.num_hidden_layers
    return [] if block is None else [(i + 1, min(i + block, last)) for i in range(0, last, block)]


def _ranges(numbers: list[int]) -> str:
    """`1-3, 5-7` of ascending numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
