"""Finds the GEMMs in a model's graphs, each with its layer and the formats of its operands.

model, inputs --Dynamo, AOTAutograd--> forward and backward graphs, unfolded
|                                        |  each GEMM: its operands, where its result goes
+-- parameters by identity --------------+--> GraphGemm: layer, which of the three GEMMs, operands' dtypes
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

from torch import Tensor, fx

from fp8compile.ops.gemms.by_mx import may_run_by_mx
from fp8compile.ops.gemms.mx import MX_BLOCK, is_mx
from fp8compile.ops.gemms.torch_scaled_mm import ALIGNMENT
from fp8compile.quantizers import GEMMS, Gemm, GemmConfig, Quantizer, Recipe, TwoLevelScaling, gemm_kind
from fp8compile.testing.explain.attribution import Owners, Unknown
from fp8compile.testing.explain.capture import Recorded
from fp8compile.testing.explain.module_stack import Names
from fp8compile.testing.explain.unfolded_graph import Value
from fp8compile.testing.explain.weight_flow import LAYER_OPS, PRODUCTS
from fp8compile.testing.graphs.recording import node_value, user_place

__all__ = ["GraphGemm", "code_sizes", "describe", "graph_gemms", "multiplied"]

OUTPUT, GRAD_INPUT, GRAD_WEIGHT = GEMMS


@dataclass(frozen=True, kw_only=True)
class GraphGemm:
    """One GEMM in a graph.

    Attributes:
        layer: Name of the layer; None if it belongs to no layer.
        gemm: "output", "grad_input" or "grad_weight".
        op: The operator.
        runs: Formats and scales of the operands, as `describe` formats them; in high precision, their dtype.
        is_fp8: Whether both operands are codes, of FP8 or FP4.
        m: Rows of the result.
        k: Size of the summed dim.
        n: Columns of the result.
        in_bytes: Bytes of each element of the operands, before they are quantized.
        out_bytes: Bytes of each element of the result.
        code_bits: Bits of each code; the larger number if operands have two formats.
        sum_to: For codes, a GPU pads ``k`` to a multiple of this number.
        by_mx: Whether a GPU that has a GEMM for MX codes (a power-of-two scale per 32) would use the MX GEMM.
        casts: Source, quantizer and number of elements of each quantized operand. Equal entries are one cast.
        parameters: For each of ``casts``, whether its source is a parameter.
        groups: Number of experts, whose matrices the GEMM multiplies; 1 for a linear.
        shared_by: Number of layers whose weights this GEMM multiplies.
        file: File of the user's code that calls the GEMM; empty if unknown.
        line: Line in that file; 0 if unknown.
    """

    layer: str | None
    gemm: str
    op: str
    runs: str
    is_fp8: bool
    m: int
    k: int
    n: int
    in_bytes: int
    out_bytes: int
    code_bits: int = 8
    sum_to: int = ALIGNMENT
    by_mx: bool = False
    casts: tuple[tuple[Any, Quantizer, int], ...] = ()
    parameters: tuple[bool, ...] = ()
    groups: int = 1
    shared_by: int = 1
    file: str = ""
    line: int = 0


def _described(a: Quantizer, b: Quantizer) -> str:
    kind = gemm_kind(a.block, b.block)
    if type(a) is type(b) is TwoLevelScaling:
        kind = "nvfp4"
    elif is_mx(a) and is_mx(b):
        kind = "mxfp8"
    return f"{_codes_of(a)} x {_codes_of(b)} {kind}"


def _codes_of(quantizer: Quantizer) -> str:
    named = quantizer.gemm_format() is not None or type(quantizer) is TwoLevelScaling
    return quantizer.format if named else type(quantizer).__name__


def multiplied(recipe: Recipe, gemm: Gemm) -> tuple[Quantizer, Quantizer]:
    """The quantizers that a recipe has for a GEMM's left operand (m, k) and its right operand (k, n)."""
    a, b = cast("tuple[Quantizer, Quantizer]", recipe.quantizers(gemm))  # callers know that it has them
    return a.transposed() if gemm.a_transposed else a, b.transposed() if gemm.b_transposed else b


def describe(recipe: Recipe, gemm: Gemm) -> str | None:
    """Describe formats and scales of a GEMM's operands: "e4m3 x e4m3 rowwise"; None for high precision."""
    return None if recipe.quantizers(gemm) is None else _described(*multiplied(recipe, gemm))


def code_sizes(a: Quantizer, b: Quantizer, config: GemmConfig) -> dict[str, Any]:
    """Compute, for a GEMM of codes (m, k) by (k, n), the fields ``code_bits``, ``sum_to``, ``by_mx`` of `GraphGemm`.

    ``a`` and ``b`` quantize the operands; ``config`` has the GEMM's options.
    """
    bits, is_mx_alone = max(a.code_bits(), b.code_bits()), is_mx(a) and is_mx(b)
    return {
        "code_bits": bits,
        "sum_to": MX_BLOCK if is_mx_alone else ALIGNMENT * 8 // bits,
        "by_mx": is_mx_alone or may_run_by_mx(a, b, config),
    }


