"""The kernels of softdb/device compiled for devices that need not be there: registers, shared memory, spills.

    python benchmarks/gpu_binaries.py [--target sm_90] [--few] [--output benchmarks/results/gpu_binaries.json]

Compiled is whatever a call of softdb.device launches: the calls run on tensors without memory, of which the launches
are recorded. No device runs them.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import provenance, write_json

from softdb.check import Metric
from softdb.device import launch, plan
from softdb.device.passes import folded

KERNELS = {
    "forward": ("pass_forward", "merge_splits"),
    "backward": ("pass_backward", "records_backward"),
    "scan": ("group_bests", "group_scores"),
}
TARGETS = {"sm_80": (80, 108, 99), "sm_90": (90, 132, 227)}
"""Capability, processors of an A100 and an H100, and KB of shared memory that a program may have: of sm_80, on every
later device."""
MOST_INT = 2**31 - 1


class Case(NamedTuple):
    """One shape."""

    q: int
    d: int
    v: int  # 0: nothing is pooled, -1: ten classes
    dtype: str
    metric: str = "dot"
    masked: bool = False
    n: int = 10_000_000
    trained: bool = False

    @property
    def name(self) -> str:
        """As the table has it."""
        pooled = {0: "nothing", -1: "10 classes"}.get(self.v, f"{self.v}")
        more = (", masked" if self.masked else "") + (", trained" if self.trained else "")
        return f"{self.metric} {self.dtype} q={self.q} d={self.d} v={pooled}{more}"


FEW = [Case(64, 128, 128, "float16")]
CASES = [
    *FEW,
    Case(1, 128, 128, "float16"),
    Case(16, 128, 128, "float32"),
    Case(64, 128, 128, "float32", trained=True, n=100_000),
    Case(64, 128, 128, "bfloat16"),
    Case(64, 768, 768, "float16"),
    Case(16, 1024, 1024, "float16"),
    Case(64, 1024, 1024, "float32", trained=True, n=100_000),
    Case(16, 384, -1, "float16", "cosine", masked=True),
    Case(64, 100, 0, "float32", "cosine", trained=True, n=100_000),
    Case(64, 128, 128, "float16", "l2"),
    Case(16, 1, 1, "float32", "l2", masked=True, trained=True, n=100_000),
]


class Launch(NamedTuple):
    """A recorded launch."""

    kernel: Any
    args: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def told(self) -> dict[str, Any]:
        """Its kernel, and the sizes of its tiles."""
        names = ("BQ", "BN", "BD", "BV", "BL", "BS", "GROUP", "num_warps", "num_stages")
        sizes = " ".join(f"{name}={self.options[name]}" for name in names if name in self.options)
        return {"kernel": self.kernel.fn.__name__, "sizes": sizes}


def recorded(case: Case, processors: int) -> list[Launch]:
    """What a pass forward and backward, and a search, launch."""
    found: list[Launch] = []
    originals: dict[tuple[Any, str], Any] = {}
    for module, names in KERNELS.items():
        for name in names:
            home = import_module(f"softdb.device.kernels.{module}")
            originals[home, name] = kernel = getattr(home, name)
            setattr(home, name, _Recorder(kernel, found))
    originals[plan, "_processors"] = plan._processors
    setattr(plan, "_processors", lambda device: processors)  # noqa: B010 - of a device that is not here
    try:
        _ask(case)
    finally:
        for (home, name), kernel in originals.items():
            setattr(home, name, kernel)
    return found


def _ask(case: Case) -> None:
    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    dtype = getattr(torch, case.dtype)
    values = None
    if case.v:
        values = empty(case.n, case.v, dtype=dtype) if case.v > 0 else empty(case.n, dtype=torch.int64)
    keep = empty(case.n, dtype=torch.bool) if case.masked else None
    mask = empty(case.q, case.n, dtype=torch.bool) if case.masked else None
    keys, queries = empty(case.n, case.d, dtype=dtype), empty(case.q, case.d)
    what = folded(queries, keys, values, Metric(case.metric), 1.0, keep, mask, 10 if case.v < 0 else None)
    sums, lse = launch.forward(what)
    trained = case.trained and case.v >= 0
    launch.backward(what, sums, torch.empty_like(sums.output), lse, (True, trained, trained and case.v > 0))
    launch.nearest(what._replace(values=None), 10)


class _Recorder:
    def __init__(self, kernel: Any, found: list[Launch]) -> None:
        self.kernel, self.found = kernel, found

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert 0 < grid[0] <= MOST_INT, grid
        return lambda *args, **options: self.found.append(Launch(self.kernel, args, options))


def compiled(one: Launch, target: str) -> dict[str, Any]:
    """Registers, bytes of shared memory and bytes of stack, which are spills, of a launch's binary."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    options = {key: one.options[key] for key in ("num_warps", "num_stages") if key in one.options}
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for place, parameter in enumerate(one.kernel.params):
        given = one.args[place] if place < len(one.args) else one.options[parameter.name]
        signature[parameter.name], special = _typed(given, parameter)
        if signature[parameter.name] == "constexpr":
            constants[(place,)] = given
        elif special:
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(one.kernel, signature, constexprs=constants, attrs=attributes)
    made = triton.compile(source, target=GPUTarget("cuda", TARGETS[target][0], 32), options=options)
    used = _used(made.asm["cubin"])
    return {"shared": made.metadata.shared, "registers": used["REG"], "stack": used["STACK"]}


def _typed(given: Any, parameter: Any) -> tuple[str, bool]:
    """A Triton type, and whether the argument counts as divisible by 16."""
    names = {
        torch.float32: "fp32",
        torch.float16: "fp16",
        torch.bfloat16: "bf16",
        torch.uint8: "u8",
        torch.int64: "i64",
    }
    if parameter.is_constexpr:
        return "constexpr", False
    if isinstance(given, torch.Tensor):
        return "*" + names.get(given.dtype, "i64"), True
    if isinstance(given, float):
        return "fp32", False
    if given == 1 and not parameter.do_not_specialize:
        return "constexpr", False
    return "i32" if given <= MOST_INT else "i64", given % 16 == 0 and not parameter.do_not_specialize


def _used(binary: bytes) -> dict[str, int]:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        told = subprocess.run([tool, "-res-usage", file.name], check=True, capture_output=True, text=True).stdout
    return {name: int(number) for name, number in re.findall(r"(\w+):(\d+)", told)}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--few", action="store_true", help="one shape alone")
    parser.add_argument("--target", choices=TARGETS, action="append", help="of these alone")
    parser.add_argument("--output", type=Path, help="a file for the table, in JSON")
    asked = parser.parse_args()
    rows = []
    much = False
    for target in asked.target or TARGETS:
        _, processors, shared = TARGETS[target]
        for case in FEW if asked.few else CASES:
            for one in recorded(case, processors):
                row = {"target": target, "case": case.name, **one.told, **compiled(one, target)}
                rows.append(row)
                print(" ".join(f"{value!s}" for value in row.values()), flush=True)
                if row["shared"] > shared << 10:
                    much = True
                    print("  more shared memory than a program may have", flush=True)
    if asked.output is not None:
        about = provenance(["softdb", "torch", "triton"])
        write_json(asked.output, {**about, "triton": about["versions"]["triton"], "binaries": rows})
    sys.exit(much)


if __name__ == "__main__":
    assert "TRITON_INTERPRET" not in os.environ, "the interpreter compiles nothing; unset TRITON_INTERPRET"
    main()
