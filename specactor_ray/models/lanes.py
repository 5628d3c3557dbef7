"""16 float32 numbers as one value of compiled code: operations on it, and products of matrices.

Numba compiles the CPU kernels (`_cpu_attention_numba`, `_cpu_layers_numba`) but has no such type. This module adds one,
`_lanes`, which is in a vector register (AVX-512) or in two halves (AVX2), with + - * / on it and on float32.

A function under `@_operation(result, *arguments)` runs when a kernel is compiled. Its arguments stand for the kernel's
values, and every `builder.x(...)` appends one instruction to the kernel and returns what stands for its result:
`fadd` adds floats and `add` integers, `zext`, `sext` and `trunc` change the width of integers, `bitcast` takes the same
bits as another type, `select(c, x, y)` is x where c holds, `shuffle_vector` picks lanes of two vectors by number, and
`alloca` is a variable, which the compiler keeps in a register. Python's own loops and ifs unroll what they contain.

No operation has a fast-math flag and sums of products are explicit fused multiply-adds. So the compiler may choose
registers and instructions, but no other order of operations: the source code determines the bits. All addresses and
strides are in bytes.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import ConcreteTemplate, infer_global
from numba.extending import intrinsic, lower_builtin, models, register_model

from specactor_ray.core.jit import kernel

LANES = 16
FLOAT32, BFLOAT16 = 0, 1
"""Kinds of numbers in memory."""
SIZE = (4, 2)
"""Bytes of a number of each kind."""

_F32, _I8, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_VECTOR, _SHORTS, _WORDS = (ir.VectorType(kind, LANES) for kind in (_F32, _I16, _I32))
_AVX512 = llvmlite.binding.get_host_cpu_features().get("avx512f")
_WIDTH = {1: 4, 2: 4, 3: 4, 4: 4} if _AVX512 else {1: 4, 2: 2, 3: 1, 4: 1}
"""Rows of a strip → vectors of each row whose sums stay in registers."""


class _Lanes(types.Type):
    """Type of 16 float32 in a register."""

    def __init__(self) -> None:
        super().__init__("lanes")


@register_model(_Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, _VECTOR)


_lanes, _f32, _i64 = _Lanes(), types.float32, types.int64
_jit: Any = kernel()


def _operation(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make an operation of compiled code from the function that writes its LLVM instructions."""

    def made(write: Callable[..., Any]) -> Any:
        def typed(context: Any, *given: Any) -> Any:
            return result(*arguments), lambda context, builder, signature, values: write(builder, *values)

        names = ["context", *(f"argument_{i}" for i in range(len(arguments)))]
        kind = inspect.Parameter.POSITIONAL_ONLY
        typed.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
        typed.__name__ = write.__name__
        return intrinsic(typed)

    return made


def _infix(symbol: Any, instruction: str) -> None:
    """Define `symbol` between lanes, and between lanes and float32."""
    signatures = [_lanes(_lanes, _lanes), _lanes(_lanes, _f32), _lanes(_f32, _lanes)]
    infer_global(symbol)(type("_Infix", (ConcreteTemplate,), {"cases": signatures}))

    def write(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return getattr(builder, instruction)(*(x if x.type == _VECTOR else _spread(builder, x) for x in values))

    for signature in signatures:
        lower_builtin(symbol, *signature.args)(write)


_infix(operator.add, "fadd")
_infix(operator.sub, "fsub")
_infix(operator.mul, "fmul")
_infix(operator.truediv, "fdiv")


def _constant(kind: ir.Type, value: Any) -> ir.Constant:
    return ir.Constant(ir.VectorType(kind, LANES), [value] * LANES)


def _pointer(builder: Any, address: Any, kind: ir.Type) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _read(builder: Any, address: Any, kind: ir.Type = _VECTOR) -> Any:
    return builder.load(_pointer(builder, address, kind), align=2 if kind == _SHORTS else 4)


def _write(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, _pointer(builder, address, value.type), align=2 if value.type == _SHORTS else 4)


def _spread(builder: Any, value: Any) -> Any:
    """The same number in all lanes."""
    one = builder.insert_element(ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined), value, _I32(0))
    return _pick(builder, one, one, [0] * LANES)


def _pick(builder: Any, first: Any, second: Any, lanes: Any) -> Any:
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(_I32, len(lanes)), list(lanes)))