def _sizes(gemm: str, operands: Sequence[Tensor], result: Tensor | Sequence[Tensor]) -> tuple[int, int, int]:
    a, b = operands
    # a rank that has only some tokens of one tensor has all tokens of the other, and multiplies all
    other = b if gemm == GRAD_WEIGHT.name else result if isinstance(result, Tensor) else result[0]
    tokens = max(prod(a.shape[:-1]), prod(other.shape[:-1]))
    if gemm == OUTPUT.name:
        return tokens, b.shape[-1], b.shape[-2]  # experts' weights have a dim before these
    if gemm == GRAD_INPUT.name:
        return tokens, b.shape[-2], b.shape[-1]
    return a.shape[-1], tokens, b.shape[-1]


def _layer_gemm(value: Value, owners: Owners) -> dict[str, Any]:
    node, gemm = value.node, LAYER_OPS[value.op]
    given: Any = fx.map_arg(node.args, node_value)
    a, b, *_, recipe = given
    runs, quantizers = describe(recipe, gemm), recipe.quantizers(gemm)
    result = node_value(node)
    m, k, n = _sizes(gemm.name, (a, b), result)
    stack = result if gemm is GRAD_WEIGHT else b
    casts: tuple[tuple[Any, Quantizer, int], ...] = ()
    parameters: tuple[bool, ...] = ()
    codes: dict[str, Any] = {}
    if quantizers is not None:
        codes = code_sizes(*multiplied(recipe, gemm), recipe.gemm_config(gemm))
        operands = [value.operand(0), value.operand(1)]
        casts = tuple(
            (owners.source(operand), quantizer, tensor.numel())
            for operand, quantizer, tensor in zip(operands, quantizers, (a, b), strict=True)
        )
        parameters = tuple(map(owners.is_parameter, operands))
    return {
        "runs": runs or str(a.dtype).removeprefix("torch."),
        "is_fp8": runs is not None,
        "m": m,
        "k": k,
        "n": n,
        "in_bytes": a.element_size(),
        "groups": stack.shape[0] if isinstance(stack, Tensor) and stack.ndim == 3 else 1,
        "out_bytes": a.element_size(),  # the result has the dtype of its operands
        **codes,
        "casts": casts,
        "parameters": parameters,
    }


def _other_gemm(value: Value, operands: Sequence[Value]) -> dict[str, Any]:
    a, b = (node_value(operand.node) for operand in operands)
    dtypes = [str(t.dtype).removeprefix("torch.") for t in (a, b)]
    runs = dtypes[0] if dtypes[0] == dtypes[1] else " x ".join(dtypes)
    is_fp8 = "scaled" in value.op and all("float8" in dtype for dtype in dtypes)
    if is_fp8:
        runs = f"{runs} by {value.op}"
    codes, left, right = {}, a.shape, b.shape
    if value.op == "fp8compile::scaled_mm":  # part of a decomposed layer op, as on DTensors; has its quantizers
        given: Any = value.node.args
        a_quantizer, b_quantizer, _, config = given[4:8]
        quantizers = a_quantizer, b_quantizer
        is_fp8, runs, codes = True, _described(*quantizers), code_sizes(*quantizers, config)
        # two codes may share a byte
        left, right = (each.values_shape(shape) for each, shape in zip(quantizers, (left, right), strict=True))
    elif value.op == "fp8compile::grouped_blockwise_mm":  # its codes are bytes, and its right operand is transposed
        a_format, b_format = value.node.args[5:7]
        is_fp8, runs, right = True, f"{a_format} x {b_format} by {value.op}", (b.shape[-1], b.shape[-2])
    return {
        "runs": runs,
        "is_fp8": is_fp8,
        "m": prod(left[:-1]),
        "k": left[-1],
        "n": right[-1] if len(right) > 1 else 1,
        "in_bytes": a.element_size(),
        "out_bytes": node_value(value.node).element_size(),
        **codes,
    }


def _gemms(owners: Owners, value: Value, *, backward: bool) -> Iterator[GraphGemm]:
    layers, gemm = owners.whose(value, backward=backward)
    if value.op in LAYER_OPS:
        gemm, found = LAYER_OPS[value.op].name, _layer_gemm(value, owners)
    else:
        found = _other_gemm(value, [value.operand(index) for index in PRODUCTS[value.op]])
    file, line = user_place(value.node)
    for layer in layers:
        yield GraphGemm(
            layer=layer,
            gemm=gemm,
            op=value.op,
            shared_by=len(layers),
            file=file,
            line=line,
            **found,
        )


def graph_gemms(
    recorded: Sequence[Recorded], weights: Mapping[int, Sequence[str]], constants: set[int], names: Names
) -> tuple[list[GraphGemm], list[Unknown]]:
    """Find all GEMMs in a model's graphs.

    Args:
        recorded: The graphs, as `record` returned them.
        weights: Maps each parameter's ``id`` to the layers that use the parameter as weight, or to compute the weight.
        constants: The ``id`` of each of the model's buffers, which don't count as data.
        names: Names of layers and modules.

    Returns:
        The GEMMs in the order of the graphs, and the opaque operators that may be a layer's GEMM. GEMMs that belong to
        no layer, such as those of attention, have the layer None.
    """
    gemms: list[GraphGemm] = []
    unknown: list[Unknown] = []
    for each in recorded:
        if each.kept.forward is None:
            continue
        owners = Owners(each, weights, constants, names)
        for values, is_backward in ((owners.forward, False), (owners.backward, True)):
            for value in values:
                backward = is_backward and not owners.is_recomputed(value)
                if value.op in {*LAYER_OPS, *PRODUCTS}:
                    gemms += _gemms(owners, value, backward=backward)
                else:
                    unknown += owners.unknown(value, backward=backward)
    return gemms, list(dict.fromkeys(unknown))
