"""CUDA C++ compiled at first use by NVRTC, which comes with PyTorch: for what Triton's layouts cannot say.

Sources take no headers but their own. A module is compiled once a process for the device's own architecture.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HEADERS = Path(__file__).parent / "cuda"
TILE_BYTES = 128  # of a row: what TMA swizzles


def compile_cubin(source: Path, architecture: str, defines: Mapping[str, int]) -> bytes:
    """architecture: "sm_90a". Headers of the source's own folder and of HEADERS may be included. Raises RuntimeError with the compiler's log."""
    from cuda.bindings import nvrtc

    status, program = nvrtc.nvrtcCreateProgram(source.read_bytes(), source.name.encode(), 0, [], [])
    _check(status)
    options = [
        f"--gpu-architecture={architecture}",
        "--std=c++17",
        "-default-device",
        f"-I{source.parent}",
        f"-I{HEADERS}",
    ]
    options += [f"-D{name}={value}" for name, value in defines.items()]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if int(status):
        size = nvrtc.nvrtcGetProgramLogSize(program)[1]
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"{source.name} does not compile for {architecture}:\n{log.decode()}")
    status, size = nvrtc.nvrtcGetCUBINSize(program)
    _check(status)
    cubin = b" " * size
    _check(*nvrtc.nvrtcGetCUBIN(program, cubin))
    return cubin


@dataclass(frozen=True, slots=True)
class TensorMap:
    """How TMA reads or writes boxes of a matrix, see `tensor_map`."""

    encoded: Any


def tensor_map(x: Tensor, box_rows: int, box_tiles: int = 1) -> TensorMap:
    """Of x [..., columns], contiguous, as one matrix [rows, columns]: a box is box_tiles tiles of box_rows rows and TILE_BYTES
    of each, side by side in x and one after the other in shared memory, where they lie as `warpgroup.cuh` says. What is
    outside of x is read as zeros and not written."""
    row_bytes = x.shape[-1] * x.itemsize
    assert row_bytes % TILE_BYTES == 0, row_bytes
    return _tensor_map(x.data_ptr(), x.numel() // x.shape[-1], row_bytes, box_rows, box_tiles)


@lru_cache(maxsize=4096)
def _tensor_map(address: int, rows: int, row_bytes: int, box_rows: int, box_tiles: int) -> TensorMap:
    from cuda.bindings import driver

    dimensions, strides = (TILE_BYTES, rows, row_bytes // TILE_BYTES), (row_bytes, TILE_BYTES)
    box = (TILE_BYTES, box_rows, box_tiles)
    status, encoded = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        len(box),
        address,
        [driver.cuuint64_t(n) for n in dimensions],
        [driver.cuuint64_t(n) for n in strides],
        [driver.cuuint32_t(n) for n in box],
        [driver.cuuint32_t(1)] * len(box),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    _check(status)
    return TensorMap(encoded)


def _value_of(x: Tensor | TensorMap | int | float | None) -> Any:
    if isinstance(x, Tensor):
        return x.data_ptr()
    if isinstance(x, TensorMap):
        return x.encoded
    return 0 if x is None else x


_C_TYPES: dict[type, Any] = {int: ctypes.c_int, float: ctypes.c_float, TensorMap: None}


@dataclass(frozen=True, slots=True)
class CudaSource:
    """An `extern "C"` function of a file, the threads of its blocks, and the bytes of their struct `Shared`."""

    path: Path
    function: str
    threads: int
    shared_bytes: int

    def defines(self) -> dict[str, int]:
        return {"THREADS": self.threads, "SHARED_BYTES": self.shared_bytes}


@dataclass(frozen=True, slots=True)
class CudaKernel:
    """A function of a loaded module."""

    function: Any
    source: CudaSource
    device: int

    def __call__(self, grid: int, arguments: Sequence[Tensor | TensorMap | int | float | None]) -> None:
        """On PyTorch's current stream of the kernel's device. Tensors go as their addresses, None as no address, int as
        int32, float as fp32, and a TensorMap as it is."""
        from cuda.bindings import driver

        values = tuple(_value_of(x) for x in arguments)
        types = tuple(_C_TYPES.get(type(x), ctypes.c_void_p) for x in arguments)
        shape = (grid, 1, 1, self.source.threads, 1, 1)
        with torch.cuda.device(self.device):
            stream = torch.cuda.current_stream().cuda_stream
            _check(*driver.cuLaunchKernel(self.function, *shape, self.source.shared_bytes, stream, (values, types), 0))


@cache
def load(source: CudaSource, device: int, defines: tuple[tuple[str, int], ...] = ()) -> CudaKernel:
    """Compiled once a process, for the device's architecture."""
    from cuda.bindings import driver

    major, minor = torch.cuda.get_device_capability(device)
    architecture = f"sm_{major}{minor}{'a' if major >= 9 else ''}"
    cubin = compile_cubin(source.path, architecture, source.defines() | dict(defines))
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # the context exists
        status, module = driver.cuModuleLoadData(cubin)
        _check(status)
        status, function = driver.cuModuleGetFunction(module, source.function.encode())
        _check(status)
        if source.shared_bytes > 48 << 10:
            limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _check(*driver.cuFuncSetAttribute(function, limit, source.shared_bytes))
    return CudaKernel(function, source, device)


def _check(status: Any) -> None:
    if int(status):
        raise RuntimeError(f"CUDA: {status.name}")
