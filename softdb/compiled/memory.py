"""Columns where they lie: numbers at an address, records at a position, and what is on its way from memory."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from softdb.compiled.decorators import compiled

__all__ = ["address_of", "fetch", "half", "lines_of", "whole", "wide"]

LINE = 64  # bytes that come at once
FETCHED = 16  # lines of a record that are asked for; the processor sees by itself that more will follow


def _number(kind: Any, found_as: Any) -> Any:
    """An intrinsic: number j of those of a kind that begin at an address."""
    size = {ir.HalfType(): 2, ir.FloatType(): 4, ir.IntType(32): 4}[kind]

    @intrinsic
    def number(typing: Any, address: Any, j: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, found: Any) -> Any:
            base = builder.inttoptr(found[0], kind.as_pointer())
            one = builder.load(builder.gep(base, [found[1]]), align=size)
            return builder.fpext(one, ir.FloatType()) if size == 2 else one

        return found_as(types.intp, types.intp), generate

    return number


@intrinsic
def _fetch(typing: Any, address: Any) -> Any:
    """Asks memory for what lies at an address."""

    def generate(context: Any, builder: Any, signature: Any, found: Any) -> Any:
        pointer, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, flag, flag, flag])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        builder.call(function, [builder.inttoptr(found[0], pointer), flag(0), flag(3), flag(1)])
        return context.get_dummy_value()

    return types.void(types.intp), generate


wide, half = _number(ir.FloatType(), types.float32), _number(ir.HalfType(), types.float32)
whole = _number(ir.IntType(32), types.int32)


@compiled
def address_of(position: Any, addresses: Any, starts: Any, size: Any) -> Any:
    """Where the record of a position lies, `size` bytes long."""
    low, high = 0, len(addresses)
    while high - low > 1:
        middle = (low + high) // 2
        if starts[middle] <= position:
            low = middle
        else:
            high = middle
    return addresses[low] + (position - starts[low]) * size


@compiled
def lines_of(size: Any) -> Any:
    """How many lines of a record of so many bytes are asked for."""
    return min(FETCHED, (size + LINE - 1) // LINE)


@compiled
def fetch(address: Any, lines: Any) -> None:
    """Asks for a record."""
    for line in range(lines):
        _fetch(address + line * LINE)
