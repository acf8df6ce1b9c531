"""What the terminal says of a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infra.config import RunConfig
from infra.report import size
from infra.stages.track import Tracked, tracking_uri


def iteration_line(tracked: Tracked, steps: int) -> str:
    """Reward of the rollouts, health of the update, size of the publication; evaluation and decision when there was one."""
    m = tracked.metrics
    parts = [f"step {tracked.step:>3}/{steps}"]
    if "rollout/reward" in m:
        parts.append(f"reward {m['rollout/reward']:.3f}  all-pass {m['rollout/all_pass']:.2f}")
        groups = sum(value for name, value in m.items() if name.startswith("groups/") and "trajectories" not in name)
        parts.append(f"groups {m['groups/kept']:.0f}/{groups:.0f}")
    if "gspo/clip_fraction" in m:
        parts.append(f"clip {m['gspo/clip_fraction']:.1%}")
    if "drift/numeric/abs_max" in m:
        parts.append(f"drift {m['drift/numeric/abs_max']:.0e}")
    if "drift/stale/abs_mean" in m:
        parts.append(f"stale {m['drift/stale/tokens']:,.0f} tokens by {m['drift/stale/abs_mean']:.0e}")
    parts.append(f"{'delta' if 'publish/changed_fraction' in m else 'full'} {size(m['publish/bytes_payload'])}")
    if "eval/reward" not in m:
        return "  ".join(parts)
    parts.append(f"| eval {m['eval/reward']:.3f} ± {m['eval/reward_stderr']:.3f}  all-pass {m['eval/all_pass']:.2f}")
    return "  ".join(parts) + f"\n{'':12}{tracked.decision}"


def closing_lines(summary: Mapping[str, Any], folder: str, commands: Mapping[str, str]) -> str:
    """Before and after, the control arms, and where to look."""
    s = summary
    lines = [
        "",
        f"reward    {s['reward_before']:.3f} -> {s['reward_after']:.3f} ± {s['reward_stderr']:.3f}   after {s['updates']} updates",
        f"all-pass  {s['all_pass_before']:.3f} -> {s['all_pass_after']:.3f}",
    ]
    for name, key in (("control arm", "control_reward_after"), ("expert-only arm", "expert_only_reward_after")):
        if s[key] is not None:
            lines.append(f"{name}: {s[key]:.3f}")
    lines += [
        f"drift before the first update: {_drift(s['drift_max_abs_step0'])}",
        f"bytes: full {size(s['bytes_full'])}, delta {size(s['bytes_delta_mean'])} on average",
        f"weights sha256 {s['weights_sha256']}",
        "",
        f"report:   {folder}/report.html",
        *(f"{name + ':':<9} {command}" for name, command in commands.items()),
    ]
    return "\n".join(lines)


def _drift(largest: float | None) -> str:
    return "not measured: no token of these weights" if largest is None else f"at most {largest:.1e} nat a token"


def ui_commands(cfg: RunConfig) -> dict[str, str]:
    """How to open the two UIs on what the run wrote. The shared embedded server ends with its last client."""
    bin_folder = Path(sys.executable).parent
    prefect, mlflow = _short(bin_folder / "prefect"), _short(bin_folder / "mlflow")
    own_server = os.environ.get("PREFECT_API_URL") if "K3_EMBEDDED_SERVER" not in os.environ else None
    home = f"PREFECT_HOME={_short(Path(os.environ['PREFECT_HOME']))} " if "PREFECT_HOME" in os.environ else ""
    start = f"{home}PREFECT_SERVER_ANALYTICS_ENABLED=false {prefect} server start   # then http://127.0.0.1:4200/runs"
    return {
        "Prefect": f"{own_server.removesuffix('/api')}/runs" if own_server else start,
        "MLflow": f"{mlflow} ui --backend-store-uri {tracking_uri(cfg)}   # then http://127.0.0.1:5000",
    }


def _short(path: Path) -> str:
    """As seen from here, where that is no longer."""
    relative = os.path.relpath(path)
    return relative if len(relative) < len(str(path)) else str(path)
