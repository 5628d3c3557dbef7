"""16 float32 numbers as one value of compiled code, and operations on them, written as LLVM instructions.

No operation has a fast-math flag and sums of products are explicit fused multiply-adds. So the compiler may choose
registers and instructions, but no other order of operations: the bits follow from what is written. All addresses and
strides are in bytes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 16

_F32, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_F32, LANES)
_WIDE = 4 if llvmlite.binding.get_host_cpu_features().get("avx512f") else 1
"""Vectors of a strip whose sums stay in registers, for three and four rows."""


class _Lanes(types.Type):
    """16 float32 in a register."""

    def __init__(self) -> None:
        super().__init__("lanes")


@register_model(_Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, _VECTOR)


_lanes, _f32, _i64 = _Lanes(), types.float32, types.int64


def _operation(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """An operation of compiled code, made of the function that writes its LLVM instructions."""

    def made(write: Callable[..., Any]) -> Any:
        def typed(context: Any, *given: Any) -> Any:
            return result(*arguments), lambda context, builder, signature, values: write(builder, *values)

        names = ["context", *(f"argument_{i}" for i in range(len(arguments)))]
        kind = inspect.Parameter.POSITIONAL_ONLY
        typed.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
        typed.__name__ = write.__name__
        return intrinsic(typed)

    return made


def _constant(kind: ir.Type, value: Any) -> ir.Constant:
    return ir.Constant(ir.VectorType(kind, LANES), [value] * LANES)


def _pointer(builder: Any, address: Any, kind: ir.Type) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _read(builder: Any, address: Any, kind: ir.Type = _VECTOR) -> Any:
    return builder.load(_pointer(builder, address, kind), align=2 if kind in (_I16, ir.VectorType(_I16, LANES)) else 4)


def _write(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, _pointer(builder, address, value.type), align=2 if value.type.element == _I16 else 4)


def _spread(builder: Any, value: Any) -> Any:
    one = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), value, _I32(0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES))


def _pick(builder: Any, first: Any, second: Any, lanes: Any) -> Any:
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(_I32, len(lanes)), list(lanes)))


def _fused(builder: Any, x: Any, y: Any, z: Any) -> Any:
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.v16f32"), [x, y, z])


@_operation(_lanes, _f32)
def splat(builder: Any, value: Any) -> Any:
    return _spread(builder, value)


@_operation(_lanes, _i64)
def load(builder: Any, address: Any) -> Any:
    return _read(builder, address)


@_operation(types.void, _lanes, _i64)
def store(builder: Any, value: Any, address: Any) -> None:
    _write(builder, value, address)


def _widened(builder: Any, address: Any) -> Any:
    bits = builder.zext(_read(builder, address, ir.VectorType(_I16, LANES)), ir.VectorType(_I32, LANES))
    return builder.bitcast(builder.shl(bits, _constant(_I32, 16)), _VECTOR)


@_operation(_lanes, _i64)
def load_bfloat16(builder: Any, address: Any) -> Any:
    return _widened(builder, address)


@_operation(types.void, _lanes, _i64)
def store_bfloat16(builder: Any, value: Any, address: Any) -> None:
    """Round to the nearest, ties to even; NaN stays NaN."""
    bits = builder.bitcast(value, ir.VectorType(_I32, LANES))
    odd = builder.and_(builder.lshr(bits, _constant(_I32, 16)), _constant(_I32, 1))
    rounded = builder.add(bits, builder.add(odd, _constant(_I32, 0x7FFF)))
    nan = builder.fcmp_unordered("uno", value, value)
    kept = builder.lshr(builder.select(nan, _constant(_I32, 0x7FC00000), rounded), _constant(_I32, 16))
    _write(builder, builder.trunc(kept, ir.VectorType(_I16, LANES)), address)


@_operation(_lanes, _i64)
def load_float16(builder: Any, address: Any) -> Any:
    bits = _read(builder, address, ir.VectorType(_I16, LANES))
    return builder.fpext(builder.bitcast(bits, ir.VectorType(ir.HalfType(), LANES)), _VECTOR)


@_operation(types.void, _lanes, _i64)
def store_float16(builder: Any, value: Any, address: Any) -> None:
    half = builder.fptrunc(value, ir.VectorType(ir.HalfType(), LANES))
    _write(builder, builder.bitcast(half, ir.VectorType(_I16, LANES)), address)


@_operation(_lanes, _lanes, _lanes, _lanes)
def fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
    return _fused(builder, x, y, z)


@_operation(_lanes, _lanes, _lanes)
def add(builder: Any, x: Any, y: Any) -> Any:
    return builder.fadd(x, y)


@_operation(_lanes, _lanes, _lanes)
def subtract(builder: Any, x: Any, y: Any) -> Any:
    return builder.fsub(x, y)


@_operation(_lanes, _lanes, _lanes)
def multiply(builder: Any, x: Any, y: Any) -> Any:
    return builder.fmul(x, y)


@_operation(_lanes, _lanes, _lanes)
def divide(builder: Any, x: Any, y: Any) -> Any:
    return builder.fdiv(x, y)


@_operation(_lanes, _lanes, _lanes)
def maximum(builder: Any, x: Any, y: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


@_operation(_lanes, _lanes, _f32, _lanes, _lanes)
def where_below(builder: Any, x: Any, bound: Any, y: Any, z: Any) -> Any:
    """y where x < bound, else z."""
    return builder.select(builder.fcmp_ordered("<", x, _spread(builder, bound)), y, z)


@_operation(_lanes, _lanes, _lanes)
def with_sign(builder: Any, x: Any, sign: Any) -> Any:
    """x with its sign bit set where that of another number is."""
    kind = ir.VectorType(_I32, LANES)
    bit = builder.and_(builder.bitcast(sign, kind), _constant(_I32, 0x80000000))
    return builder.bitcast(builder.or_(builder.bitcast(x, kind), bit), _VECTOR)


@_operation(_lanes, _lanes, _i64, _i64)
def within(builder: Any, x: Any, first: Any, end: Any) -> Any:
    """x in the lanes [first, end), else -inf."""
    lane = ir.Constant(ir.VectorType(_I64, LANES), list(range(LANES)))
    bounds = []
    for bound in (first, end):
        one = builder.insert_element(ir.Constant(lane.type, ir.Undefined), bound, _I32(0))
        bounds.append(builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)))
    inside = builder.and_(builder.icmp_signed(">=", lane, bounds[0]), builder.icmp_signed("<", lane, bounds[1]))
    return builder.select(inside, x, _constant(_F32, float("-inf")))


@_operation(_lanes, _lanes)
def power_of_two(builder: Any, x: Any) -> Any:
    """2^k of x = 1.5 * 2^23 + 127 + k, -126 <= k <= 127: the sum's last bits are the exponent."""
    bits = builder.bitcast(x, ir.VectorType(_I32, LANES))
    return builder.bitcast(builder.shl(bits, _constant(_I32, 23)), _VECTOR)