def _fused(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """x y + z, rounded once."""
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.v16f32"), [x, y, z])


def _widened(builder: Any, address: Any) -> Any:
    """bfloat16 numbers are the high halves of float32 numbers."""
    bits = builder.zext(_read(builder, address, _SHORTS), _WORDS)
    return builder.bitcast(builder.shl(bits, _constant(_I32, 16)), _VECTOR)


# --- numbers in memory --------------------------------------------------------------------------------------------


load = _operation(_lanes, _i64)(_read)
store = _operation(types.void, _lanes, _i64)(_write)
load_bfloat16 = _operation(_lanes, _i64)(_widened)
set_float32 = _operation(types.void, _f32, _i64)(_write)


@_operation(types.void, _lanes, _i64)
def store_bfloat16(builder: Any, value: Any, address: Any) -> None:
    """Round to the nearest, ties to even; NaN stays NaN."""
    bits = builder.bitcast(value, _WORDS)
    odd = builder.and_(builder.lshr(bits, _constant(_I32, 16)), _constant(_I32, 1))
    rounded = builder.add(bits, builder.add(odd, _constant(_I32, 0x7FFF)))
    nan = builder.fcmp_unordered("uno", value, value)
    kept = builder.lshr(builder.select(nan, _constant(_I32, 0x7FC00000), rounded), _constant(_I32, 16))
    _write(builder, builder.trunc(kept, _SHORTS), address)


@intrinsic
def address_of(context: Any, pointer: Any) -> Any:
    return _i64(pointer), lambda context, builder, signature, values: builder.ptrtoint(values[0], _I64)


@_operation(_i64)
def spare(builder: Any) -> Any:
    """Address of space for 16 numbers on the calling function's stack."""
    with builder.goto_entry_block():
        return builder.ptrtoint(builder.alloca(ir.ArrayType(_F32, LANES)), _I64)


@_operation(types.void, _i64, _i64, _i64)
def copy(builder: Any, source: Any, target: Any, size: Any) -> None:
    cgutils.raw_memcpy(builder, _pointer(builder, target, _I8), _pointer(builder, source, _I8), size, 1)


@_operation(_i64, _i64)
def take_ticket(builder: Any, address: Any) -> Any:
    """Return the counter's value, and increase it by one atomically."""
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


# --- numbers in registers -----------------------------------------------------------------------------------------


def _larger(builder: Any, x: Any, y: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


splat = _operation(_lanes, _f32)(_spread)
fma = _operation(_lanes, _lanes, _lanes, _lanes)(_fused)
maximum = _operation(_lanes, _lanes, _lanes)(_larger)


@_operation(_lanes, _lanes, _f32, _lanes, _lanes)
def where_below(builder: Any, x: Any, bound: Any, y: Any, z: Any) -> Any:
    """y where x < bound, else z."""
    return builder.select(builder.fcmp_ordered("<", x, _spread(builder, bound)), y, z)


@_operation(_lanes, _lanes, _lanes)
def with_sign(builder: Any, x: Any, sign: Any) -> Any:
    """x with its sign bit set where that of another number is."""
    bit = builder.and_(builder.bitcast(sign, _WORDS), _constant(_I32, 0x80000000))
    return builder.bitcast(builder.or_(builder.bitcast(x, _WORDS), bit), _VECTOR)


@_operation(_lanes, _lanes, _i64, _i64)
def within(builder: Any, x: Any, first: Any, end: Any) -> Any:
    """x in the lanes [first, end), else -inf."""
    lane = ir.Constant(ir.VectorType(_I64, LANES), list(range(LANES)))
    behind = builder.icmp_signed(">=", lane, _spread(builder, first))
    inside = builder.and_(behind, builder.icmp_signed("<", lane, _spread(builder, end)))
    return builder.select(inside, x, _constant(_F32, float("-inf")))


@_operation(_lanes, _lanes)
def power_of_two(builder: Any, x: Any) -> Any:
    """2^k of x = 1.5 * 2^23 + 127 + k, -126 <= k <= 127: the sum's last bits are the exponent."""
    return builder.bitcast(builder.shl(builder.bitcast(x, _WORDS), _constant(_I32, 23)), _VECTOR)


def _folded(builder: Any, x: Any, join: Callable[[Any, Any, Any], Any]) -> Any:
    """Join lanes l and l + 8 first, then l and l + 4, l + 2, l + 1."""
    for width in (8, 4, 2, 1):
        x = join(builder, _pick(builder, x, x, range(width)), _pick(builder, x, x, range(width, 2 * width)))
    return builder.extract_element(x, _I32(0))


@_operation(_f32, _lanes)
def total(builder: Any, x: Any) -> Any:
    return _folded(builder, x, ir.IRBuilder.fadd)


@_operation(_f32, _lanes)
def largest(builder: Any, x: Any) -> Any:
    return _folded(builder, x, _larger)


@_operation(_f32, _lanes)
def first_lane(builder: Any, x: Any) -> Any:
    return builder.extract_element(x, _I32(0))


# --- matrices -----------------------------------------------------------------------------------------------------


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
    """16 rows of 32 bfloat16 become columns of float32; two neighbours move as one number."""
    for i, column in enumerate(_transposed(builder, source, source_stride, _WORDS)):
        even = builder.shl(column, _constant(_I32, 16))
        odd = builder.and_(column, _constant(_I32, 0xFFFF0000))
        for at, half in ((2 * i, even), (2 * i + 1, odd)):
            _write(builder, builder.bitcast(half, _VECTOR), builder.add(target, builder.mul(target_stride, _I64(at))))


@_operation(types.void, *[_i64] * 11)
def add_strip(
    builder: Any, a: Any, a_stride: Any, b: Any, b_stride: Any, half: Any, c: Any, c_stride: Any, rows: Any,
    columns: Any, first: Any, end: Any,
) -> None:  # fmt: skip
    """`add_product` of 1 to 4 rows: a piece of code for each case."""
    which, stop = builder.add(builder.mul(rows, _I64(2)), half), builder.mul(columns, _I64(4))
    for count, width in _WIDTH.items():
        for is_half in (0, 1):
            case = builder.icmp_signed("==", which, _I64(2 * count + is_half))
            with builder.if_then(case):
                start = _I64(0)
                for wide in sorted({width, 1}, reverse=True):
                    step = _I64(4 * LANES * wide)
                    whole = builder.mul(builder.sdiv(stop, step), step)
                    with cgutils.for_range_slice(builder, start, whole, step, _I64) as (at, _):
                        source = builder.add(b, builder.lshr(at, _I64(is_half)))
                        _add_columns(
                            builder, count, wide, is_half, a, a_stride, source, b_stride, builder.add(c, at), c_stride,
                            first, end,
                        )  # fmt: skip
                    start = whole


def _add_columns(
    builder: Any, rows: int, wide: int, half: int, a: Any, a_stride: Any, b: Any, b_stride: Any, c: Any, c_stride: Any,
    first: Any, end: Any,
) -> None:  # fmt: skip
    """`add_product` of `wide` vectors of columns, whose sums stay in registers."""
    targets = [
        builder.add(c, builder.add(builder.mul(c_stride, _I64(r)), _I64(4 * LANES * x)))
        for r in range(rows)
        for x in range(wide)
    ]
    sums = [cgutils.alloca_once_value(builder, _read(builder, target)) for target in targets]
    with cgutils.for_range_slice(builder, first, end, _I64(1), _I64) as (t, _):
        source, factors = builder.add(b, builder.mul(t, b_stride)), builder.add(a, builder.mul(t, _I64(4)))
        read, size = (_widened, 2) if half else (_read, 4)
        vectors = [read(builder, builder.add(source, _I64(size * LANES * x))) for x in range(wide)]
        for r in range(rows):
            factor = _read(builder, builder.add(factors, builder.mul(a_stride, _I64(r))), _F32)
            spread = _spread(builder, factor)
            for vector, place in zip(vectors, sums[r * wide : (r + 1) * wide], strict=True):
                builder.store(_fused(builder, spread, vector, builder.load(place)), place)
    for target, place in zip(targets, sums, strict=True):
        _write(builder, builder.load(place), target)


@_jit
def add_product(a: Any, a_stride: Any, b: Any, b_stride: Any, half: Any, c: Any, c_stride: Any, rows: Any, columns: Any,
                first: Any, end: Any) -> None:  # fmt: skip
    """c[r][x] += a[r][t] b[t][x], fused, in the order of t in [first, end). `columns` is a multiple of 16.

    b is of bfloat16 where `half`, all else of float32.
    """
    while rows >= 4:
        add_strip(a, a_stride, b, b_stride, half, c, c_stride, 4, columns, first, end)
        a, c, rows = a + 4 * a_stride, c + 4 * c_stride, rows - 4
    add_strip(a, a_stride, b, b_stride, half, c, c_stride, rows, columns, first, end)
