"""The inner loops of the fused soft query: small matrix products that live in the processor's registers.

numba intrinsics that write LLVM vector code, because a compiler given plain loops keeps the sums in memory. All
products of attention and of its gradient are made of these tiles (Goto and van de Geijn 2008, figure 5).
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = [
    "FEW", "LANES", "ROWS", "bits", "inner", "inner_rows", "product", "real", "square_distance", "wide_vectors",
    "widen", "widen_vector",
]  # fmt: skip


def _vector_unit() -> tuple[int, int]:
    """Lanes of a float32 vector, and rows of a tile of two vectors that fits the registers."""
    features = llvmlite.binding.get_host_cpu_features()
    if features.get("avx512f"):
        return 16, 8  # 32 registers of 16 numbers
    if features.get("avx2") and features.get("fma"):
        return 8, 4  # 16 registers of 8
    return 4, 4  # every 64-bit processor has these


LANES, ROWS = _vector_unit()
FEW = 4  # queries at most that `inner` compares

_INT, _FLOAT, _HALF = ir.IntType(32), ir.FloatType(), ir.HalfType()


def product(rows: int | None, vectors: int | None) -> Any:
    """An intrinsic that sets c[r, x] = Σ_t a[r, t] b[t, x] for a tile of rows r and vectors of x.

    Its first argument, a tuple, says by its length how many queries make a group. `rows` None: as many as fit of them,
    and `wide_vectors` of x; `vectors` None: as many as hold the group.
    """
    return _tile(rows, vectors, difference=False)


def square_distance(rows: int | None, vectors: int | None) -> Any:
    """As `product`, but c[r, x] = Σ_t (a[r, t] - b[t, x])²: by differences, which near duplicates need."""
    return _tile(rows, vectors, difference=True)


def inner(one_row: bool, difference: bool) -> Any:
    """An intrinsic that sets c[r, j] = Σ_t a[r, t] b[j, t], or Σ_t (a[r, t] - b[j, t])², for a handful of queries j.

    Keys are read as whole vectors, where `product` reads them number by number: for few queries memory is what counts.
    Its first argument, a tuple, says by its length how many queries there are; rows are `inner_rows` of it, or one.
    """

    @intrinsic
    def tile(
        typing: Any,
        shape: Any,  # a tuple as long as there are queries
        a: Any,  # float32, or uint16 for float16: a[r, t] at a_start + r a_row + t
        a_start: Any,
        a_row: Any,
        b: Any,  # float32: b[j, t] at b_start + j b_row + t
        b_start: Any,
        b_row: Any,
        c: Any,  # float32: c[r, j] at c_start + r len(shape) + j
        c_start: Any,
        steps: Any,  # how many t, a multiple of LANES
    ) -> Any:
        whole = types.intp
        signature = types.void(shape, a, whole, whole, b, whole, whole, c, whole, whole)
        queries = min(shape.count, FEW)  # a longer tuple is never compared by this tile, but compiled all the same
        rows = 1 if one_row else inner_rows(queries)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            a, b, c = (_data(context, builder, signature, arguments, place) for place in (1, 4, 7))
            (a_start, a_row), (b_start, b_row), (c_start, steps) = arguments[2:4], arguments[5:7], arguments[8:]
            loop = _Loop(builder, steps, LANES, rows * queries, LANES)
            asked = [_load(builder, b, _at(builder, b_start, loop.t, b_row, j), LANES) for j in range(queries)]
            for r in range(rows):
                key = _load(builder, a, _at(builder, a_start, loop.t, a_row, r), LANES)
                for j, query in enumerate(asked):
                    loop.add(r * queries + j, key, query, difference)
            for place, total in enumerate(loop.end()):
                at = builder.add(c_start, ir.Constant(c_start.type, place))
                builder.store(_across(builder, total), builder.gep(c, [at]))
            return context.get_dummy_value()

        return signature, generate

    return tile


def wide_vectors(queries: int) -> int:
    """Vectors of a tile that is as many rows high as there are queries: few queries read whole rows at once."""
    return 8 if queries == 1 else 4 if queries <= FEW else 2


def inner_rows(queries: int) -> int:
    """Rows of an `inner` tile whose sums fit the registers."""
    return max(1, min(ROWS, 2 * ROWS // queries))


def _tile(height: int | None, breadth: int | None, difference: bool) -> Any:
    @intrinsic
    def tile(
        typing: Any,
        shape: Any,  # a tuple as long as a group
        a: Any,  # float32: a[r, t] at a_start + r a_row + t a_step
        a_start: Any,
        a_row: Any,
        a_step: Any,
        b: Any,  # float32, or uint16 for float16: b[t, x] at b_start + t b_step + x
        b_start: Any,
        b_step: Any,
        c: Any,  # float32: c[r, x] at c_start + r c_row + x
        c_start: Any,
        c_row: Any,
        steps: Any,  # how many t
    ) -> Any:
        whole = types.intp
        signature = types.void(shape, a, whole, whole, whole, b, whole, whole, c, whole, whole, whole)
        rows = min(shape.count, ROWS) if height is None else height
        vectors = breadth or (wide_vectors(shape.count) if height is None else shape.count // LANES)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            a, b, c = (_data(context, builder, signature, arguments, place) for place in (1, 5, 8))
            (a_start, a_row, a_step), (b_start, b_step) = arguments[2:5], arguments[6:8]
            c_start, c_row, steps = arguments[9:]
            lanes = ir.Constant(c_start.type, LANES)
            loop = _Loop(builder, steps, 1, rows * vectors, LANES)
            b_now = builder.add(b_start, builder.mul(loop.t, b_step))
            columns = [_load(builder, b, _at(builder, b_now, None, lanes, which), LANES) for which in range(vectors)]
            a_now = builder.add(a_start, builder.mul(loop.t, a_step))
            for r in range(rows):
                one = _everywhere(builder, builder.load(builder.gep(a, [_at(builder, a_now, None, a_row, r)])))
                for which, column in enumerate(columns):
                    loop.add(r * vectors + which, one, column, difference)
            for place, total in enumerate(loop.end()):
                r, which = divmod(place, vectors)
                at = _at(builder, _at(builder, c_start, None, c_row, r), None, lanes, which)
                builder.store(total, _vector_at(builder, c, at, _FLOAT, LANES), align=4)
            return context.get_dummy_value()

        return signature, generate

    return tile


class _Loop:
    """Sums of products over t = 0, step, 2 step … below an end, each sum a vector in a register."""

    def __init__(self, builder: Any, end: Any, step: int, sums: int, lanes: int) -> None:
        self.builder, self.step = builder, step
        vector = ir.VectorType(_FLOAT, lanes)
        self.fused = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fma.v{lanes}f32"
        )
        before = builder.block
        self.head, self.body, self.after = (
            builder.function.append_basic_block(f"tile.{name}") for name in ("head", "body", "after")
        )
        builder.branch(self.head)
        builder.position_at_end(self.head)
        self.t = builder.phi(end.type)
        self.t.add_incoming(ir.Constant(end.type, 0), before)
        self.sums = [builder.phi(vector) for _ in range(sums)]
        for total in self.sums:
            total.add_incoming(ir.Constant(vector, [0.0] * lanes), before)
        builder.cbranch(builder.icmp_signed("<", self.t, end), self.body, self.after)
        builder.position_at_end(self.body)

    def add(self, which: int, left: Any, right: Any, difference: bool) -> None:
        """Adds left · right, or (left - right)², to a sum."""
        if difference:
            left = right = self.builder.fsub(left, right)
        total = self.sums[which]
        total.add_incoming(self.builder.call(self.fused, [left, right, total]), self.body)

    def end(self) -> list[Any]:
        """Closes the loop: the sums."""
        step = ir.Constant(self.t.type, self.step)
        self.t.add_incoming(self.builder.add(self.t, step), self.body)
        self.builder.branch(self.head)
        self.builder.position_at_end(self.after)
        return self.sums


def _data(context: Any, builder: Any, signature: Any, arguments: Any, place: int) -> Any:
    return context.make_array(signature.args[place])(context, builder, arguments[place]).data


def _at(builder: Any, start: Any, offset: Any, stride: Any, count: int) -> Any:
    """start + offset + stride · count."""
    found = builder.add(start, builder.mul(stride, ir.Constant(start.type, count)))
    return found if offset is None else builder.add(found, offset)


def _vector_at(builder: Any, base: Any, start: Any, kind: Any, lanes: int) -> Any:
    return builder.bitcast(builder.gep(base, [start]), ir.VectorType(kind, lanes).as_pointer())


def _load(builder: Any, base: Any, start: Any, lanes: int) -> Any:
    """A vector of float32 from an array of float32, or of uint16 that are the bits of float16."""
    if base.type.pointee != ir.IntType(16):
        return builder.load(_vector_at(builder, base, start, _FLOAT, lanes), align=4)
    halves = builder.load(_vector_at(builder, base, start, _HALF, lanes), align=2)
    return builder.fpext(halves, ir.VectorType(_FLOAT, lanes))


def _everywhere(builder: Any, x: Any) -> Any:
    """A number in every lane."""
    vector = ir.VectorType(_FLOAT, LANES)
    blank = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(blank, x, ir.Constant(_INT, 0))
    return builder.shuffle_vector(first, blank, ir.Constant(ir.VectorType(_INT, LANES), [0] * LANES))


def _across(builder: Any, vector: Any) -> Any:
    """The sum of a vector's lanes."""
    half = LANES // 2
    while half:
        moved = ir.Constant(ir.VectorType(_INT, LANES), [(x + half) % LANES for x in range(LANES)])
        vector = builder.fadd(vector, builder.shuffle_vector(vector, vector, moved))
        half //= 2
    return builder.extract_element(vector, ir.Constant(_INT, 0))


