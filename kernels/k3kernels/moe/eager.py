"""Experts over tokens sorted by expert, with hand-written backward: only gathers, no scatter-add.

Every token's k results are added in slot order and no GEMM is narrower than MIN_ROWS, so a token's result does not
depend on what else is in the batch. Rows lie in the activation's type, T k of them; what is wider is made for a slot
or a chunk of rows at a time. One expert's matrix is looked at a time, so packed ones are unpacked one by one, in the
backward pass again.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from k3kernels.dtypes import at_least_fp32
from k3kernels.moe.matrices import NO_LORA, ExpertLora, Matrices
from k3kernels.situ.eager import situ_backward, situ_forward

MIN_ROWS = 16  # a BLAS multiplies a few rows by other kernels than many, and those sum in another order
MAX_DENSE_ROWS = 1024  # rows of all experts together, up to which computing all costs less than telling them apart
MAX_WIDE = 1 << 22  # elements of a chunk of SiTU in fp32, of which a few are alive at once

Span = tuple[int, int, int]  # expert, first row, row after the last
Betas = tuple[float, float | None]


def moe_experts(
    x_TR: Tensor,
    experts_Tk: Tensor,
    weights_Tk: Tensor,
    w1_EFR: Matrices,
    w3_EFR: Matrices,
    w2_ERF: Matrices,
    situ_betas: Betas | None,
    lora: ExpertLora = NO_LORA,
) -> Tensor:
    """See the reference. Gradients are computed for what requires one. Raises ValueError for an expert beyond E."""
    if (
        not torch.is_grad_enabled()
        and x_TR.device.type == "cpu"
        and x_TR.dtype != torch.float64  # whose products round by their shapes
        and MIN_ROWS <= x_TR.shape[0] <= MAX_DENSE_ROWS // w1_EFR.shape[0]
        and lora == NO_LORA
        and isinstance(w1_EFR, Tensor)
        and isinstance(w3_EFR, Tensor)
        and isinstance(w2_ERF, Tensor)
    ):
        return _by_all_experts(x_TR, experts_Tk, weights_Tk, w1_EFR, w3_EFR, w2_ERF, situ_betas)
    factors = [tensor for pair in lora for tensor in ((None, None) if pair is None else (pair.A_ErI, pair.B_EOr))]
    scales = tuple(0.0 if pair is None else pair.scale for pair in lora)
    out: Tensor = _Experts.apply(experts_Tk, situ_betas, scales, x_TR, weights_Tk, w1_EFR, w3_EFR, w2_ERF, *factors)
    return out


def _by_all_experts(
    x_TR: Tensor,
    experts_Tk: Tensor,
    weights_Tk: Tensor,
    w1_EFR: Tensor,
    w3_EFR: Tensor,
    w2_ERF: Tensor,
    situ_betas: Betas | None,
) -> Tensor:
    """A few rows times every expert's matrices, of which the chosen ones are taken: three products instead of 3 E.

    Each is as wide as that of one expert alone and at least MIN_ROWS high, so its rows are summed alike.
    """
    (T, k), E = experts_Tk.shape, w1_EFR.shape[0]
    places = (experts_Tk * T + torch.arange(T, device=x_TR.device).unsqueeze(-1)).flatten()  # of E T rows
    x_ETR = x_TR.expand(E, -1, -1)
    try:
        gate, up = ((x_ETR @ w.mT).flatten(0, 1).index_select(0, places) for w in (w1_EFR, w3_EFR))
    except IndexError:
        raise _unknown_expert(E) from None
    h, _ = _activate(gate, up, situ_betas)
    h_ETF = h.new_zeros(E * T, h.shape[1]).index_copy_(0, places, h).view(E, T, -1)
    y_ETR = h_ETF @ w2_ERF.mT
    return _weighted(y_ETR.flatten(0, 1).index_select(0, places).view(T, k, -1), weights_Tk).to(x_TR.dtype)


def _weighted(y_TkR: Tensor, weights_Tk: Tensor) -> Tensor:
    """The sum over the k, slot after slot, in at least fp32."""
    wide = at_least_fp32(y_TkR.dtype)
    weights = weights_Tk.to(wide)
    out = y_TkR[:, 0].to(wide) * weights[:, :1]
    for slot in range(1, weights.shape[1]):
        out.addcmul_(y_TkR[:, slot].to(wide), weights[:, slot : slot + 1])
    return out


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, experts, situ_betas, scales, x, weights, w1, w3, w2, A1, B1, A3, B3, A2, B2):  # type: ignore[no-untyped-def]
        T, k = experts.shape
        in_order, order = torch.sort(experts.flatten(), stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(T * k, device=order.device)
        spans = _spans(in_order, w1.shape[0])
        gate_proj, up_proj = _Projection(w1, A1, B1, scales[0]), _Projection(w3, A3, B3, scales[1])
        down_proj = _Projection(w2, A2, B2, scales[2])
        xs = x.index_select(0, order // k)
        gate, up = xs.new_empty(T * k, w1.shape[1]), xs.new_empty(T * k, w3.shape[1])
        for span in spans:
            gate_proj.forward(xs, span, gate)
            up_proj.forward(xs, span, up)
        h, saved = _activate(gate, up, situ_betas)
        ys = torch.empty_like(xs)
        for span in spans:
            down_proj.forward(h, span, ys)
        y_TkR = ys.index_select(0, inverse).view(T, k, ys.shape[1])
        out = _weighted(y_TkR, weights)

        _, needs_weights, needs_w1, needs_w3, needs_w2, *needs_factors = ctx.needs_input_grad[3:]
        ctx.save_for_backward(
            xs if needs_w1 or needs_w3 or any(needs_factors[:4]) else None,
            h if needs_w2 or any(needs_factors[4:]) else None,
            y_TkR if needs_weights else None,
            *(weights, order, inverse, A1, B1, A3, B3, A2, B2),
            *(w if isinstance(w, Tensor) else None for w in (w1, w3, w2)),
            *saved,
        )
        ctx.packed = [None if isinstance(w, Tensor) else w for w in (w1, w3, w2)]
        ctx.spans, ctx.situ_betas, ctx.scales = spans, situ_betas, scales
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        xs, h, y_TkR, weights, order, inverse, A1, B1, A3, B3, A2, B2, *rest = ctx.saved_tensors
        w1, w3, w2 = (w if packed is None else packed for w, packed in zip(rest[:3], ctx.packed, strict=True))
        needs_x, needs_weights, needs_w1, needs_w3, needs_w2, *needs_factors = ctx.needs_input_grad[3:]
        gate_proj = _Projection(w1, A1, B1, ctx.scales[0], (needs_w1, *needs_factors[:2]))
        up_proj = _Projection(w3, A3, B3, ctx.scales[1], (needs_w3, *needs_factors[2:4]))
        down_proj = _Projection(w2, A2, B2, ctx.scales[2], (needs_w2, *needs_factors[4:]))
        T, k = weights.shape

        grad_x = grad_weights = None
        if needs_weights:
            wide = at_least_fp32(grad.dtype)
            grad_wide = grad.to(wide)
            slots = [(grad_wide * y_TkR[:, slot].to(wide)).sum(-1) for slot in range(k)]
            grad_weights = torch.stack(slots, 1).to(weights.dtype)
        # Rounded once: the product is computed in the wider type of its two factors.
        grad_ys = grad.index_select(0, order // k).mul_(weights.flatten().index_select(0, order).unsqueeze(1))
        needs_h = needs_x or gate_proj.needs_any or up_proj.needs_any
        grad_h = grad_ys.new_empty(T * k, w2.shape[2]) if needs_h else None
        for span in ctx.spans:
            down_proj.backward(grad_ys, h, span, grad_h)
        if grad_h is not None:
            grad_gate, grad_up = _activate_backward(grad_h, rest[3:], ctx.situ_betas)
            grad_xs = torch.empty_like(grad_ys) if needs_x else None
            for span in ctx.spans:
                gate_proj.backward(grad_gate, xs, span, grad_xs)
                up_proj.backward(grad_up, xs, span, grad_xs, adds=True)
            if grad_xs is not None:
                grad_x = grad_xs.index_select(0, inverse).view(T, k, grad_xs.shape[1]).sum(1)
        return (
            *(None, None, None, grad_x, grad_weights, gate_proj.grad_w, up_proj.grad_w, down_proj.grad_w),
            *(gate_proj.grad_A, gate_proj.grad_B, up_proj.grad_A, up_proj.grad_B, down_proj.grad_A, down_proj.grad_B),
        )


class _Projection:
    """y = x W_e^T + scale (x A_e^T) B_e^T for the rows of one expert e at a time.

    needs: whether W, A and B each get a gradient; they are zero where an expert has no rows.
    W_e is used where it is made and not bound to a name: the next one would be made while it is still held.
    """

    def __init__(
        self,
        w_EOI: Matrices,
        A_ErI: Tensor | None,
        B_EOr: Tensor | None,
        scale: float,
        needs: tuple[bool, bool, bool] = (False, False, False),
    ) -> None:
        self.w, self.A, self.B, self.scale = w_EOI, A_ErI, B_EOr, scale
        self.needs_any = any(needs)
        self.grad_w = torch.zeros_like(w_EOI) if needs[0] and isinstance(w_EOI, Tensor) else None
        self.grad_A = torch.zeros_like(A_ErI) if needs[1] and A_ErI is not None else None
        self.grad_B = torch.zeros_like(B_EOr) if needs[2] and B_EOr is not None else None

    def forward(self, x: Tensor, span: Span, y: Tensor) -> None:
        """Computed with neighbouring rows where the expert has fewer than MIN_ROWS."""
        e, a, b = span
        if b - a >= MIN_ROWS or x.shape[0] < MIN_ROWS:
            torch.mm(x[a:b], self.w[e].T, out=y[a:b])
            if self.A is not None:
                self._add_branch(x[a:b], e, y[a:b])
        else:
            start = min(a, x.shape[0] - MIN_ROWS)
            x_near = x[start : start + MIN_ROWS]
            y_near = x_near @ self.w[e].T
            if self.A is not None:
                self._add_branch(x_near, e, y_near)
            y[a:b] = y_near[a - start : b - start]

    def _add_branch(self, x: Tensor, e: int, y: Tensor) -> None:
        assert self.A is not None
        assert self.B is not None
        y.addmm_(x @ self.A[e].to(x.dtype).T, self.B[e].to(x.dtype).T, alpha=self.scale)

    def backward(self, grad_y: Tensor, x: Tensor | None, span: Span, grad_x: Tensor | None, adds: bool = False) -> None:
        """The gradient of x goes into grad_x, or on top of what is there. x is None where nothing needs_any."""
        e, a, b = span
        grad = grad_y[a:b]
        if grad_x is not None and adds:
            grad_x[a:b].addmm_(grad, self.w[e])
        elif grad_x is not None:
            torch.mm(grad, self.w[e], out=grad_x[a:b])
        if self.grad_w is not None:
            assert x is not None
            torch.mm(grad.T, x[a:b], out=self.grad_w[e])
        if self.A is None or self.B is None:
            return
        A_rI, B_Or = self.A[e].to(grad.dtype), self.B[e].to(grad.dtype)
        grad_z = (grad @ B_Or).mul_(self.scale)
        if grad_x is not None:
            grad_x[a:b].addmm_(grad_z, A_rI)
        if self.grad_A is not None:
            assert x is not None
            self.grad_A[e] = grad_z.T @ x[a:b]
        if self.grad_B is not None:
            assert x is not None
            self.grad_B[e] = grad.T @ (x[a:b] @ A_rI.T).mul_(self.scale)


def _activate(gate: Tensor, up: Tensor, situ_betas: Betas | None) -> tuple[Tensor, list[Tensor]]:
    """The value, and what its backward needs: of narrow types the inputs alone, a third of what SiTU has in fp32."""
    if situ_betas is None:
        return F.silu(gate) * up, [gate, up]
    if at_least_fp32(gate.dtype) == gate.dtype:
        h, *saved = situ_forward(gate, up, *situ_betas)
        return h, saved
    h = torch.empty_like(gate)
    for rows in _chunks(gate):
        h[rows] = situ_forward(gate[rows], up[rows], *situ_betas)[0]
    return h, [gate, up]


def _activate_backward(grad_h: Tensor, saved: list[Tensor], situ_betas: Betas | None) -> tuple[Tensor, Tensor]:
    if situ_betas is None:
        gate, up = saved
        return torch.ops.aten.silu_backward(grad_h * up, gate), grad_h * F.silu(gate)
    if at_least_fp32(grad_h.dtype) == grad_h.dtype:
        t, s, tau = saved
        return situ_backward(grad_h, t, s, tau, *situ_betas)
    gate, up = saved
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    for rows in _chunks(gate):
        _, t, s, tau = situ_forward(gate[rows], up[rows], *situ_betas)
        grad_gate[rows], grad_up[rows] = situ_backward(grad_h[rows], t, s, tau, *situ_betas)
    return grad_gate, grad_up


def _chunks(x: Tensor) -> list[slice]:
    step = max(1, MAX_WIDE // max(1, x.shape[1]))
    return [slice(start, start + step) for start in range(0, x.shape[0], step)]


def _spans(in_order: Tensor, num_experts: int) -> list[Span]:
    """The rows of every expert that has any. The one place where the host waits for the device."""
    edges = torch.searchsorted(in_order, torch.arange(num_experts + 1, device=in_order.device)).tolist()
    if edges[0] != 0 or edges[-1] != in_order.numel():
        raise _unknown_expert(num_experts)
    return [(e, a, b) for e, (a, b) in enumerate(pairwise(edges)) if b > a]


def _unknown_expert(num_experts: int) -> ValueError:
    return ValueError(
        f"a token is routed to an expert that is not one of this layer's {num_experts}: were the routes recorded with "
        "another model?"
    )
