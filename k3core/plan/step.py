"""The memory and traffic of a training step on given GPUs: what fits, what does not, and how long a context would."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from k3core.model.config import K3Config
from k3core.plan.activations import Local, head_ledger, kept_bytes, layer_ledger, local_part, prefill_ledger
from k3core.plan.calibration import calibration
from k3core.plan.inputs import Machine, Mesh, Training, problems
from k3core.plan.states import Trained, Weights, num_factors, rollout_bytes, trained, weights
from k3core.plan.traffic import Flow
from k3core.plan.traffic import flows as flows_of

LONGEST = 1 << 24  # tokens; longer contexts are not looked for

Source = Literal["computed", "measured"]

WEIGHTS, FACTORS, MASTER = "weights", "LoRA factors", "fp32 master weights"
GRADIENTS, MOMENTS, GATHERED = "gradients", "AdamW moments", "gathered layers"
WHOLE = "gradients of a layer"
INPUTS, ROUTES, RECOMPUTED, HEAD = "layer inputs", "routes", "layer being recomputed", "log-probability head"
STEP, CACHE, STATE = "AdamW's step", "MLA cache", "KDA states and windows"
PREFILL = "a prefill's own tensors"


@dataclass(frozen=True, slots=True)
class Row:
    """Bytes on one GPU. split: the axes that share it out. note: what it consists of."""

    name: str
    num_bytes: float
    split: str
    source: Source
    note: str


@dataclass(frozen=True, slots=True)
class Phase:
    """A time at which all of `rows` are in memory."""

    name: str
    rows: tuple[Row, ...]

    @property
    def num_bytes(self) -> float:
        return sum(row.num_bytes for row in self.rows)


@dataclass(frozen=True, slots=True)
class Plan:
    """largest: what is alive in the layer being recomputed when it holds most, largest first.

    notes: what is taken for granted, or not implemented yet.
    """

    cfg: K3Config
    machine: Machine
    mesh: Mesh
    training: Training
    phases: tuple[Phase, ...]
    largest: tuple[tuple[str, float], ...]
    flows: tuple[Flow, ...]
    notes: tuple[str, ...]

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.num_bytes)

    @property
    def peak_bytes(self) -> float:
        return self.peak.num_bytes

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.machine.memory_bytes


def plan(cfg: K3Config, machine: Machine, mesh: Mesh, training: Training) -> Plan:
    """Raises ValueError with a line for each reason why cfg cannot be trained so."""
    if faults := list(problems(cfg, mesh, training)):
        raise ValueError("\n".join(faults))
    notes = []
    if training.mode == "full" and cfg.expert_quantization is not None:
        cfg = replace(cfg, expert_quantization=None)
        notes.append("experts are unpacked: only an adapter can be trained above packed ones")
    held, moved, at = weights(cfg, mesh.tp, mesh.ep), trained(cfg, mesh, training), local_part(cfg, mesh, training)
    always = list(_always(cfg, mesh, training, held, moved))
    gathered = _gathered(cfg, mesh, held)
    whole = _whole_gradients(cfg, mesh, held) if training.mode == "full" else ()
    inputs, routes = kept_bytes(at)
    update, largest = _update(cfg, mesh, at, inputs, routes)
    kept = _row(cfg, INPUTS, inputs * cfg.num_hidden_layers, _tokens(mesh), f"{cfg.num_hidden_layers} layers")
    used = _row(cfg, ROUTES, routes, _tokens(mesh), "experts used and recorded")
    head = _row(cfg, HEAD, head_ledger(at).peak, _tokens(mesh), "a block of the vocabulary at a time")
    phases = [
        Phase("backward", (*always, *gathered, *whole, *update)),
        Phase("head", (*always, *_gathered_head(cfg, mesh, held), kept, used, head)),
        Phase("optimizer step", (*always, _row(cfg, STEP, moved.temporary, _shards(mesh), "a square root"))),
    ]
    if training.rollout_sequences:
        cache, state = rollout_bytes(cfg, mesh, training)
        note = f"{training.rollout_sequences} sequences over all GPUs, {training.context:,} tokens each"
        rows = _row(cfg, CACHE, cache, _data(mesh), note), _row(cfg, STATE, state, _data(mesh, "tp"), "fp32 and bf16")
        lasting = [row for row in always if row.name != GRADIENTS]
        phases.append(Phase("rollout", (*lasting, *gathered, *rows, _prefill(cfg, mesh, at))))
    traffic = flows_of(cfg, machine, mesh, at, held, moved)
    return Plan(cfg, machine, mesh, training, tuple(phases), largest, traffic, (*notes, *_notes(mesh, training)))


def largest_context(cfg: K3Config, machine: Machine, mesh: Mesh, training: Training) -> int:
    """The longest single sequence that fits, in tokens; 0 when none does. It is a multiple of cp, at most LONGEST."""

    def fits(parts: int) -> bool:
        return plan(cfg, machine, mesh, replace(training, lengths=(parts * mesh.cp,))).fits

    low, high = 0, LONGEST // mesh.cp
    if fits(high):
        return high * mesh.cp
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * mesh.cp


@dataclass(frozen=True, slots=True)
class Cut:
    """A change that makes a term of the peak smaller, and by how much."""

    term: str
    change: str
    saved_bytes: float


def cuts(made: Plan) -> tuple[Cut, ...]:
    """What to change first, the largest saving first: each halves its terms."""
    mesh, training = made.mesh, made.training
    sizes = {row.name: row.num_bytes for row in made.peak.rows}

    def half(*names: str) -> float:
        return sum(sizes.get(name, 0.0) for name in names) / 2

    shards = f"fsdp={2 * mesh.fsdp}, on twice the GPUs"
    found = [Cut(WEIGHTS, shards, half(WEIGHTS))]
    state = (FACTORS, MASTER, GRADIENTS, MOMENTS)
    if training.mode == "full":
        found.append(Cut("optimizer", "--train lora", 2 * half(*state)))
    found.append(Cut("optimizer", shards, half(*state)))
    shorter = "half the --batch-tokens" if len(training.lengths) > 1 else f"cp={2 * mesh.cp}, on twice the GPUs"
    found.append(Cut("activations", shorter, half(INPUTS, ROUTES, RECOMPUTED, HEAD)))
    if sizes.get(GATHERED) or sizes.get(WHOLE):
        axis = f"ep={2 * mesh.ep}" if mesh.ep < mesh.num_shards else f"tp={2 * mesh.tp}, on twice the GPUs"
        found.append(Cut(GATHERED, axis, half(GATHERED, WHOLE)))
    found.append(Cut("caches", "half the --rollout-sequences", half(CACHE, STATE)))
    return tuple(sorted((cut for cut in found if cut.saved_bytes > 0), key=lambda cut: -cut.saved_bytes))


def _always(cfg: K3Config, mesh: Mesh, training: Training, held: Weights, moved: Trained) -> Iterator[Row]:
    experts = "experts MXFP4, the rest bf16" if cfg.expert_quantization else "bf16"
    yield _row(cfg, WEIGHTS, held.num_bytes / mesh.num_shards, _shards(mesh, "tp"), experts)
    if training.mode == "lora":
        num = num_factors(cfg, training.rank, training.targets)
        split = _shards(mesh)
        yield _row(cfg, FACTORS, moved.factors, split, f"rank {training.rank}, {num / 1e6:,.1f} M, fp32")
    else:
        split = _shards(mesh, "tp")
        yield _row(cfg, MASTER, moved.master, split, "fp32")
    yield _row(cfg, GRADIENTS, moved.gradients, split, "fp32")
    yield _row(cfg, MOMENTS, moved.moments, split, "two, fp32")


def _gathered(cfg: K3Config, mesh: Mesh, held: Weights) -> tuple[Row, ...]:
    """The layer at work and the next one, which is fetched meanwhile."""
    layers = held.gathered_layers(mesh)
    pairs = [sum(layers[i : i + 2]) for i in range(len(layers))]
    return _gathered_row(cfg, mesh, max(pairs), "this and the next layer")


def _whole_gradients(cfg: K3Config, mesh: Mesh, held: Weights) -> tuple[Row, ...]:
    """Of a layer's weights, in bf16, until they are summed over the ranks and kept in shards."""
    layers = [rest + experts for rest, experts in zip(held.rest, held.rank_experts, strict=True)]
    return (_row(cfg, WHOLE, max(layers), _axes(mesh, "tp", "ep"), "of the layer at work, bf16"),)


