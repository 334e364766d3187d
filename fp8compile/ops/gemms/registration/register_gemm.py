"""Register GEMMs of other packages, and check the arguments and the results of their functions."""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fp8compile.layout.quantized import Quantized
from fp8compile.ops.gemms import selection
from fp8compile.ops.gemms.grouped import table as grouped_table
from fp8compile.ops.gemms.grouped.interface import REGISTERED_GROUPED, GroupedGemm, Multiply, product_shape
from fp8compile.ops.gemms.interface import GemmKernel, GemmProblem
from fp8compile.ops.gemms.table import REGISTERED
from fp8compile.quantizers import GemmConfig, Quantizer
from fp8compile.quantizers.check_returned import could_be
from fp8compile.quantizers.constant import salt_with

__all__ = ["register_gemm", "register_grouped_gemm"]

# for each function: the names of its arguments, and a description for error messages
FUNCTIONS: dict[str, tuple[tuple[str, ...], str]] = {
    "takes": (
        ("a", "b"),
        "a function (a, b) of the two quantizers that returns whether the GEMM supports them; type(a) is type(b) "
        "is YourQuantizer tests that they are your own",
    ),
    "lacks": (
        ("problem",),
        "a function (problem) that returns None if the GEMM runs, and otherwise the reason and the advice, as the "
        "rest of a sentence; problem.target has the device's type and compute capability",
    ),
    "multiply": (
        ("a", "b", "out_dtype", "config"),
        "a function (a, b, out_dtype, config) of two fp8compile.library.Quantized that returns their matrix "
        "product, contiguous and in out_dtype",
    ),
    "rows": (
        ("a", "b", "offsets", "out_dtype", "config"),
        "a function (a, b, offsets, out_dtype, config) that multiplies each row of a by the matrix of its group "
        "and returns (R, N), with zeros after the last group",
    ),
    "outer": (
        ("a", "b", "offsets", "out_dtype", "config"),
        "a function (a, b, offsets, out_dtype, config) that returns the sum over the tokens of each group, (E, N, K)",
    ),
}


def _check_name(function: str, name: str, taken: Container[str]) -> None:
    parts = name.split("::") if isinstance(name, str) else []
    if len(parts) != 2 or not all(part.isidentifier() and not keyword.iskeyword(part) for part in parts):
        raise ValueError(f"{function}: the name of a GEMM must have the form 'package::name', got {name!r}.")
    if name in taken:
        raise ValueError(f"{function}: {name} is already registered. Choose another name.")


def _check_function(function: str, name: str, argument: str, given: Any) -> None:
    parameters, what = FUNCTIONS[argument]
    if not inspect.isfunction(given):  # a function has a module, whose source goes into the keys of compile caches
        raise TypeError(f"{function}: {name}: `{argument}` is {given!r}; it must be {what}.")
    signature = inspect.signature(given)
    try:
        signature.bind(*parameters)
    except TypeError as error:
        raise TypeError(
            f"{function}: {name}: `{argument}` has the signature {signature}: {error}. It is called as "
            f"{argument}({', '.join(parameters)})."
        ) from None


def _check_words(function: str, name: str, detail: str, calls: tuple[str, ...]) -> None:
    if not isinstance(detail, str) or not detail:
        raise TypeError(
            f"{function}: {name}: `detail` is {detail!r}; it must be a non-empty string that says how the GEMM runs, "
            "such as 'cuBLAS'."
        )
    if not isinstance(calls, tuple) or not all(isinstance(call, str) and call for call in calls):
        raise TypeError(
            f"{function}: {name}: `calls` is {calls!r}; it must be a tuple of operator names, such as ('_int_mm',)."
        )


def _taken(name: str, takes: Callable[..., Any], a: Quantizer, b: Quantizer) -> bool:
    answer = takes(a, b)
    if type(answer) is not bool:
        raise TypeError(f"{name}: `takes` returned {answer!r} for {a!r} and {b!r}; it must return True or False.")
    return answer


def _lacking(name: str, lacks: Callable[..., Any], problem: GemmProblem) -> str | None:
    answer = lacks(problem)
    if answer is not None and not (isinstance(answer, str) and answer):
        raise TypeError(
            f"{name}: `lacks` returned {answer!r}; it must return None if the GEMM runs, or else a string with the "
            "reason."
        )
    return answer


