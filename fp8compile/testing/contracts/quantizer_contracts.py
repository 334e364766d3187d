"""Contracts of quantizers, one function each; a quantizer that fulfills all works like built-in ones.

Inputs have odd shapes and each floating dtype, and some blocks that are zero, NaN or infinite.
"""

from __future__ import annotations

import copy
import math
import pickle
import sys
from collections.abc import Iterator, Sequence
from dataclasses import FrozenInstanceError, fields, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fp8compile import ops
from fp8compile.quantizers import Quantizer
from fp8compile.tensor import quantize
from fp8compile.testing.bits import difference
from fp8compile.testing.contracts.contract import (
    BrokenContract,
    check_contracts,
    compiled_afresh,
    looked_at,
    looking_at,
)
from fp8compile.testing.contracts.fresh_process import fresh_texts
from fp8compile.testing.contracts.product_contracts import (
    code_zero_is_zero,
    gemms_read_what_dequantize_gives,
    products_are_those_of_dequantize,
)
from fp8compile.testing.contracts.run_on_shards import check_shards
from fp8compile.testing.graphs.recording import BACKENDS

__all__ = ["check_quantizer"]

FROZEN = "write @dataclass(frozen=True, repr=False) above the class, and keep every value in a field"
PLAIN = "compute only with PyTorch functions of the arguments and fields, in float32 (divide with exact_quotient)"

Device = torch.device


def _random(shape: Sequence[int], dtype: torch.dtype, device: Device) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(tuple(shape), generator=generator).to(device, dtype)


