"""Registers, shared memory and spills of the kernels of softdb/device, compiled without a device.

    python benchmarks/gpu_binaries.py [--target sm_90] [--few] [--output benchmarks/results/gpu_binaries.json]

The script calls softdb.device on tensors without memory, records the launches, and compiles their kernels. No device
runs them.
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
"""Compute capability, processors of an A100 and an H100, and the KB of shared memory that a program may use; those of
sm_80 hold on every later device."""
MOST_INT = 2**31 - 1


class Case(NamedTuple):
    """One shape of a call."""

    q: int
    d: int
    v: int  # 0: no values, -1: ten classes
    dtype: str
    metric: str = "dot"
    masked: bool = False
    n: int = 10_000_000
    trained: bool = False

    @property
    def name(self) -> str:
        """Name of the case in the table."""
        pooled = {0: "nothing", -1: "10 classes"}.get(self.v, f"{self.v}")
        flags = (", masked" if self.masked else "") + (", trained" if self.trained else "")
        return f"{self.metric} {self.dtype} q={self.q} d={self.d} v={pooled}{flags}"


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
    def facts(self) -> dict[str, Any]:
        """Name of the kernel, and the sizes of its tiles."""
        names = ("BQ", "BN", "BD", "BV", "BL", "BS", "GROUP", "num_warps", "num_stages")
        sizes = " ".join(f"{name}={self.options[name]}" for name in names if name in self.options)
        return {"kernel": self.kernel.fn.__name__, "sizes": sizes}


def recorded(case: Case, processors: int) -> list[Launch]:
    """Return the launches of a forward pass, a backward pass and a search."""
    launches: list[Launch] = []
    originals: dict[tuple[Any, str], Any] = {}
    for module, names in KERNELS.items():
        for name in names:
            home = import_module(f"softdb.device.kernels.{module}")
            originals[home, name] = kernel = getattr(home, name)
            setattr(home, name, _Recorder(kernel, launches))
    originals[plan, "_processors"] = plan._processors
    setattr(plan, "_processors", lambda device: processors)  # noqa: B010 - there is no device to ask
    try:
        _ask(case)
    finally:
        for (home, name), kernel in originals.items():
            setattr(home, name, kernel)
    return launches


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
    request = folded(queries, keys, values, Metric(case.metric), 1.0, keep, mask, 10 if case.v < 0 else None)
    sums, lse = launch.forward(request)
    trained = case.trained and case.v >= 0
    launch.backward(request, sums, torch.empty_like(sums.output), lse, (True, trained, trained and case.v > 0))
    launch.nearest(request._replace(values=None), 10)


class _Recorder:
    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert 0 < grid[0] <= MOST_INT, grid
        return lambda *args, **options: self.launches.append(Launch(self.kernel, args, options))


def compiled(launched: Launch, target: str) -> dict[str, Any]:
    """Return the registers, bytes of shared memory and bytes of stack (spilled registers) of a launch's binary."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    options = {key: launched.options[key] for key in ("num_warps", "num_stages") if key in launched.options}
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for place, parameter in enumerate(launched.kernel.params):
        argument = launched.args[place] if place < len(launched.args) else launched.options[parameter.name]
        signature[parameter.name], divisible = _typed(argument, parameter)
        if signature[parameter.name] == "constexpr":
            constants[(place,)] = argument
        elif divisible:
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(launched.kernel, signature, constexprs=constants, attrs=attributes)
    binary = triton.compile(source, target=GPUTarget("cuda", TARGETS[target][0], 32), options=options)
    usage = _usage(binary.asm["cubin"])
    return {"shared": binary.metadata.shared, "registers": usage["REG"], "stack": usage["STACK"]}


def _typed(argument: Any, parameter: Any) -> tuple[str, bool]:
    """Return the Triton type of an argument, and whether it counts as divisible by 16."""
    names = {
        torch.float32: "fp32",
        torch.float16: "fp16",
        torch.bfloat16: "bf16",
        torch.uint8: "u8",
        torch.int64: "i64",
    }
    if parameter.is_constexpr:
        return "constexpr", False
    if isinstance(argument, torch.Tensor):
        return "*" + names.get(argument.dtype, "i64"), True
    if isinstance(argument, float):
        return "fp32", False
    if argument == 1 and not parameter.do_not_specialize:
        return "constexpr", False
    return "i32" if argument <= MOST_INT else "i64", argument % 16 == 0 and not parameter.do_not_specialize


def _usage(binary: bytes) -> dict[str, int]:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        listing = subprocess.run([tool, "-res-usage", file.name], check=True, capture_output=True, text=True).stdout
    return {name: int(number) for name, number in re.findall(r"(\w+):(\d+)", listing)}


def main() -> None:
    """Compile every case and print a line for each kernel; exit with 1 if one needs too much shared memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--few", action="store_true", help="compile one shape alone")
    parser.add_argument("--target", choices=TARGETS, action="append", help="compile for this target alone")
    parser.add_argument("--output", type=Path, help="JSON file for the table")
    args = parser.parse_args()
    rows = []
    too_large = False
    for target in args.target or TARGETS:
        _, processors, shared = TARGETS[target]
        for case in FEW if args.few else CASES:
            for launched in recorded(case, processors):
                row = {"target": target, "case": case.name, **launched.facts, **compiled(launched, target)}
                rows.append(row)
                print(" ".join(f"{value!s}" for value in row.values()), flush=True)
                if row["shared"] > shared << 10:
                    too_large = True
                    print(f"  {row['shared']} bytes of shared memory; expected at most {shared << 10}", flush=True)
    if args.output is not None:
        about = provenance(["softdb", "torch", "triton"])
        write_json(args.output, {**about, "triton": about["versions"]["triton"], "binaries": rows})
    sys.exit(too_large)


if __name__ == "__main__":
    assert "TRITON_INTERPRET" not in os.environ, "TRITON_INTERPRET is set, which compiles nothing; unset it"
    main()