def _is_contiguous(x: Tensor) -> bool:
    """Whether a tensor is contiguous, or may be contiguous because its sizes or strides are symbolic."""
    return not all(type(size) is int for size in (*x.shape, *x.stride())) or x.is_contiguous()


def _shown(shape: Sequence[Any], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} of shape {tuple(shape)}"


def _product(
    name: str, multiply: Callable[..., Any], a: Quantized, b: Quantized, out_dtype: torch.dtype, config: GemmConfig
) -> Tensor:
    product, shape = multiply(a, b, out_dtype, config), (a.shape[0], b.shape[1])
    if not isinstance(product, Tensor):
        found = repr(product)
    elif product.dtype != out_dtype or not could_be(product.shape, shape):
        found = _shown(product.shape, product.dtype)
    elif not _is_contiguous(product):
        found = f"a tensor with strides {product.stride()}"
    else:
        return product
    raise TypeError(f"{name}: `multiply` returned {found}; it must return a contiguous {_shown(shape, out_dtype)}.")


def _check_parts(
    function: str, name: str, taken: Container[str], functions: dict[str, Any], detail: str, calls: tuple[str, ...]
) -> None:
    """Raise an error if a name, function or text is invalid; else make the functions part of compile cache keys."""
    _check_name(function, name, taken)
    for argument, given in functions.items():
        _check_function(function, name, argument, given)
    _check_words(function, name, detail, calls)
    for argument, given in functions.items():
        salt_with(given.__module__, f"{name} {argument} {given.__qualname__}")


def _new_gemm(
    name: str,
    *,
    takes: Callable[..., Any],
    lacks: Callable[..., Any],
    multiply: Callable[..., Any],
    detail: str,
    calls: tuple[str, ...],
) -> GemmKernel:
    functions = {"takes": takes, "lacks": lacks, "multiply": multiply}
    _check_parts("register_gemm", name, REGISTERED, functions, detail, calls)
    REGISTERED[name] = GemmKernel(
        name=name,
        detail=detail,
        takes=partial(_taken, name, takes),
        lacks=partial(_lacking, name, lacks),
        multiply=partial(_product, name, multiply),
        calls=calls,
    )
    return REGISTERED[name]


def register_gemm(
    name: str,
    *,
    takes: Callable[[Quantizer, Quantizer], bool] | None = None,
    lacks: Callable[[GemmProblem], str | None] | None = None,
    multiply: Callable[[Quantized, Quantized, torch.dtype, GemmConfig], Tensor] | None = None,
    detail: str = "",
    calls: tuple[str, ...] = (),
) -> GemmKernel:
    """Add a GEMM for operands that no other GEMM supports, such as those of your own quantizer.

    The new GEMM is tried after the GEMMs of fp8compile and before emulation. Call this when the module that defines
    the GEMM is imported. Graphs compiled before the call keep their GEMM.

    Args:
        name: ``package::name``; `select_gemm`, ``fp8compile doctor`` and ``fp8compile explain`` show this name.
        takes: ``(a, b) -> bool``. Returns whether the GEMM supports the data and scales of two quantizers, on any
            device. Check the class, ``type(a) is type(b) is YourQuantizer``, and the blocks. The answer is cached.
        lacks: ``(problem) -> str | None``. Called only if the GEMM supports the operands. Returns None if the device
            can run the GEMM; otherwise the end of an error message about the operands, such as ``"needs PyTorch 2.13
            on a CPU."``. The answer is cached.
        multiply: ``(a, b, out_dtype, config) -> Tensor``. Multiplies operands (m, k) and (k, n) and returns a
            contiguous tensor of ``out_dtype``. Operands are never empty. Eager mode runs this function and Inductor
            traces it. The result must equal that of a matmul of the dequantized operands, up to float32 rounding.
        detail: A short description of how the GEMM runs.
        calls: Names of the PyTorch operators that multiply, such as ``("_int_mm",)``; reports count them. List only
            operators that multiply nothing but quantized data.

    Returns:
        The registered GEMM.

    Raises:
        ValueError: The name is not ``package::name``, or is taken.
        TypeError: A function is missing, is not a function or takes other arguments; ``detail`` is not a nonempty
            string; or ``calls`` is not a tuple of names.
    """
    given: dict[str, Any] = {"takes": takes, "lacks": lacks, "multiply": multiply}
    gemm = _new_gemm(name, **given, detail=detail, calls=calls)
    selection.forget_selected()
    return gemm


