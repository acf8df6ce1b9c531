"""DP prefill pairing: ranks that share experts hold their prefills for a bounded time, so that they prefill together.

Pure decisions on reduced integers, free of torch; only `ranks` (imported by name) talks to other processes.
"""

from k3core.rollout.prefill_pairing.counts import GroupCounts, PairingState, RankCounts, broken_group, reduce_counts
from k3core.rollout.prefill_pairing.decide import Limits, Reason, Verdict, decide

__all__ = [
    "GroupCounts",
    "Limits",
    "PairingState",
    "RankCounts",
    "Reason",
    "Verdict",
    "broken_group",
    "decide",
    "reduce_counts",
]