@intrinsic
def bits(typing: Any, x: Any) -> Any:
    """The bits of a float32 as an int32."""
    return types.int32(types.float32), lambda context, builder, signature, found: builder.bitcast(found[0], _INT)


@intrinsic
def real(typing: Any, x: Any) -> Any:
    """The float32 of some bits."""
    return types.float32(types.int32), lambda context, builder, signature, found: builder.bitcast(found[0], _FLOAT)


@intrinsic
def widen(typing: Any, x: Any) -> Any:
    """The float32 that the bits of a float16, a uint16, stand for."""

    def generate(context: Any, builder: Any, signature: Any, found: Any) -> Any:
        return builder.fpext(builder.bitcast(found[0], _HALF), _FLOAT)

    return types.float32(types.uint16), generate


@intrinsic
def widen_vector(typing: Any, halves: Any, start: Any, out: Any, to: Any) -> Any:
    """out[to + x] = halves[start + x] for LANES x: uint16, the bits of float16, to float32."""
    signature = types.void(halves, types.intp, out, types.intp)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        found = _load(builder, _data(context, builder, signature, arguments, 0), arguments[1], LANES)
        out = _data(context, builder, signature, arguments, 2)
        builder.store(found, _vector_at(builder, out, arguments[3], _FLOAT, LANES), align=4)
        return context.get_dummy_value()

    return signature, generate