def _grouped_product(name: str, multiply: Callable[..., Any], a: Quantized, b: Quantized, *rest: Any) -> Tensor:
    product, (offsets, out_dtype, _) = multiply(a, b, *rest), rest
    shape = product_shape(a.codes, b.codes, offsets)
    if isinstance(product, Tensor) and product.dtype == out_dtype and could_be(product.shape, shape):
        return product
    found = _shown(product.shape, product.dtype) if isinstance(product, Tensor) else repr(product)
    raise TypeError(f"{name}: the registered function returned {found}; it must return {_shown(shape, out_dtype)}.")


def _new_grouped_gemm(
    name: str,
    *,
    takes: Callable[..., Any],
    lacks: Callable[..., Any],
    rows: Callable[..., Any],
    outer: Callable[..., Any],
    detail: str,
    calls: tuple[str, ...],
    is_opaque: bool,
) -> GroupedGemm:
    functions = {"takes": takes, "lacks": lacks, "rows": rows, "outer": outer}
    _check_parts("register_grouped_gemm", name, REGISTERED_GROUPED, functions, detail, calls)
    return GroupedGemm(
        name=name,
        detail=detail,
        takes=partial(_taken, name, takes),
        lacks=partial(_lacking, name, lacks),
        rows=partial(_grouped_product, name, rows),
        outer=partial(_grouped_product, name, outer),
        calls=calls,
        is_opaque=is_opaque,
    )


def register_grouped_gemm(
    name: str,
    *,
    takes: Callable[[Quantizer, Quantizer], bool] | None = None,
    lacks: Callable[[GemmProblem], str | None] | None = None,
    rows: Multiply | None = None,
    outer: Multiply | None = None,
    detail: str = "",
    calls: tuple[str, ...] = (),
    is_opaque: bool = False,
    before_ours: bool = False,
) -> GroupedGemm:
    """Add a grouped GEMM for experts, such as one from another library.

    Call this when the module that defines the GEMM is imported. Graphs compiled before the call keep their GEMM.

    Args:
        name: ``package::name``; ``fp8compile doctor`` and ``fp8compile explain`` show this name.
        takes: ``(a, b) -> bool``, as for `register_gemm`. The quantizers are over (m, k) and (k, n) of one group.
        lacks: ``(problem) -> str | None``, as for `register_gemm`.
        rows: ``(a, b, offsets, out_dtype, config) -> Tensor``. Multiplies each row of a, (R, K), by its group's matrix
            in b, (E, N, K). Returns (R, N), with zeros in rows after the last group. See `Quantized` for the layout of
            data and scales.
        outer: ``(a, b, offsets, out_dtype, config) -> Tensor``. Multiplies a, (N, C), and b, (K, C), and sums over the
            tokens of each group; C is the number of tokens after padding. Returns (E, N, K), with zeros for a group
            without tokens.
        detail: A short description of how the GEMM runs.
        calls: Names of the operators that multiply quantized data; reports count them.
        is_opaque: Whether the GEMM reads ``offsets`` on the host. Compiled code can't do that, so the op then stays
            one call.
        before_ours: Whether the new GEMM is tried before fp8compile's GEMMs instead of after them.

    Returns:
        The registered GEMM.

    Raises:
        ValueError: The name is not ``package::name``, or is taken.
        TypeError: A function is missing, is not a function or takes other arguments; ``detail`` is not a nonempty
            string; or ``calls`` is not a tuple of names.
    """
    parts: dict[str, Any] = {"takes": takes, "lacks": lacks, "rows": rows, "outer": outer}
    gemm = _new_grouped_gemm(name, **parts, detail=detail, calls=calls, is_opaque=is_opaque)
    REGISTERED_GROUPED[name] = gemm
    if before_ours:
        grouped_table.BEFORE_OURS.add(name)
    grouped_table.forget_selected()
    return gemm