def _taken(q: Quantizer, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return ``shape``, with sizes rounded up to multiples of 2 or 16 if the quantizer needs that.

    None if it takes none of these shapes, and raises a ValueError for one of them.
    """
    refused = False
    for unit in (1, 2, 16):
        sizes = tuple(-(-size // unit) * unit for size in shape)
        try:
            if tuple(q.values_shape(q.codes_shape(sizes))) == sizes:
                return sizes
        except ValueError:
            refused = True
    return None if refused else shape


def _inputs(q: Quantizer, device: Device) -> Iterator[Tensor]:
    rows, columns = (3 * size + 1 if size > 0 else other for size, other in zip(q.block, (7, 40), strict=True))
    for shape, order, dtype in (
        ((rows, columns), (0, 1), torch.float32),
        ((17, 24), (0, 1), torch.bfloat16),
        ((17, 24), (1, 0), torch.float16),
        ((5, 3, 40), (1, 0, 2), torch.bfloat16),
        ((130,), (0,), torch.float32),
        ((1, 32), (0, 1), torch.bfloat16),
        ((0, 32), (0, 1), torch.bfloat16),
    ):
        if (taken := _taken(q, shape)) is not None:  # each permutation is its own inverse
            yield _random([taken[dim] for dim in order], dtype, device).permute(order)


def _blocky(q: Quantizer, device: Device, dtype: torch.dtype = torch.float32) -> Tensor:
    """A random matrix of several whole and partial blocks of the quantizer; magnitudes differ by row."""
    x = next(_inputs(q, device))
    grown = torch.exp2(torch.arange(x.shape[0], device=device) % 9 - 4.0).unsqueeze(1)
    return (x * grown).to(dtype)


def _first_block(q: Quantizer, x: Tensor) -> tuple[slice, slice]:
    """Return the row and column slices of the block of ``x`` with element (0, 0).

    With two levels of scales the slices cover all of ``x``, because the outer scale depends on all elements.
    """
    if q.has_outer_scale():
        return slice(None), slice(None)
    rows, columns = (None if size == -1 else size for size in q.block)
    return slice(rows), slice(columns)


def _steps(q: Quantizer, x: Tensor) -> dict[str, Tensor]:
    """Return the results of all quantization steps of ``x`` by name, such as "amax" and "codes".

    Steps are called through the operators' implementations, which check shapes and dtypes.
    """
    impl = {name: op.impl for name, op in ops.OPS.items()}
    found = {"amax": impl["fp8compile::amax"](x, q)}
    if q.has_outer_scale():
        found["outer_amax"] = impl["fp8compile::outer_amax"](found["amax"], q)
        scales = impl["fp8compile::two_scales"](found["amax"], found["outer_amax"], q)
        found["multiplier"], found["scale"], found["outer_scale"] = scales
    else:
        found["multiplier"], found["scale"] = impl["fp8compile::scale"](found["amax"], q)
    found["codes"] = impl["fp8compile::cast"](x, found["multiplier"], q)
    found["values"] = impl["fp8compile::dequantize"](*_dequantize_arguments(q, found, torch.float32))
    return found


def _dequantize_arguments(q: Quantizer, steps: dict[str, Tensor], dtype: torch.dtype) -> tuple[Any, ...]:
    outer = (steps["outer_scale"],) if q.has_outer_scale() else ()
    return steps["codes"], steps["scale"], q, dtype, *outer


# ---------------------------------------------------------------------------------- as a value


def equal_after_copy_and_pickle(q: Quantizer, device: Device) -> None:
    """A copy, a pickled copy and a quantizer with equal fields equal the quantizer, and have its hash."""
    for how, make in {
        "copy.copy": copy.copy,
        "copy.deepcopy": copy.deepcopy,
        "pickle": lambda value: pickle.loads(pickle.dumps(value)),
        "dataclasses.replace": replace,
    }.items():
        try:
            other = make(q)
        except Exception as error:
            raise BrokenContract(
                expected=f"{how} gives an equal quantizer",
                found=f"{type(error).__name__}: {error}",
                mend="define the class at the top level of a module, with every field a plain argument",
            ) from error
        if type(other) is not type(q) or other != q or hash(other) != hash(q):
            raise BrokenContract(
                expected=f"{how} gives an equal quantizer with the same hash",
                found=f"{other!r}, equal: {other == q}, same hash: {hash(other) == hash(q)}",
                mend=FROZEN + "; do not define __eq__ and __hash__",
            )


def different_fields_differ(q: Quantizer, device: Device) -> None:
    """Two quantizers that differ in a field are not equal."""
    others = [
        replace(q, block=block) for block in ((1, -1), (-1, -1), (-1, 1)) if block != q.block and _makes(q, block)
    ]
    for other in others:
        if other == q or other.__fx_repr__()[0] == q.__fx_repr__()[0]:
            raise BrokenContract(
                expected=f"{q!r} and {other!r} are different, and so are their texts in a graph",
                found=f"equal: {other == q}, same text: {other.__fx_repr__()[0] == q.__fx_repr__()[0]}",
                mend="do not define __eq__, __hash__ and __fx_repr__: a graph of one would run for the other",
            )


def _makes(q: Quantizer, block: tuple[int, int]) -> bool:
    try:
        replace(q, block=block)
    except (TypeError, ValueError):  # the quantizer's class allows no such block
        return False
    return True


def immutable(q: Quantizer, device: Device) -> None:
    """No attribute of the quantizer can be assigned, and all of its values are in fields."""
    names = [field.name for field in fields(q)]
    if extra := sorted(set(vars(q)) - set(names)):
        raise BrokenContract(
            expected=f"it holds its fields ({', '.join(names)}) and nothing else",
            found=f"also {', '.join(extra)}, which equality and a graph's text ignore",
            mend="make it a field, or compute it in a method",
        )
    for name in names:
        try:
            setattr(q, name, getattr(q, name))
        except FrozenInstanceError:
            continue
        raise BrokenContract(
            expected=f"assigning {name} raises FrozenInstanceError", found="it was assigned", mend=FROZEN
        )


def text_in_graphs_rebuilds_it(q: Quantizer, device: Device) -> None:
    """A quantizer's text ``__fx_repr__`` evaluates to an equal quantizer, and refers only to types."""
    text, names = q.__fx_repr__()
    others = [name for name, value in names.items() if not isinstance(value, type)]
    if others:
        raise BrokenContract(
            expected="__fx_repr__ names types only",
            found=f"{', '.join(others)} is not a type, which breaks PyTorch's cache",
            mend="write no __fx_repr__",
        )
    again = eval(text, dict(names))  # what PyTorch does with it
    if again != q:
        raise BrokenContract(
            expected=f"the text {text} evaluates to {q!r}", found=repr(again), mend="write no __fx_repr__"
        )


def text_in_a_fresh_process(q: Quantizer, device: Device) -> None:
    """A quantizer's text in a graph is equal in all processes, and changes if its class is edited."""
    module = sys.modules.get(type(q).__module__)
    if module is None or not getattr(module, "__file__", None) or module.__name__ == "__main__":
        raise BrokenContract(
            expected="its class can be imported",
            found=f"module {type(q).__module__!r} has no name or file that another process can import",
            mend="define the class in a module of its own",
        )
    as_it_is, again, edited = fresh_texts(q, module)
    if as_it_is.error is not None or not as_it_is.equal:
        raise BrokenContract(
            expected="a fresh process unpickles it, and its text there evaluates to an equal one",
            found=as_it_is.error or f"{as_it_is.text} evaluates to a different one",
            mend="define the class at the top level of a module that can be imported by its name",
        )
    if as_it_is.text != again.text:
        raise BrokenContract(
            expected=f"the same text in two fresh processes, {as_it_is.text}",
            found=again.text or str(again.error),
            mend="no field may depend on the process (hash(), id(), time), because every compile cache would miss",
        )
    if edited.error is not None or edited.text == as_it_is.text:
        raise BrokenContract(
            expected=f"a different text after {module.__file__} was edited, or a compile cache would run old code",
            found=edited.error or "the same text",
            mend="do not define __fx_repr__; keep what the steps call in the package of the class",
        )


# ---------------------------------------------------------------------------------- layout


def layout_is_what_it_says(q: Quantizer, device: Device) -> None:
    """Results of each quantization step have the shapes and dtypes that the quantizer's methods declare."""
    for x in looked_at(_inputs(q, device)):
        try:
            steps = _steps(q, x)
        except TypeError as error:
            raise BrokenContract(
                expected=f"steps whose results match the declared shapes and dtypes, for x of shape {tuple(x.shape)}, "
                f"{x.dtype}",
                found=str(error),
                mend="make the step agree with codes_shape, scale_shape and scale_dtype",
            ) from error
        shape = tuple(x.shape)
        grid, codes = tuple(q.scale_shape(shape)), tuple(q.codes_shape(shape))
        if tuple(q.values_shape(codes)) != shape:
            raise BrokenContract(
                expected=f"values_shape({codes}) is {shape}",
                found=str(tuple(q.values_shape(codes))),
                mend="make values_shape the inverse of codes_shape",
            )
        values = q.scale_values(steps["scale"])
        if (tuple(values.shape), values.dtype) != (grid, torch.float32):
            raise BrokenContract(
                expected=f"scale_values of shape {grid}, float32",
                found=f"shape {tuple(values.shape)}, {values.dtype}",
                mend="return the stored scales as float32 numbers",
            )


def transposed_is_of_the_transposed_matrix(q: Quantizer, device: Device) -> None:
    """``transposed()`` quantizes x.t() to x's codes and scales, transposed; applied twice it gives ``q``."""
    turned = q.transposed()
    if type(turned) is not type(q) or turned.block != q.block[::-1] or turned.transposed() != q:
        raise BrokenContract(
            expected=f"a {type(q).__name__} with block {q.block[::-1]}, whose transposed() is the original",
            found=repr(turned),
            mend="let transposed() swap the sides of every block that it has, with dataclasses.replace",
        )
    x = looking_at(_blocky(q, device))
    given, other = _steps(q, x), _steps(turned, x.t())
    for name in ("amax", "multiplier", "scale", "codes", "values"):
        if (differs := difference(other[name], given[name].t())) is not None:
            raise BrokenContract(
                expected=f"{name} of x.t() with transposed() equals that of x, transposed",
                found=differs,
                mend="override transposed() if fields other than block refer to rows and columns",
            )


# ---------------------------------------------------------------------------------- numerics


def scale_undoes_the_multiplier(q: Quantizer, device: Device) -> None:
    """A scale, times any outer scale, is 1 / multiplier; dequantized values err by at most 0.3 times the amax."""
    for x in looked_at((_blocky(q, device), *_inputs(q, device))):
        steps = _steps(q, x)
        scale = q.scale_values(steps["scale"]).double()
        product = scale * steps["multiplier"].double() * (steps["outer_scale"] if q.has_outer_scale() else 1)
        product = product.masked_fill(scale == 0, 1.0)  # with two levels, a block far below the largest has scale 0
        if not ((product - 1).abs() <= 2**-22).all():
            raise BrokenContract(
                expected="scale times multiplier is 1, up to float32 rounding",
                found=f"{product.min().item()} to {product.max().item()} for x of shape {tuple(x.shape)}",
                mend="let scale_of and scale_values give 1 / multiplier: exact_quotient(1.0, multiplier)",
            )
        error = (steps["values"] - x.float()).abs()
        largest = x.float().abs().max() if x.numel() else error.sum()
        if x.numel() and not (error <= 0.3 * largest).all():
            raise BrokenContract(
                expected="each dequantized value is within 0.3 of the largest magnitude",
                found=f"an error of {error.max().item()}, where the largest magnitude is {largest.item()}",
                mend="let multiplier map the amax to at most the largest number of the format, and let cast use it",
            )


def empty_block_gives_zeros(q: Quantizer, device: Device) -> None:
    """A block of zeros has a finite multiplier (1 / scale), and dequantizes to zeros."""
    x = looking_at(_blocky(q, device))
    block = _first_block(q, x)
    x[block] = 0.0
    steps = _steps(q, x)
    first = steps["multiplier"].flatten()[0].item()
    if not (math.isfinite(first) and first > 0):
        raise BrokenContract(
            expected="the multiplier of a block of zeros is positive and finite (1 in the built-in rules)",
            found=str(first),
            mend="write torch.where(amax <= 0, 1.0, multiplier), or use a lower bound for the amax",
        )
    if steps["values"][block].any():
        raise BrokenContract(
            expected="zeros are dequantized to zeros",
            found=f"{steps['values'][block].abs().max().item()}",
            mend="let cast round the value times the multiplier, and add nothing",
        )


def what_is_not_finite_shows(q: Quantizer, device: Device) -> None:
    """A block with a NaN or an infinity dequantizes to NaN as a whole, and other blocks don't change."""
    clean = _steps(q, _blocky(q, device))
    if not clean["values"].isfinite().all():
        raise BrokenContract(
            expected="finite values are dequantized to finite values",
            found=f"{int((~clean['values'].isfinite()).sum())} are not",
            mend="clamp to the format's range before rounding, as formats' encode does",
        )
    for bad in (math.nan, math.inf, -math.inf):
        x = looking_at(_blocky(q, device))
        x[0, 0] = bad
        steps, block = _steps(q, x), _first_block(q, x)
        inside = steps["values"][block]
        if not inside.isnan().all() or not steps["multiplier"].flatten()[0].isnan():
            raise BrokenContract(
                expected=f"a block with {bad} has multiplier NaN, and all its values are dequantized to NaN",
                found=f"multiplier {steps['multiplier'].flatten()[0].item()}, and {int((~inside.isnan()).sum())} of "
                f"{inside.numel()} values are not NaN",
                mend="write torch.where(amax.isfinite(), multiplier, torch.nan) at the end of multiplier",
            )
        outside = torch.ones_like(x, dtype=torch.bool)
        outside[block] = False
        if (differs := difference(steps["values"][outside], clean["values"][outside])) is not None:
            raise BrokenContract(
                expected=f"a {bad} changes only its own block",
                found=differs,
                mend="let amax use the values of one block only (fp8compile.library.block_amax)",
            )


def nothing_but_the_arguments_decides(q: Quantizer, device: Device) -> None:
    """Quantization doesn't modify its input, and gives the same bits if it is repeated."""
    x = looking_at(_blocky(q, device))
    before = x.clone()
    first, second = _steps(q, x), _steps(q, x)
    if (differs := difference(x, before)) is not None:
        raise BrokenContract(
            expected="the steps do not change x", found=differs, mend="use no method in place (ending in _) on x"
        )
    for name, value in first.items():
        if (differs := difference(second[name], value)) is not None:
            raise BrokenContract(
                expected=f"{name} of the same x is the same on the second call", found=differs, mend=PLAIN
            )


# ---------------------------------------------------------------------------------- compiled, sharded


PARTS = ("codes", "scale", "values", "outer scale")


def _quantized(x: Tensor, q: Quantizer) -> tuple[Tensor, ...]:
    quantized = quantize(x * 1.5, q)  # a product before it, which Inductor fuses with the cast
    outer = () if quantized.outer_scale is None else (quantized.outer_scale,)
    return quantized.codes, quantized.scale, quantized.dequantize(torch.float32), *outer


def _specials(q: Quantizer, device: Device, dtype: torch.dtype) -> Tensor:
    x = _blocky(q, device, dtype)
    x[_first_block(q, x)] = 0.0
    x[-1, -1] = math.nan
    return x


def compiled_gives_the_bits_of_eager(q: Quantizer, device: Device) -> None:
    """Quantizing compiles without a graph break, and gives bitwise the results of eager mode."""
    _, odd, _, *others = _inputs(q, device)
    samples = [_blocky(q, device, torch.bfloat16), _specials(q, device, torch.float32), odd, others[0]]
    for backend in BACKENDS:
        compiled = compiled_afresh(lambda xs: [_quantized(x, q) for x in xs], backend=backend, dynamic=False)(samples)
        for x, got in zip(samples, compiled, strict=True):
            for name, a, b in zip(PARTS, got, _quantized(x, q), strict=False):
                if (differs := difference(a, b)) is not None:
                    raise BrokenContract(
                        expected=f"{name} compiled with {backend} equals eager mode, x {tuple(x.shape)} {x.dtype}",
                        found=differs,
                        mend=PLAIN,
                    )


def _graphs() -> int:
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def one_graph_for_every_size(q: Quantizer, device: Device) -> None:
    """With dynamic sizes, one graph serves matrices of every size, bitwise equal to eager mode."""
    compiled = compiled_afresh(_quantized, backend="aot_eager", dynamic=True)
    counts = [_graphs()]
    # two blocks or more along each dim, because PyTorch specialises on 1
    row, column = (max(size, 8) for size in q.block)
    asked = [(3 * row, 5 * column), (2 * row + 1, 4 * column - 1), (7 * row + 3, 2 * column + 1)]
    sizes = [_taken(q, size) or size for size in asked]
    for rows, columns in sizes:
        x = _random((rows, columns), torch.bfloat16, device)
        got = compiled(x, q)
        counts.append(_graphs())
        for name, a, b in zip(PARTS, got, _quantized(x, q), strict=False):
            if (differs := difference(a, b)) is not None:
                raise BrokenContract(
                    expected=f"{name} of shape ({rows}, {columns}), with dynamic sizes, equals eager mode",
                    found=differs,
                    mend="compute sizes from x.shape in the step itself",
                )
    made = [after - before for before, after in pairwise(counts)]
    if made != [1, 0, 0]:
        raise BrokenContract(
            expected=f"one graph for {', '.join(map(str, sizes))}",
            found=f"{' + '.join(map(str, made))} graphs",
            mend="do not use a size in `if`; use torch.where, or a padded block as block_amax does",
        )


def equal_one_runs_the_same_graph(q: Quantizer, device: Device) -> None:
    """A call with an equal quantizer compiles no new graph; a call with a different quantizer does."""
    compiled, x = (
        compiled_afresh(_quantized, backend="aot_eager", dynamic=False),
        _random(_taken(q, (24, 40)) or (24, 40), torch.bfloat16, device),
    )
    other = next((replace(q, block=b) for b in ((1, -1), (-1, -1), (-1, 1)) if b != q.block and _makes(q, b)), None)
    counts = [_graphs()]
    for value in (q, copy.deepcopy(q), *(() if other is None else (other, other, q))):
        compiled(x, value)
        counts.append(_graphs())
    made = [after - before for before, after in pairwise(counts)]
    expected = [1, 0] if other is None else [1, 0, 1, 0, 0]
    if made != expected:
        raise BrokenContract(
            expected=f"{expected} new graphs for it, an equal one" + (", another, that again, it again" * bool(other)),
            found=str(made),
            mend=FROZEN + "; do not define __eq__ and __hash__",
        )


def _op_arguments(q: Quantizer, x: Tensor) -> dict[str, tuple[Any, ...]]:
    steps = _steps(q, x.clone())
    scales: dict[str, tuple[Any, ...]] = {"fp8compile::scale": (steps["amax"], q)}
    if q.has_outer_scale():
        scales = {
            "fp8compile::outer_amax": (steps["amax"], q),
            "fp8compile::two_scales": (steps["amax"], steps["outer_amax"], q),
        }
    return {
        "fp8compile::amax": (x, q),
        **scales,
        "fp8compile::cast": (x, steps["multiplier"], q),
        "fp8compile::dequantize": _dequantize_arguments(q, steps, x.dtype),
    }


def passes_opcheck(q: Quantizer, device: Device) -> None:
    """PyTorch's own checks of operators (opcheck) pass for ops called with the quantizer."""
    for x in looked_at((_blocky(q, device), *_inputs(q, device))):
        arguments = _op_arguments(q, x)
        for name in arguments:
            checks = ("test_schema", "test_autograd_registration", "test_faketensor")
            try:
                torch.library.opcheck(ops.OPS[name].overload, arguments[name], test_utils=checks)
            except Exception as error:
                raise BrokenContract(
                    expected=f"torch.library.opcheck of {name} with x of shape {tuple(x.shape)} passes",
                    found=f"{type(error).__name__}: {error}",
                    mend="return new tensors with the shapes and dtypes of codes_shape, scale_shape and scale_dtype",
                ) from error


def sharded_gives_the_bits_of_whole(q: Quantizer, device: Device) -> None:
    """Each quantization step on shards gives the whole tensor's results, even if shards divide blocks."""
    for x in looked_at((_blocky(q, device), *_inputs(q, device))):
        arguments = _op_arguments(q, x)
        for name in arguments:
            if (wrong := check_shards(ops.OPS[name], arguments[name]).wrong) is not None:
                raise BrokenContract(
                    expected=f"the concatenated {name} of shards equals {name} of the full tensor",
                    found=wrong,
                    mend="let every step use one block at a time, and amax be a maximum",
                )


CONTRACTS = (
    equal_after_copy_and_pickle,
    different_fields_differ,
    immutable,
    text_in_graphs_rebuilds_it,
    text_in_a_fresh_process,
    layout_is_what_it_says,
    transposed_is_of_the_transposed_matrix,
    scale_undoes_the_multiplier,
    empty_block_gives_zeros,
    what_is_not_finite_shows,
    code_zero_is_zero,
    products_are_those_of_dequantize,
    gemms_read_what_dequantize_gives,
    nothing_but_the_arguments_decides,
    compiled_gives_the_bits_of_eager,
    one_graph_for_every_size,
    equal_one_runs_the_same_graph,
    passes_opcheck,
    sharded_gives_the_bits_of_whole,
)


def check_quantizer(
    quantizer: Quantizer, *, device: torch.device | str = "cpu", skip: Sequence[str] = ()
) -> dict[str, str]:
    """Check that a quantizer works wherever a built-in quantizer does, and print each contract that holds.

    This takes about ten seconds, because it compiles and starts processes. All previously compiled graphs are dropped.

    Args:
        quantizer: A quantizer. Check one instance for each combination of options that changes the computation.
        device: Device to run on.
        skip: Names of contracts to leave out, as the report prints them: a list or tuple.

    Returns:
        For each contract that was not checked, by name, the reason; empty if all were checked.

    Raises:
        TypeError: ``quantizer`` is not a quantizer, or ``skip`` is a single string.
        ValueError: ``skip`` contains an unknown contract.
        AssertionError: The quantizer breaks one or more contracts. The text says for each what was expected, what was
            found and how to fix it.
    """
    if not isinstance(quantizer, Quantizer):
        raise TypeError(f"check_quantizer: `quantizer` is {quantizer!r}; it must be a fp8compile.Quantizer instance.")
    return check_contracts(
        repr(quantizer),
        CONTRACTS,
        (quantizer, torch.device(device)),
        skip=skip,
        foundation=layout_is_what_it_says.__name__,
        state=lambda: (repr(vars(quantizer)), hash(quantizer)),
    )
