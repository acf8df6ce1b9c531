"""Batch: trajectories packed for the trainer. The only noun that needs torch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from k3core.rollout.sampling_rules import reproducible
from k3core.types import Trajectory
from k3kernels.packing import Packing


@dataclass(frozen=True)
class Batch:
    """One micro-batch of N packed sequences, T tokens, M of them trained (sampled by the policy).

    target_M: index in 0..T-1 of each trained token; it is predicted at target_M - 1. seq_M its sequence.
    rollout_logprobs_M, policy_step_M, advantages_N as recorded; replay_TLk the recorded experts, -1 where there are none,
    or None; routed_layers names its layers.
    supports_M: the token ids that each trained token was drawn among, None for the whole vocabulary; None where all are.
    order_N: place of each sequence in the list that the batch was made from.
    """

    tokens_T: Tensor
    packing: Packing
    target_M: Tensor
    rollout_logprobs_M: Tensor
    policy_step_M: Tensor
    advantages_N: Tensor
    replay_TLk: Tensor | None
    routed_layers: tuple[str, ...]
    order_N: tuple[int, ...]
    temperature: float
    supports_M: tuple[np.ndarray | None, ...] | None = None

    @property
    def seq_M(self) -> Tensor:
        return self.packing.seq_T[self.target_M]

    def to(self, device: torch.device) -> Batch:
        return replace(
            self,
            tokens_T=self.tokens_T.to(device),
            packing=Packing(self.packing.lengths, device),
            target_M=self.target_M.to(device),
            rollout_logprobs_M=self.rollout_logprobs_M.to(device),
            policy_step_M=self.policy_step_M.to(device),
            advantages_N=self.advantages_N.to(device),
            replay_TLk=None if self.replay_TLk is None else self.replay_TLk.to(device),
        )


def make_batch(
    trajectories: Sequence[Trajectory], advantages: Sequence[float], order: Sequence[int], router_replay: bool
) -> Batch:
    """Pack whole trajectories. Raises ValueError where a trajectory's arrays do not fit its tokens, and where the
    distribution that its tokens were drawn from cannot be computed again.

    Routes are never shifted or guessed: a position without a recorded route re-routes by itself (-1).
    """
    assert len(trajectories) == len(advantages) == len(order)
    for t in trajectories:
        _check(t)
    temperatures = {t.sampling.temperature for t in trajectories}
    if len(temperatures) != 1:
        raise ValueError(f"trajectories sampled at different temperatures {sorted(temperatures)} in one batch")
    packing = Packing(tuple(len(t.tokens_T) for t in trajectories))
    mask_T = np.concatenate([t.loss_mask_T for t in trajectories])
    replay_TLk = None
    if router_replay:
        _check_routes(trajectories)
        routes = np.concatenate([t.routed_experts_TLk for t in trajectories])
        missing = np.iinfo(routes.dtype).max
        replay_TLk = torch.from_numpy(np.where(routes == missing, -1, routes.astype(np.int64)))
    return Batch(
        tokens_T=torch.from_numpy(np.concatenate([t.tokens_T for t in trajectories]).astype(np.int64)),
        packing=packing,
        target_M=torch.from_numpy(mask_T.nonzero()[0]),
        rollout_logprobs_M=torch.from_numpy(np.concatenate([t.rollout_logprobs_T for t in trajectories])[mask_T]),
        policy_step_M=torch.from_numpy(np.concatenate([t.policy_step_T for t in trajectories])[mask_T]),
        advantages_N=torch.tensor(advantages, dtype=torch.float32),
        replay_TLk=replay_TLk,
        routed_layers=trajectories[0].routed_layers if router_replay else (),
        order_N=tuple(order),
        temperature=temperatures.pop(),
        supports_M=_supports(trajectories),
    )


def microbatches(
    trajectories: Sequence[Trajectory], advantages: Sequence[float], rows: int, router_replay: bool
) -> list[Batch]:
    """At most `rows` sequences each, sorted by length so that little is padded; the sort is stable."""
    by_length = sorted(range(len(trajectories)), key=lambda i: len(trajectories[i].tokens_T))
    batches = []
    for start in range(0, len(by_length), rows):
        order = by_length[start : start + rows]
        batches.append(
            make_batch([trajectories[i] for i in order], [advantages[i] for i in order], order, router_replay)
        )
    return batches


def batch_sha256(trajectories: Sequence[Trajectory], advantages: Sequence[float]) -> str:
    """Identity of an update's data, for the ledger: every token, mask, logprob, support, route and advantage."""
    digest = hashlib.sha256()
    for t, advantage in zip(trajectories, advantages, strict=True):
        digest.update(f"{t.prompt_id}/{t.sample}/{advantage!r}/{len(t.tokens_T)}\n".encode())
        for array in (t.tokens_T, t.loss_mask_T, t.rollout_logprobs_T, t.routed_experts_TLk):
            digest.update(np.ascontiguousarray(array).tobytes())
        if t.supports is not None:
            digest.update(np.ascontiguousarray(t.supports.counts_T).tobytes())
            digest.update(np.ascontiguousarray(t.supports.ids_K).tobytes())
    return digest.hexdigest()


