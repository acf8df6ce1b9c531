"""Which sampling parameters make sense, and which a trainer can follow. Torch-free, so that a configuration can ask."""

from __future__ import annotations

import math

from k3core.types import SamplingParams


def problems(params: SamplingParams) -> list[str]:
    """One line for each bad value: the key, the value, and what to use. Empty when all are good."""
    p = params
    found: list[str] = []
    if not (math.isfinite(p.temperature) and p.temperature >= 0):
        found.append(f"temperature {p.temperature}: use a positive number, or 0 for the likeliest token")
    if not 0 < p.top_p <= 1:
        found.append(f"top_p {p.top_p}: use a share above 0 and at most 1, which is off")
    if p.top_k < 0:
        found.append(f"top_k {p.top_k}: use a positive count, or 0, which is off")
    if not 0 <= p.min_p < 1:
        found.append(f"min_p {p.min_p}: use a share of at least 0, which is off, and below 1")
    if p.max_tokens < 1:
        found.append(f"max_tokens {p.max_tokens}: use at least 1")
    stop_as_given: object = p.stop  # from a hand-written configuration, perhaps
    if isinstance(stop_as_given, str):
        found.append(f"stop {p.stop!r}: use a tuple of strings")
    else:
        found += [problem for stop in p.stop if (problem := _stop_problem(stop))]
    found += [
        f"stop_token_ids {token}: use ids of the vocabulary, which start at 0"
        for token in p.stop_token_ids
        if token < 0
    ]
    return found


def _stop_problem(stop: str) -> str | None:
    if not stop:
        return "stop '': the empty string is in every text; leave it out"
    try:
        stop.encode()
    except UnicodeEncodeError:
        return f"stop {stop!r}: half a surrogate pair has no UTF-8 bytes; leave it out"
    return None


def truncates(params: SamplingParams) -> bool:
    """Whether some tokens may be left out of the distribution."""
    return params.temperature == 0 or params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def reproducible(params: SamplingParams, supports_recorded: bool = False) -> str | None:
    """Why a trainer could not compute the distribution that tokens were drawn from; None when it can.

    supports_recorded: each token's trajectory holds the ids that truncation kept (`Draws.supports`). Stops never
    matter: they end a turn and change no probability.
    """
    if found := problems(params):
        return "; ".join(found)
    if params.temperature == 0:
        return (
            "temperature 0: every drawn token has probability 1 whatever the weights, so there is no gradient; "
            "use a positive temperature"
        )
    cuts = [
        f"{key} {getattr(params, key)}"
        for key, cut in (("top_p", params.top_p < 1), ("top_k", params.top_k > 0), ("min_p", params.min_p > 0))
        if cut
    ]
    if cuts and not supports_recorded:
        return (
            f"{', '.join(cuts)}: without the kept tokens the trainer's logprobs are over the whole vocabulary, and the "
            "ratio is not 1 at equal weights; use top_p 1, top_k 0 and min_p 0, or record the supports"
        )
    return None