def _gathered_head(cfg: K3Config, mesh: Mesh, held: Weights) -> tuple[Row, ...]:
    return _gathered_row(cfg, mesh, held.others_bytes / 2 if mesh.num_shards > 1 else 0.0, "the head")


def _gathered_row(cfg: K3Config, mesh: Mesh, num_bytes: float, note: str) -> tuple[Row, ...]:
    return (_row(cfg, GATHERED, num_bytes, _axes(mesh, "tp", "ep"), note),) if num_bytes else ()


def _update(
    cfg: K3Config, mesh: Mesh, at: Local, inputs: float, routes: float
) -> tuple[tuple[Row, ...], tuple[tuple[str, float], ...]]:
    """The rows at the layer whose backward pass needs most, and what is alive in it. Inputs of later layers are gone."""
    layer, ledger = max(
        ((layer, layer_ledger(at, layer)) for layer in range(cfg.num_hidden_layers)),
        key=lambda each: (each[0] + 1) * inputs + _calibrated(cfg, RECOMPUTED, each[1].peak),
    )
    kind = f"{'KDA' if cfg.is_kda(layer) else 'MLA'} and {'MoE' if cfg.is_moe(layer) else 'dense MLP'}"
    split = _tokens(mesh)
    rows = (
        _row(cfg, INPUTS, (layer + 1) * inputs, split, f"layers 1-{layer + 1}"),
        _row(cfg, ROUTES, routes, split, "experts used and recorded"),
        _row(cfg, RECOMPUTED, ledger.peak, _axes(mesh, "cp", "tp"), f"layer {layer + 1}: {kind}"),
    )
    return rows, tuple(sorted(ledger.at_peak.items(), key=lambda each: -each[1]))


