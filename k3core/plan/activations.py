"""What the trainer's own operations hold in memory while they recompute a layer and take its gradients.

Each function follows the code of a module (k3core.model.kda, mla, moe, layers; k3kernels' eager operations) in bf16 with
frozen weights: what autograd saves, what lives until a function returns, and what exists within one operation. A test
runs that code on the meta device and holds these numbers against it. Sizes in bytes; A, W: a bf16 and an fp32 element.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from k3core.model.config import K3Config
from k3core.plan.inputs import Mesh, Training
from k3core.plan.ledger import Ledger
from k3kernels.kda import eager as kda
from k3kernels.kda.reference import is_split
from k3kernels.linear_logprob import MAX_LOGITS, MAX_WEIGHT
from k3kernels.moe.eager import MAX_WIDE

A, W, INDEX = 2, 4, 8  # bytes of an activation, of what is computed wide, and of an index
CHUNK = 16  # tokens of a chunk of the KDA recurrence

# The recurrence, in tensors [tokens, heads, head_dim] of its fp32. Of one segment after the other: what its forward and
# its backward pass hold at once. In one piece: what autograd keeps, and what each pass holds besides. States at each
# chunk's start are counted apart. The form that is not split has pairwise decays as well, CHUNK times as large.
SEGMENT_FORWARD, SEGMENT_BACKWARD, SEGMENT_BACKWARD_UNSPLIT = 8.0, 29.0, 6.0
SEGMENT_DECAYS_FORWARD, SEGMENT_DECAYS_BACKWARD = 2.3, 6.0
WHOLE_KEPT, WHOLE_FORWARD, WHOLE_BACKWARD = 17.4, 7.0, 0.0
WHOLE_DECAYS_KEPT, WHOLE_DECAYS_BACKWARD = 2.6, 2.35


@dataclass(frozen=True, slots=True)
class Local:
    """One GPU's part: tokens T of `lengths`, padded to N rows of the longest; heads and widths that tp left it."""

    cfg: K3Config
    targets: frozenset[str]
    rank: int
    lengths: tuple[int, ...]
    kda_heads: int
    mla_heads: int
    dense_width: int
    shared_width: int
    expert_width: int
    vocabulary: int
    trained_share: float
    is_full: bool
    is_dispatched: bool

    @property
    def T(self) -> int:
        return sum(self.lengths)

    @property
    def N(self) -> int:
        return len(self.lengths)

    @property
    def length(self) -> int:
        return max(self.lengths)

    @property
    def D(self) -> int:
        return self.cfg.hidden_size

    def trains(self, *names: str) -> bool:
        """Whether an input of any of these projections is needed for a gradient."""
        return self.is_full or not self.targets.isdisjoint(names)


