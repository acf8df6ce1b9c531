"""Every Triton kernel, compiled for the GPUs it is meant for on a machine that has none.

Run as a program, this file compiles and prints what it found: the tests run it as one, since in their own process
kernels are interpreted.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ARCHITECTURES = (90, 100)  # Hopper; Blackwell


@dataclass(frozen=True)
class Case:
    """arguments: Triton's type words by parameter; constants: its constexprs. Pointers are 16-byte aligned."""

    module: str
    kernel: str
    arguments: dict[str, str]
    constants: dict[str, object]
    num_warps: int

    @property
    def name(self) -> str:
        return f"{self.module}.{self.kernel} {' '.join(map(str, self.constants.values()))}"


def xor_compact_cases() -> list[Case]:
    from k3kernels.xor_compact.triton import ORDERED_BLOCKS, TILES

    cases = []
    for width, tile in TILES.items():
        results = {"counts_ptr": "*i32", "offsets_ptr": "*i64", "checksums_ptr": "*i32"}
        records = {"records_ptr": "*i64" if width == 4 else "*i32"}
        compact = {"base_ptr": "*i32", "new_ptr": "*i32", **records, **results, "cursor_ptr": "*i64"}
        order = {"starts_ptr": "*i64", "positions_ptr": "*i16", "values_ptr": {1: "*u8", 2: "*i16", 4: "*i32"}[width]}
        cases += [
            Case(
                "xor_compact",
                "xor_compact_kernel",
                compact | {"capacity": "i64"},
                {"WIDTH": width, "BLOCK": tile.block, "PIECES": tile.pieces},
                tile.num_warps,
            ),
            Case(
                "xor_compact",
                "order_blocks_kernel",
                records | results | order | {"mismatches_ptr": "*i64", "num_blocks": "i32"},
                {"WIDTH": width, "ROWS": ORDERED_BLOCKS, "COLUMNS": 128},
                1,
            ),
        ]
    return cases


def kernels_of_the_package() -> set[str]:
    """module.kernel of every function that is launched: by convention its name ends with _kernel."""
    import k3kernels

    found = set()
    for package in pkgutil.iter_modules(k3kernels.__path__):
        if package.ispkg and importlib.util.find_spec(f"k3kernels.{package.name}.triton"):
            module = importlib.import_module(f"k3kernels.{package.name}.triton")
            found |= {f"{package.name}.{name}" for name in vars(module) if name.endswith("_kernel")}
    return found


def compile_case(case: Case, architecture: int, folder: Path) -> dict[str, object]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(f"k3kernels.{case.module}.triton"), case.kernel)
    signature = case.arguments | dict.fromkeys(case.constants, "constexpr")
    assert list(signature) == kernel.arg_names, f"{case.kernel} takes {kernel.arg_names}"
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    source = ASTSource(kernel, signature, constexprs=case.constants, attrs=aligned)
    target = GPUTarget("cuda", architecture, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": case.num_warps})
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    usage = subprocess.run(
        [triton.knobs.nvidia.cuobjdump.path, "-res-usage", cubin], capture_output=True, text=True, check=True
    )
    return {"case": case.name, "architecture": architecture, "ptx": compiled.asm["ptx"], "usage": usage.stdout}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict[str, list]:
    folder = tmp_path_factory.mktemp("compiled")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = subprocess.run(
        [sys.executable, __file__, folder],
        env=environment | {"TRITON_CACHE_DIR": str(folder / "cache")},
        capture_output=True,
        text=True,
    )
    assert program.returncode == 0, program.stderr[-3000:]
    return json.loads((folder / "found.json").read_text())


def test_every_kernel_of_the_package_is_compiled_here(compiled):
    assert set(compiled["kernels"]) == {found["case"].split()[0] for found in compiled["found"]}
    assert {found["architecture"] for found in compiled["found"]} == set(ARCHITECTURES)


def test_no_kernel_spills_registers_to_memory(compiled):
    for found in compiled["found"]:
        assert " STACK:0 " in found["usage"], (found["case"], found["architecture"], found["usage"])


def test_the_fused_xor_loads_16_bytes_a_thread(compiled):
    cases = [found for found in compiled["found"] if found["case"].startswith("xor_compact.xor_compact_kernel")]
    for found in cases:
        loads = [line for line in found["ptx"].splitlines() if "ld.global" in line]
        assert loads, found["case"]
        assert all("ld.global.v4.b32" in line for line in loads), (found["case"], loads)


def main(folder: Path) -> None:
    found = [compile_case(case, architecture, folder) for case in xor_compact_cases() for architecture in ARCHITECTURES]
    result = {"kernels": sorted(kernels_of_the_package()), "found": found}
    (folder / "found.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