def _folded(builder: Any, x: Any, join: Callable[[Any, Any], Any]) -> Any:
    width = LANES
    while width > 1:
        width //= 2
        x = join(_pick(builder, x, x, range(width)), _pick(builder, x, x, range(width, 2 * width)))
    return builder.extract_element(x, _I32(0))


@_operation(_f32, _lanes)
def total(builder: Any, x: Any) -> Any:
    """Lanes l and l + 8 first, then l and l + 4, l + 2, l + 1."""
    return _folded(builder, x, builder.fadd)


@_operation(_f32, _lanes)
def first_lane(builder: Any, x: Any) -> Any:
    return builder.extract_element(x, _I32(0))


@_operation(_f32, _lanes)
def largest(builder: Any, x: Any) -> Any:
    return _folded(builder, x, lambda a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))


def _transposed(builder: Any, source: Any, stride: Any, kind: ir.Type) -> list[Any]:
    """The columns of 16 rows of 16 numbers."""
    rows = [_read(builder, builder.add(source, builder.mul(stride, _I64(i))), kind) for i in range(LANES)]
    for width in (1, 2, 4, 8):
        # Swap the off-diagonal halves of every square of 2 * width; lanes stay in their 128-bit part while width < 4.
        low = [lane if not lane & width else lane - width + LANES for lane in range(LANES)]
        high = [lane + width if not lane & width else lane + LANES for lane in range(LANES)]
        for i in range(LANES):
            if not i & width:
                a, b = rows[i], rows[i + width]
                rows[i], rows[i + width] = _pick(builder, a, b, low), _pick(builder, a, b, high)
    return rows


@_operation(types.void, _i64, _i64, _i64, _i64)
def transpose(builder: Any, source: Any, source_stride: Any, target: Any, target_stride: Any) -> None:
    """16 rows of 16 float32 become columns."""
    for i, column in enumerate(_transposed(builder, source, source_stride, _VECTOR)):
        _write(builder, column, builder.add(target, builder.mul(target_stride, _I64(i))))


@_operation(types.void, _i64, _i64, _i64, _i64)
def transpose_bfloat16(builder: Any, source: Any, source_stride: Any, target: Any, target_stride: Any) -> None:
    """16 rows of 32 bfloat16 become columns of float32: neighbours travel as one number."""
    for i, column in enumerate(_transposed(builder, source, source_stride, ir.VectorType(_I32, LANES))):
        even = builder.shl(column, _constant(_I32, 16))
        odd = builder.and_(column, _constant(_I32, 0xFFFF0000))
        for at, half in ((2 * i, even), (2 * i + 1, odd)):
            _write(builder, builder.bitcast(half, _VECTOR), builder.add(target, builder.mul(target_stride, _I64(at))))