def _prefill(cfg: K3Config, mesh: Mesh, at: Local) -> Row:
    """Of the layer that needs most, for as many tokens in a pass as training has."""
    peaks = [prefill_ledger(at, layer).peak for layer in range(cfg.num_hidden_layers)]
    largest = peaks.index(max(peaks))
    return _row(cfg, PREFILL, max(peaks), _axes(mesh, "cp", "tp"), f"layer {largest + 1}, {at.T:,} tokens in a pass")


def _calibrated(cfg: K3Config, name: str, num_bytes: float) -> float:
    found = calibration(name, cfg.family)
    return num_bytes if found is None else num_bytes * found.factor


def _row(cfg: K3Config, name: str, num_bytes: float, split: str, note: str) -> Row:
    found = calibration(name, cfg.family)
    source: Source = "computed" if found is None else "measured"
    return Row(name, _calibrated(cfg, name, num_bytes), split, source, note)


def _shards(mesh: Mesh, *more: str) -> str:
    """Axes with more than one rank, of those that split what is sharded."""
    return _axes(mesh, "fsdp", "cp", *more)


def _tokens(mesh: Mesh) -> str:
    return _axes(mesh, "cp")


def _data(mesh: Mesh, *more: str) -> str:
    return _axes(mesh, "dp", "fsdp", "cp", *more)


def _axes(mesh: Mesh, *axes: str) -> str:
    return " x ".join(axis for axis in axes if getattr(mesh, axis) > 1) or "-"


def _notes(mesh: Mesh, training: Training) -> Iterator[str]:
    if mesh.num_gpus > 1:
        yield "this version trains on one GPU: more are planned for, not used yet"
    if training.mode == "full":
        yield "this version trains full parameters in fp32 only: a bf16 model with a master copy is planned for"
    if mesh.ep > 1:
        yield "experts are taken to be chosen evenly: the busiest rank holds and sends more"