def local_part(cfg: K3Config, mesh: Mesh, training: Training) -> Local:
    return Local(
        cfg,
        frozenset(training.targets) if training.mode == "lora" else frozenset(),
        training.rank,
        tuple(length // mesh.cp for length in training.lengths),
        cfg.kda_num_heads // mesh.tp,
        cfg.num_attention_heads // mesh.tp,
        cfg.intermediate_size // mesh.tp,
        cfg.num_shared_experts * cfg.moe_intermediate_size // mesh.tp,
        cfg.moe_intermediate_size // mesh.tp,
        cfg.vocab_size // mesh.tp,
        training.trained_share,
        training.mode == "full",
        mesh.ep > 1,
    )


def layer_ledger(at: Local, layer: int) -> Ledger:
    """A layer's second forward pass and its backward pass, without what the layers keep for each other."""
    cfg, ledger = at.cfg, Ledger()
    rows = _rows(cfg, layer)
    stream = at.T * at.D * A
    ledger.hold("gradient of the running sum", stream)
    if rows:
        if layer:
            _mix_forward(ledger, at, "attention's read")
        ledger.hold("gradients of the bank", (rows - 1) * stream)
    _norm_forward(ledger, at, "attention's normed input")
    is_kda = cfg.is_kda(layer)
    (_kda_forward if is_kda else _mla_forward)(ledger, at)
    ledger.hold("running sum after attention", stream)
    if rows:
        _mix_forward(ledger, at, "MLP's read")
    _norm_forward(ledger, at, "MLP's normed input")
    if cfg.is_moe(layer):
        _moe_forward(ledger, at)
        _moe_backward(ledger, at)
    else:
        _mlp_forward(ledger, at, "dense MLP", at.dense_width)
        _mlp_backward(ledger, at, "dense MLP", at.dense_width)
    ledger.free("MLP's normed input")
    _norm_backward(ledger, at, "gradient into the MLP")
    ledger.free("gradient into the MLP")
    if rows:
        _mix_backward(ledger, at, rows + (layer % (cfg.attn_res_block_size or 1) == 0) + 1)
        ledger.free("MLP's read")
    ledger.free("running sum after attention")
    (_kda_backward if is_kda else _mla_backward)(ledger, at)
    ledger.free("attention's normed input")
    _norm_backward(ledger, at, "gradient into attention")
    if rows and layer:
        _mix_backward(ledger, at, rows + 1)
    return ledger


def prefill_ledger(at: Local, layer: int) -> Ledger:
    """A layer's only forward pass, for which nothing is kept: what its sublayers hold until they return, one after the
    other, beside the running sum and the bank."""
    cfg = at.cfg
    rows, stream = _rows(cfg, layer), at.T * at.D * A
    sublayers = [_kda_forward if cfg.is_kda(layer) else _mla_forward]
    if cfg.is_moe(layer):
        sublayers.append(_moe_forward)
    else:
        sublayers.append(partial(_mlp_forward, name="dense MLP", width=at.dense_width))
    ledgers = []
    for sublayer in sublayers:
        ledger = Ledger()
        ledger.hold("running sum and bank", (rows + 1) * stream)
        if rows:
            _mix_forward(ledger, at, "read")
        _norm_forward(ledger, at, "normed input")
        sublayer(ledger, at)
        ledgers.append(ledger)
    return max(ledgers, key=lambda ledger: ledger.peak)


def head_ledger(at: Local) -> Ledger:
    """Log-probabilities of the trained tokens, forward and backward, a block of the vocabulary at a time.

    A plan does not know in which mode it will run: kernels hold up to 0.6 GiB at a time instead, or
    1.9 where the head is trained (docs/memory.md).
    """
    ledger = Ledger()
    num = at.T * at.trained_share
    ledger.hold("final hidden state", at.T * at.D * A)
    ledger.hold("hidden state of the trained tokens", num * at.D * A)
    ledger.hold("its gradient", num * at.D * W)
    block = max(1, min(at.vocabulary, MAX_WEIGHT // at.D // 128 * 128 or MAX_WEIGHT // at.D))
    piece = min(num, max(1, MAX_LOGITS // block))
    ledger.spike("logits of a block", piece * (block * (2 * W + A) + at.D * W))
    if at.is_full:
        ledger.hold("gradient of the head", at.vocabulary * at.D * A)
        ledger.spike("gradient of a block of the head", 2 * block * at.D * W)
    ledger.hold("gradient of the final hidden state", 2 * at.T * at.D * A)
    ledger.free("hidden state of the trained tokens", "its gradient")
    _norm_backward(ledger, at, "gradient of the final norm")
    return ledger


def kept_bytes(at: Local) -> tuple[int, int]:
    """(of each layer: its input; of all MoE layers: the experts that were used, and those recorded)."""
    routes = at.T * at.cfg.num_experts_per_token * len(at.cfg.moe_layers) * INDEX
    return at.T * at.D * A, 2 * routes


def _rows(cfg: K3Config, layer: int) -> int:
    """Of the bank, at the layer's first read; with the running sum that is what it mixes."""
    block = cfg.attn_res_block_size
    return 0 if block is None else max(1, -(-layer // block))


def _norm_forward(ledger: Ledger, at: Local, name: str) -> None:
    ledger.spike("norm in fp32", at.T * at.D * (W + A))
    ledger.hold(name, at.T * at.D * A)


def _norm_backward(ledger: Ledger, at: Local, name: str) -> None:
    ledger.hold(name, at.T * at.D * A)
    ledger.spike("norm's gradient in fp32", 3 * at.T * at.D * W)


def _mix_forward(ledger: Ledger, at: Local, name: str) -> None:
    ledger.spike("AttnRes read in fp32", 2 * at.T * at.D * W)
    ledger.hold(name, at.T * at.D * A)


def _mix_backward(ledger: Ledger, at: Local, rows: int) -> None:
    ledger.spike("gradients of an AttnRes read", at.T * at.D * (3 * W + rows * A))


def _lora_spike(ledger: Ledger, at: Local, name: str, width: float) -> None:
    """A projection's result, and with LoRA the branch and its scaled copy beside it."""
    copies = 3 if name in at.targets else 1
    ledger.spike(name, copies * at.T * width * A)


def _kda_forward(ledger: Ledger, at: Local) -> None:
    cfg, H, K = at.cfg, at.kda_heads, at.cfg.kda_head_dim
    P, length = H * K, -(-at.length // CHUNK) * CHUNK
    padded = at.N * length
    is_padded = padded != at.T
    for done, name in enumerate(("q_proj", "k_proj", "v_proj")):
        ledger.spike(name, at.T * P * A * (done + (3 if name in at.targets else 1)))
    ledger.spike("q, k, v and their concatenation", 6 * at.T * P * A)
    ledger.hold("q, k and v projections", 3 * at.T * P * A)
    if is_padded:
        ledger.hold("padded q, k and v", 3 * padded * P * A)
    ledger.hold("KDA: convolution's input", 3 * P * A * (padded + at.N * (cfg.short_conv_kernel_size - 1)))
    ledger.spike("convolution in fp32", padded * 3 * P * (2 * W + A))
    ledger.hold("KDA: convolution's output", padded * 3 * P * A)
    ledger.spike("raw gate", at.T * P * (A + 2 * W))
    ledger.hold("KDA: raw gate", at.T * P * W)
    ledger.hold("log decay, not padded", at.T * P * W if is_padded else 0)
    ledger.hold("KDA: log decay and write strength", padded * (P + H) * W)
    ledger.hold("KDA: q and k in fp32", 2 * padded * P * W)
    ledger.hold("KDA: normed q and k", 2 * padded * P * A)
    ledger.spike("normalisation in fp32", padded * P * 2 * W)
    ledger.hold("KDA: output of the recurrence", padded * P * A)
    segment, kept = _recurrence(at, H)
    ledger.hold("KDA: kept of the recurrence", kept)
    ledger.spike("recurrence of a segment", segment[0])
    if is_padded:
        ledger.hold("KDA: output, not padded", at.T * P * A)
        ledger.free("KDA: output of the recurrence")
    ledger.spike("g_proj", at.T * P * A * (3 if at.trains("g_proj", "g_b_proj") else 1))
    ledger.hold("KDA: output gate", at.T * P * A)
    ledger.spike("gated norm in fp32", 4 * at.T * P * W)
    ledger.hold("o_proj's input", at.T * P * A)
    _lora_spike(ledger, at, "o_proj", at.D)
    ledger.free("q, k and v projections", "padded q, k and v", "log decay, not padded")
    _keep_inputs(ledger, at, "o_proj", ("q_proj", "k_proj", "v_proj", "f_a_proj", "b_proj", "g_proj", "g_a_proj"))


def _kda_backward(ledger: Ledger, at: Local) -> None:
    H, K = at.kda_heads, at.cfg.kda_head_dim
    P, length = H * K, -(-at.length // CHUNK) * CHUNK
    padded = at.N * length
    ledger.spike("gradient through o_proj", at.T * (P + 2 * at.D) * A)
    ledger.hold("gradient of the normed output", at.T * P * A)
    ledger.free("o_proj's input")
    ledger.spike("gradient of the gated norm in fp32", 5 * at.T * P * W)
    ledger.hold("gradients of output and gate", 2 * at.T * P * A)
    ledger.free("gradient of the normed output", "KDA: output gate", "KDA: output, not padded")
    ledger.hold("gradient into attention", at.T * at.D * A)
    ledger.free("gradients of output and gate")
    ledger.hold("gradient of the output", padded * P * A)
    ledger.hold("gradients of q, k, v and log decay", padded * (3 * P * A + (P + H) * W))
    segment, _ = _recurrence(at, H)
    ledger.spike("recurrence of a segment, backward", segment[1])
    ledger.free("gradient of the output", "KDA: output of the recurrence", "KDA: kept of the recurrence")
    ledger.free("KDA: normed q and k")
    ledger.spike("normalisation's gradient in fp32", 4 * padded * P * W)
    ledger.free("KDA: q and k in fp32")
    ledger.spike("gate's gradient in fp32", 2 * at.T * P * W)
    ledger.free("KDA: raw gate", "KDA: log decay and write strength", "gradients of q, k, v and log decay")
    ledger.free("KDA: convolution's output")
    ledger.hold("gradient of the convolution's output", padded * 3 * P * A)
    ledger.spike("convolution's gradient in fp32", padded * 4 * 3 * P * W)
    ledger.free("gradient of the convolution's output", "KDA: convolution's input")
    ledger.spike("gradients of q, k and v projections", at.T * (2 * 3 * P + P + 2 * at.D) * A)
    ledger.free("gradient into attention")


def _recurrence(at: Local, heads: int) -> tuple[tuple[float, float], float]:
    """((one segment's forward, its backward), what is kept between the two) of the chunked recurrence."""
    K = at.cfg.kda_head_dim
    split = is_split(at.cfg.gate_lower_bound, CHUNK)
    length = -(-at.length // CHUNK) * CHUNK
    per_token = kda._largest_per_token(K, K, CHUNK, split) * W * heads
    num_sequences, num_tokens = kda.segment_shape(at.N, length, CHUNK, per_token)
    unit = num_sequences * num_tokens * heads * K * W
    states, decays = unit * K / CHUNK, 0.0 if split else CHUNK * unit
    if (num_sequences, num_tokens) == (at.N, length):
        kept = WHOLE_KEPT * unit + states + WHOLE_DECAYS_KEPT * decays
        return (WHOLE_FORWARD * unit, WHOLE_BACKWARD * unit + WHOLE_DECAYS_BACKWARD * decays), kept
    forward = SEGMENT_FORWARD * unit + states + SEGMENT_DECAYS_FORWARD * decays
    own = SEGMENT_BACKWARD if split else SEGMENT_BACKWARD_UNSPLIT
    backward = own * unit + states + SEGMENT_DECAYS_BACKWARD * decays
    segments = -(-at.N // num_sequences) * -(-length // num_tokens)
    return (forward, backward), segments * num_sequences * heads * K * K * W


def _keep_inputs(ledger: Ledger, at: Local, out: str, into: tuple[str, ...]) -> None:
    """Of a sublayer's own input and output projections' inputs, those that no gradient needs are gone."""
    if not at.trains(out):
        ledger.free(f"{out}'s input")
    if not at.trains(*into):
        ledger.free("attention's normed input")


def _mla_forward(ledger: Ledger, at: Local) -> None:
    cfg, H = at.cfg, at.mla_heads
    X, V = cfg.qk_nope_head_dim + cfg.qk_rope_head_dim, cfg.v_head_dim
    padded = at.N * at.length
    is_padded = padded != at.T
    if cfg.q_lora_rank is not None:
        ledger.hold("MLA: latent queries", at.T * cfg.q_lora_rank * A * (2 if at.trains("q_b_proj") else 1))
    ledger.spike("queries", at.T * H * X * A * (3 if at.trains("q_proj", "q_b_proj") else 1))
    ledger.hold("MLA: queries", padded * H * X * A)
    ledger.hold("queries, not padded", at.T * H * X * A if is_padded else 0)
    ledger.hold("MLA: latent rows", 3 * padded * (cfg.kv_lora_rank + cfg.qk_rope_head_dim) * A)
    ledger.spike("keys and values", padded * H * (cfg.qk_nope_head_dim + V) * A * (3 if at.trains("kv_b_proj") else 1))
    ledger.hold("keys and values", padded * H * (cfg.qk_nope_head_dim + V) * A)
    ledger.hold("MLA: keys and padded values", 2 * padded * H * X * A)
    ledger.hold("MLA: output of the attention", padded * H * (X * A + W))
    ledger.hold("MLA: output", at.T * H * V * A)
    if cfg.mla_use_output_gate:
        ledger.spike("g_proj", at.T * H * V * A * (3 if "g_proj" in at.targets else 1))
        ledger.hold("MLA: output gate", at.T * H * V * A)
        ledger.hold("o_proj's input", at.T * H * V * A)
        _lora_spike(ledger, at, "o_proj", at.D)
        _keep_inputs(ledger, at, "o_proj", ("q_proj", "q_a_proj", "kv_a_proj_with_mqa", "g_proj"))
    else:
        _lora_spike(ledger, at, "o_proj", at.D)
        _keep_inputs(ledger, at, "", ("q_proj", "q_a_proj", "kv_a_proj_with_mqa"))
        if not at.trains("o_proj"):
            ledger.free("MLA: output")
    ledger.free("queries, not padded", "keys and values")


def _mla_backward(ledger: Ledger, at: Local) -> None:
    cfg, H = at.cfg, at.mla_heads
    X, V = cfg.qk_nope_head_dim + cfg.qk_rope_head_dim, cfg.v_head_dim
    padded = at.N * at.length
    ledger.hold("gradient of the output", at.T * H * V * A)
    ledger.spike("gradient through o_proj", at.T * (H * V + at.D) * A)
    if cfg.mla_use_output_gate:
        ledger.free("o_proj's input")
        ledger.spike("gradient of the gate", 3 * at.T * H * V * A)
        ledger.free("MLA: output gate")
    ledger.free("MLA: output")
    ledger.hold("gradient of the attention's output", padded * H * X * A)
    ledger.free("gradient of the output")
    ledger.hold("gradients of q, k and v", 3 * padded * H * X * A)
    ledger.spike("gradient of q in fp32", padded * H * (X + 1) * W)
    ledger.free("gradient of the attention's output", "MLA: queries", "MLA: keys and padded values")
    ledger.free("MLA: output of the attention")
    ledger.spike("gradient of keys and values", padded * H * (2 * cfg.qk_nope_head_dim + 2 * V) * A)
    ledger.free("gradients of q, k and v")
    ledger.spike("gradients of the projections", at.T * (2 * H * X + 3 * at.D) * A)
    ledger.free("MLA: latent rows", "MLA: latent queries")


def _moe_forward(ledger: Ledger, at: Local) -> None:
    cfg, k = at.cfg, at.cfg.num_experts_per_token
    R, F, rows = cfg.routed_expert_hidden_size or at.D, at.expert_width, at.T * k
    ledger.spike("router in fp32", at.T * (at.D + 2 * cfg.num_experts) * W)
    ledger.hold("router's scores", at.T * cfg.num_experts * W)
    ledger.hold("routes", rows * (W + 3 * INDEX))
    if cfg.routed_expert_hidden_size is not None:
        ledger.hold("experts' input", at.T * R * A)
    if at.is_dispatched:
        ledger.hold("dispatched rows", rows * R * A)
    ledger.hold("experts: rows in", rows * R * A)
    ledger.hold("experts: gate and up", 2 * rows * F * A)
    ledger.spike("activation", rows * 2 * F * A)
    ledger.hold("experts: hidden", rows * F * A)
    ledger.hold("experts: rows out", rows * R * A)
    ledger.hold("experts: results by token", rows * R * A)
    if at.is_dispatched:
        ledger.spike("combined rows", rows * R * A)
    ledger.hold("sum over experts", at.T * R * W)
    ledger.spike("sum over experts", at.T * R * W)
    ledger.free("experts: rows out", "sum over experts", "dispatched rows", "experts' input")
    if not at.trains("w1", "w3"):
        ledger.free("experts: rows in")
    if not at.trains("w2"):
        ledger.free("experts: hidden")
    if cfg.routed_expert_hidden_size is not None:
        ledger.hold("latent sum", at.T * R * A * (2 if at.trains("routed_expert_up_proj") else 1))
        if at.trains("routed_expert_down_proj"):
            ledger.hold("experts' input", at.T * R * A)
    if cfg.num_shared_experts:
        ledger.hold("routed result", at.T * at.D * A)
        _mlp_forward(ledger, at, "shared experts", at.shared_width)
        ledger.free("routed result")


def _moe_backward(ledger: Ledger, at: Local) -> None:
    cfg, k = at.cfg, at.cfg.num_experts_per_token
    R, F, rows = cfg.routed_expert_hidden_size or at.D, at.expert_width, at.T * k
    if cfg.num_shared_experts:
        _mlp_backward(ledger, at, "shared experts", at.shared_width)
        ledger.hold("gradient into the MLP", at.T * at.D * A)
    if cfg.routed_expert_hidden_size is not None:
        ledger.hold("gradient of the latent sum", at.T * R * A)
        ledger.spike("norm's gradient in fp32", 3 * at.T * R * W)
        ledger.free("latent sum")
    ledger.hold("gradient in fp32", at.T * R * W)
    ledger.spike("gradient of the weights", at.T * R * W)
    ledger.hold("gradient of rows out", rows * R * A)
    if at.is_dispatched:
        ledger.hold("dispatched gradients", rows * R * A)
    ledger.hold("gradient of hidden", rows * F * A)
    ledger.hold("gradients of gate and up", 2 * rows * F * A)
    if cfg.hidden_act == "situ":
        ledger.spike("SiTU in fp32", 6 * min(MAX_WIDE, rows * F) * W)
    else:
        ledger.spike("activation's gradient", rows * F * A)
    ledger.hold("gradient of rows in", rows * R * A)
    ledger.hold("gradient by token", rows * R * A)
    ledger.spike("gradient of the experts' input", at.T * R * A)
    ledger.free("gradient by token", "gradient of rows in", "gradients of gate and up", "gradient of hidden")
    ledger.free("gradient of rows out", "gradient in fp32", "dispatched gradients", "experts: results by token")
    ledger.free("experts: rows in", "experts: hidden", "experts: gate and up", "experts' input")
    ledger.spike("router's gradient", at.T * (3 * cfg.num_experts + at.D) * W)
    ledger.free("router's scores", "routes", "gradient of the latent sum", "gradient into the MLP")


def _mlp_forward(ledger: Ledger, at: Local, name: str, width: int) -> None:
    ledger.hold(f"{name}: gate and up", 2 * at.T * width * A)
    for proj in ("gate_proj", "up_proj"):
        if proj in at.targets:
            ledger.spike(proj, 2 * at.T * width * A)
    if at.cfg.hidden_act == "situ":
        ledger.spike("SiTU in fp32", at.T * width * 6 * W)
    else:
        ledger.hold(f"{name}: activated gate", at.T * width * A)
    ledger.hold(f"{name}: hidden", at.T * width * A)
    _lora_spike(ledger, at, "down_proj", at.D)
    if not at.trains("down_proj"):
        ledger.free(f"{name}: hidden")


def _mlp_backward(ledger: Ledger, at: Local, name: str, width: int) -> None:
    ledger.hold("gradient of hidden", at.T * width * A)
    if "down_proj" in at.targets:
        ledger.spike("down_proj", at.T * width * A)
    ledger.free(f"{name}: hidden")
    if at.cfg.hidden_act == "situ":
        ledger.spike("SiTU's gradient in fp32", at.T * width * (6 * W + A))
        ledger.hold("gradients of gate and up", 2 * at.T * width * A)
        ledger.free("gradient of hidden")
    else:
        ledger.hold("gradients of gate and up", 2 * at.T * width * A)
        ledger.free("gradient of hidden", f"{name}: activated gate")
        ledger.spike("gradient of the gate", at.T * width * A)
    ledger.free(f"{name}: gate and up")
    ledger.spike("gradient into the MLP", 2 * at.T * at.D * A)
    ledger.free("gradients of gate and up")