@intrinsic
def address_of(context: Any, pointer: Any) -> Any:
    return _i64(pointer), lambda context, builder, signature, values: builder.ptrtoint(values[0], _I64)


@_operation(_i64, _i64)
def take_ticket(builder: Any, address: Any) -> Any:
    """The counter's value; it is one more for whichever thread comes next."""
    return builder.atomic_rmw("add", _pointer(builder, address, _I64), _I64(1), "monotonic")


@_operation(_i64, _i64, _i64)
def int64_at(builder: Any, address: Any, index: Any) -> Any:
    return _read(builder, builder.add(address, builder.shl(index, _I64(3))), _I64)


@_operation(_i64, _i64, _i64)
def int32_at(builder: Any, address: Any, index: Any) -> Any:
    return builder.sext(_read(builder, builder.add(address, builder.shl(index, _I64(2))), _I32), _I64)


@_operation(_f32, _i64)
def float32_at(builder: Any, address: Any) -> Any:
    return _read(builder, address, _F32)


@_operation(types.void, _f32, _i64)
def set_float32(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, _pointer(builder, address, _F32), align=4)


@_operation(types.void, _i64, _i64)
def move16(builder: Any, source: Any, target: Any) -> None:
    builder.store(_read(builder, source, _I16), _pointer(builder, target, _I16), align=2)


# --- products of matrices ---------------------------------------------------------------------------------------


def _strip(rows: int, wide: int, half: bool = False) -> Any:
    """c[r][x] += a[r][t] b[t][x] in the order of t in [first, end), for `rows` rows and all columns x.

    b is of bfloat16 where `half`, all else of float32.
    """

    @_operation(types.void, *[_i64] * 9)
    def strip(builder: Any, *given: Any) -> None:
        columns = given[6]
        step = _I64(4 * LANES * wide)
        whole = builder.mul(builder.sdiv(builder.mul(columns, _I64(4)), step), step)
        with cgutils.for_range_slice(builder, _I64(0), whole, step, _I64) as (at, _):
            _columns(builder, rows, wide, half, at, *given)
        if wide > 1:
            end = builder.mul(columns, _I64(4))
            with cgutils.for_range_slice(builder, whole, end, _I64(4 * LANES), _I64) as (at, _):
                _columns(builder, rows, 1, half, at, *given)

    return strip


def _columns(
    builder: Any, rows: int, wide: int, half: bool, at: Any, a: Any, a_stride: Any, b: Any, b_stride: Any, c: Any,
    c_stride: Any, columns: Any, first: Any, end: Any,
) -> None:  # fmt: skip
    """A strip's `wide` vectors of columns, the first one at byte `at`: its sums stay in registers."""
    offsets = [_I64(4 * LANES * x) for x in range(wide)]
    steps = [_I64((2 if half else 4) * LANES * x) for x in range(wide)]
    targets = [builder.add(builder.add(c, at), builder.mul(c_stride, _I64(r))) for r in range(rows)]
    begin = [_read(builder, builder.add(target, x)) for target in targets for x in offsets]
    factors = [builder.add(a, builder.mul(a_stride, _I64(r))) for r in range(rows)]
    entry, loop, done = builder.block, builder.append_basic_block("sum"), builder.append_basic_block("summed")
    builder.cbranch(builder.icmp_signed("<", first, end), loop, done)
    with builder.goto_block(loop):
        t, sums = builder.phi(_I64), [builder.phi(_VECTOR) for _ in begin]
        source = builder.add(builder.add(b, builder.lshr(at, _I64(int(half)))), builder.mul(t, b_stride))
        vectors = [(_widened if half else _read)(builder, builder.add(source, x)) for x in steps]
        after = []
        for r in range(rows):
            factor = _spread(builder, _read(builder, builder.add(factors[r], builder.mul(t, _I64(4))), _F32))
            after += [_fused(builder, factor, v, sums[r * wide + x]) for x, v in enumerate(vectors)]
        following = builder.add(t, _I64(1))
        for phi, old, new in zip([t, *sums], [first, *begin], [following, *after], strict=True):
            phi.add_incoming(old, entry)
            phi.add_incoming(new, loop)
        builder.cbranch(builder.icmp_signed("<", following, end), loop, done)
    builder.position_at_end(done)
    for i, (old, new) in enumerate(zip(begin, after, strict=True)):
        result = builder.phi(_VECTOR)
        result.add_incoming(old, entry)
        result.add_incoming(new, loop)
        begin[i] = result
    for i, result in enumerate(begin):
        _write(builder, result, builder.add(targets[i // wide], offsets[i % wide]))


strip1, strip2, strip3, strip4 = _strip(1, 4), _strip(2, max(_WIDE, 2)), _strip(3, _WIDE), _strip(4, _WIDE)
half1, half2 = _strip(1, 4, half=True), _strip(2, max(_WIDE, 2), half=True)
half3, half4 = _strip(3, _WIDE, half=True), _strip(4, _WIDE, half=True)