def _check(t: Trajectory) -> None:
    T = len(t.tokens_T)
    for name in ("loss_mask_T", "rollout_logprobs_T", "routed_experts_TLk", "policy_step_T"):
        if len(getattr(t, name)) != T:
            raise ValueError(
                f"prompt {t.prompt_id} sample {t.sample}: {name} has {len(getattr(t, name))} rows, tokens {T}"
            )
    if T == 0 or t.loss_mask_T[0]:
        raise ValueError(f"prompt {t.prompt_id} sample {t.sample}: the first token must be context")
    if (reason := reproducible(t.sampling, t.supports is not None)) is not None:
        raise ValueError(f"prompt {t.prompt_id} sample {t.sample}: sampled with {reason}")
    if t.supports is not None:
        ids_K, counts_T = t.supports.ids_K, t.supports.counts_T
        if len(counts_T) != T or (counts_T[~t.loss_mask_T] != 0).any() or counts_T.sum() != len(ids_K):
            raise ValueError(
                f"prompt {t.prompt_id} sample {t.sample}: supports of {len(counts_T)} positions with {counts_T.sum()} ids, the"
                f" record has {T} tokens and {len(ids_K)} ids, and a token that was not sampled has none: it is torn"
            )


def _supports(trajectories: Sequence[Trajectory]) -> tuple[np.ndarray | None, ...] | None:
    supports: list[np.ndarray | None] = []
    for t in trajectories:
        if t.supports is None or len(t.supports.ids_K) == 0:
            supports += [None] * int(t.loss_mask_T.sum())
        else:  # what was not sampled has no ids
            supports += replace(t.supports, counts_T=t.supports.counts_T[t.loss_mask_T]).rows()
    return None if all(support is None for support in supports) else tuple(supports)


def _check_routes(trajectories: Sequence[Trajectory]) -> None:
    first, routed_layers = trajectories[0].routed_experts_TLk, trajectories[0].routed_layers
    for t in trajectories:
        routes = t.routed_experts_TLk
        if routes.shape[1:] != first.shape[1:] or routes.dtype != first.dtype:
            raise ValueError(
                f"prompt {t.prompt_id} sample {t.sample}: routed_experts_TLk is {routes.dtype} {routes.shape[1:]} a token,"
                f" others of its batch are {first.dtype} {first.shape[1:]}: one engine must have made them all"
            )
        if t.routed_layers != routed_layers or len(routed_layers) != routes.shape[1]:
            raise ValueError(
                f"prompt {t.prompt_id} sample {t.sample}: routes of {routes.shape[1]} layers named {t.routed_layers},"
                f" others of its batch {routed_layers}: each layer's routes need its name"
            )
