"""Other people's kernels for the same operations: how each is called, and FLA's tuning kept in a file.

    pip install fla-core==0.6.0 nvidia-cudnn-frontend==1.32.* apache-tvm-ffi

cuDNN's KDA for Hopper is compiled by NVRTC at its first call and needs CUDA's headers, not CUTLASS.

FLA tries every configuration of each kernel at the first call, for minutes. `save_tuned` writes what it chose, in FLA's
own format, and `use_tuned` has it loaded (FLA_CACHE_MODE=strict); a kernel without an entry is tuned as before.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TUNED = Path(__file__).parent / "peers_tuned" / "h200.json"
SHARDS = 9  # processes that compile at once: half of them wait for the driver

# q, k, v, f [T, H, 128] and beta's logits [T, H] in bf16, A_log [H] and dt_bias [H, 128] in fp32, cu_seqlens int32.
KdaForward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
# The same without cu_seqlens, a token a sequence, and the states [B, H, 128, 128] in fp32; o and the states after it.
KdaDecode = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
# rows [T, D], the keys' norm, the query, the norm of the output.
AttnRes = Callable[[Sequence[Tensor], Tensor, Tensor, Tensor], Tensor]


def load_fla_kda(lower_bound: float, scale: float) -> KdaForward:
    from fla.ops.kda import chunk_kda  # type: ignore[import-not-found]

    def run(q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, _: Tensor) -> Tensor:
        o, _state = chunk_kda(
            *(x.unsqueeze(0) for x in (q, k, v, f, b)),
            scale=scale,
            A_log=A_log,
            dt_bias=dt_bias.flatten(),
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            safe_gate=True,
            lower_bound=lower_bound,
        )
        return o.squeeze(0)

    return run


def load_fla_kda_decode(lower_bound: float, scale: float) -> KdaDecode:
    from fla.ops.kda import fused_recurrent_kda

    def run(
        q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        o, after = fused_recurrent_kda(
            *(x.unsqueeze(1) for x in (q, k, v, f, b)),
            scale=scale,
            A_log=A_log,
            dt_bias=dt_bias.flatten(),
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            lower_bound=lower_bound,
        )
        return o.squeeze(1), after

    return run


def load_fla_kda_layer(lower_bound: float, scale: float, eps: float) -> Callable[[Any], Tensor]:
    """Of bench_kda_layer's inputs, whose qkv is [3, T, H, 128]: convolution, KDA and gated norm as FLA's layer calls them."""
    from fla.modules.causal_conv1d import causal_conv1d  # type: ignore[import-not-found]
    from fla.modules.norm.fused_norm_gate import rms_norm_gated  # type: ignore[import-not-found]

    kda = load_fla_kda(lower_bound, scale)

    def run(x: Any) -> Tensor:
        T, H = x.b.shape
        convolved = [
            causal_conv1d(part.reshape(1, T, -1), weight=taps.reshape(-1, taps.shape[-1]), activation="silu")[0]
            for part, taps in zip(x.qkv.unbind(0), x.taps.unbind(0), strict=True)
        ]
        q, k, v = (part.view(T, H, -1) for part in convolved)
        o = kda(q, k, v, x.f, x.b, x.A_log, x.dt_bias, x.b)
        y: Tensor = rms_norm_gated(o, x.gate, x.norm, None, activation="sigmoid", eps=eps)
        return y

    return run


def load_cudnn_kda(lower_bound: float, scale: float) -> KdaForward:
    """Gate, norms and sigmoid inside; its kernel for Hopper has no backward in this form."""
    from cudnn.linear_attention import kimi_delta_attention  # type: ignore[import-not-found]

    def run(
        q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, cu_seqlens: Tensor
    ) -> Tensor:
        return kimi_delta_attention(
            *(q, k, v, f, b, cu_seqlens),
            scale=scale,
            a_log=A_log,
            dt_bias=dt_bias,
            use_qk_l2norm_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            safe_gate=True,
            gate_lower_bound=lower_bound,
        )[0]

    return run


def load_cudnn_kda_compiled_gate(lower_bound: float, scale: float) -> KdaForward:
    """Gate, norms and sigmoid by torch.compile, compiled for each length, around cuDNN's form that takes the log gate."""
    from cudnn.linear_attention import kimi_delta_attention

    from k3kernels.kda import kda_gate, l2_norm

    torch._dynamo.config.recompile_limit = 64  # a length, with and without gradients

    @torch.compile(dynamic=False)
    def prepare(
        q: Tensor, k: Tensor, f: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return l2_norm(q), l2_norm(k), kda_gate(f, A_log, dt_bias, lower_bound), torch.sigmoid(b.float())

    def run(
        q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, cu_seqlens: Tensor
    ) -> Tensor:
        unit_q, unit_k, g, beta = prepare(q, k, f, b, A_log, dt_bias)
        return kimi_delta_attention(unit_q, unit_k, v, g, beta, cu_seqlens, scale=scale)[0]

    return run


def run_fla_l2_norm(x_THK: Tensor) -> None:
    """The one kernel pair of FLA's KDA that is tuned for each length, forward and backward."""
    from fla.modules.norm.l2norm import l2norm  # type: ignore[import-not-found]

    leaf = x_THK.detach().requires_grad_()
    torch.autograd.grad(l2norm(leaf), leaf, torch.zeros_like(leaf))


def load_fla_attn_res(eps: float) -> AttnRes:
    from fla.ops.attnres import fused_attnres  # type: ignore[import-not-found]

    def run(rows: Sequence[Tensor], norm_D: Tensor, proj_D: Tensor, next_norm_D: Tensor) -> Tensor:
        return fused_attnres(proj_D, rows, norm_D, next_norm_D, rms_eps=eps)

    return run


def versions() -> dict[str, object]:
    """Of the peers that are installed."""
    found: dict[str, object] = {}
    for name in ("fla-core", "nvidia-cudnn-frontend"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def use_tuned(path: Path = TUNED) -> None:
    """Has FLA load its configurations from the file, if it is there. Before the first import of fla."""
    assert "fla" not in sys.modules, "fla reads FLA_CACHE_MODE when it is imported"
    if not path.exists():
        print(f"{path} is not there: FLA tunes itself at its first calls, for minutes", flush=True)
        return
    saved = json.loads(path.read_text())
    here = torch.cuda.get_device_name()
    if saved["device"] != here:
        raise ValueError(f"{path} was tuned on {saved['device']} and this is {here}: tune here, with --tuned elsewhere")
    folder = Path(tempfile.mkdtemp(prefix="fla_tuned_"))
    for name, kernel in saved["kernels"].items():
        (folder / f"{name}.json").write_text(json.dumps(kernel))
    os.environ |= {"FLA_CONFIG_DIR": str(folder), "FLA_CACHE_MODE": "strict"}


def save_tuned(path: Path) -> int:
    """Adds what FLA has chosen in this process to the file; the number of entries it then holds."""
    import triton

    saved: dict[str, Any] = {"device": torch.cuda.get_device_name(), "kernels": {}}
    if path.exists():
        saved = json.loads(path.read_text())
    for name, key, config in _chosen():
        kernel = saved["kernels"].setdefault(
            name, {"kernel_name": name, "triton_version": triton.__version__, "autotune_entries": {}}
        )
        kernel["autotune_entries"][_key_hash(key)] = {"autotune_key": list(key), "config": config}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(saved, indent=1, sort_keys=True) + "\n")
    return sum(len(kernel["autotune_entries"]) for kernel in saved["kernels"].values())


def tuned_here(path: Path = TUNED) -> list[str]:
    """FLA kernels with a choice that the file does not hold: this process tuned them itself."""
    kernels = json.loads(path.read_text())["kernels"] if path.exists() else {}
    return sorted(
        {name for name, key, _ in _chosen() if _key_hash(key) not in kernels.get(name, {}).get("autotune_entries", {})}
    )


def _chosen() -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """(kernel, key of its arguments, configuration) of everything FLA's autotuners hold."""
    if "fla" not in sys.modules:
        return []
    from fla.ops.utils.cache import CachedAutotuner  # type: ignore[import-not-found]

    tuners = [thing for thing in gc.get_objects() if type(thing) is CachedAutotuner]
    return [(t.kernel_name, key, config_to_json(config)) for t in tuners for key, config in t.cache.items()]


def _key_hash(key: tuple[Any, ...]) -> str:
    from fla.ops.utils.cache import AutotuneKey

    return AutotuneKey.key_hash(key)


def config_to_json(config: Any) -> dict[str, Any]:
    """A triton.Config as FLA reads it back."""
    names = ("kwargs", "num_warps", "num_stages", "num_ctas", "maxnreg", "ir_override")
    return {name: getattr(config, name, None) for name in names}


def compile_in_parallel(script: Path, arguments: Sequence[str]) -> None:
    """Runs `script shard i SHARDS arguments` SHARDS times at once; what they compile lies in Triton's cache afterwards.

    A shard that fails costs time later, nothing else: its configurations are compiled when they are tried. Raises
    ValueError without a GPU.
    """
    if not torch.cuda.is_available():
        raise ValueError("no GPU here: FLA's configurations are chosen on one")
    commands = [[sys.executable, str(script), "shard", str(i), str(SHARDS), *arguments] for i in range(SHARDS)]
    running = [subprocess.Popen(command) for command in commands]
    codes = [process.wait() for process in running]
    print(f"compiled in {SHARDS} processes, of which {sum(code != 0 for code in codes)} failed", flush=True)


def try_every_nth_configuration(i: int, n: int) -> None:
    """From here on this process's autotuners compile every n-th configuration, from the i-th, and time none.

    Before the first import of fla. Where a kernel's only configuration here does not fit the chip, the first that does
    is taken, so that the rest runs.
    """
    assert "fla" not in sys.modules, "fla reads FLA_CACHE_RESULTS when it is imported"
    os.environ["FLA_CACHE_RESULTS"] = "0"  # or Triton would keep the times that nobody took
    from triton.runtime.autotuner import Autotuner

    prune, run = Autotuner.prune_configs, Autotuner.run

    def compile_only(kernel_call: Callable[[], object], **_: object) -> list[float]:
        kernel_call()
        return [0.0, 0.0, 0.0]

    def share(self: Any, kwargs: dict[str, Any]) -> list[Any]:
        self.__dict__["do_bench"] = compile_only  # a cached property of Triton's
        configs = prune(self, kwargs)
        return configs[i::n] or configs[:1]

    def run_or_fall_back(self: Any, *args: Any, **kwargs: Any) -> Any:
        known = set(self.cache)
        try:
            return run(self, *args, **kwargs)
        except Exception as error:  # out of shared memory or registers, which each Triton version says otherwise
            failure = error
        for config in self.configs:
            for key in set(self.cache) - known:
                self.cache.pop(key)
            Autotuner.prune_configs = lambda _self, _kwargs, config=config: [config]
            try:
                return run(self, *args, **kwargs)
            except Exception as error:  # see above
                failure = error
            finally:
                Autotuner.prune_configs = share
        raise failure

    Autotuner.prune_configs, Autotuner.run = share, run_or_fall_back
