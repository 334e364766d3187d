"""Compares a GEMM that is distributed over ranks with the same GEMM computed by one process.

Each rank gathers the operands, quantizes and multiplies them as one process would, and compares. Scales and codes have
to be bitwise equal. The results may differ by rounding: partial sums of ranks are rounded, and a GEMM of other sizes
may add in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fp8compile.layout.four_bit_packing import one_a_byte
from fp8compile.layout.quantized import Plain, Quantized
from fp8compile.ops.collectives import all_gather
from fp8compile.ops.layer.fsdp_rows import rows_cut
from fp8compile.ops.layer.gather_operands import gather
from fp8compile.ops.layer.operands import GRAD_WEIGHT, WEIGHT_ROLES, Operands
from fp8compile.ops.layer.sharded_gemm import Product
from fp8compile.quantizers import Gemm
from fp8compile.quantizers.blocks import as_matrix
from fp8compile.testing.bits import difference, sum_difference

__all__ = ["differences", "is_shared", "whole"]

Multiply = Callable[..., Product]


def _cut_by_fsdp(part: Plain, role: str, operands: Operands) -> Plain:
    if operands.fsdp_shards is None or role not in WEIGHT_ROLES:
        return part
    return part.with_cuts((*part.cuts, rows_cut(operands.fsdp_shards)))


def whole(part: Any, role: str = "", operands: Operands | None = None) -> Any:
    """Gather a tensor, `Plain` or `Quantized`, over all ranks that share it.

    Args:
        part: This rank's part.
        role: The recipe's field for the tensor, such as ``"weight"``.
        operands: The `Operands` of the GEMM, which know how FSDP shards the weight; None if FSDP does not shard
            ``part``.
    """
    if operands is not None:
        part = _cut_by_fsdp(part, role, operands)
    for index in range(len(part.cuts)):
        if part.cuts[index] is not None:
            part = gather(part, index)
    return part.with_cuts(())


def is_shared(a: Plain, b: Plain, operands: Operands) -> bool:
    """Whether a GEMM with the operands ``a`` and ``b`` is distributed over several ranks."""
    return any((*a.cuts, *b.cuts)) or operands.fsdp_shards is not None


def _as_one_process_has_it(part: Plain) -> Plain:
    return part if part.layout.batch else replace(part, local=as_matrix(part.local))


def _in_words(name: str, mine: Tensor, expected: Tensor) -> tuple[str, str] | None:
    if mine.numel() == expected.numel():
        mine = mine.reshape(expected.shape)  # tokens that a rank cuts keep their leading dims
    words = difference(mine, expected)
    if words is None or mine.shape != expected.shape or mine.numel() > 1:
        return None if words is None else (name, words)
    ratio = mine.double().item() / expected.double().item() if mine.is_floating_point() and expected.any() else None
    return name, words + ("" if ratio is None else f", {ratio:.3g} times")


def _of_operand(mine: Quantized, expected: Quantized) -> tuple[str, str] | None:
    """Return which field of a quantized operand differs from ``expected``, and how; None if none does.

    The field is "scale", "global scale" or "quantized data". All ranks' shards of ``mine`` are gathered first.
    """
    mine = whole(mine)
    if mine.outer_scale is not None and expected.outer_scale is not None:
        found = _in_words("global scale", mine.outer_scale, expected.outer_scale)
        if found is not None:
            return found
    scales = [each.quantizer.scale_values(each.scale) for each in (mine, expected)]
    codes = [one_a_byte(each.codes, each.quantizer)[0] for each in (mine, expected)]
    return _in_words("scale", *scales) or _in_words("quantized data", *codes)


def _gathered(product: Product, b: Plain, gemm: Gemm) -> tuple[Tensor, Tensor | None]:
    local, terms = product.local, None
    if gemm is not GRAD_WEIGHT:
        local = local.view(*product.shape[:-1], local.shape[-1])
    for index in reversed(range(len(product.plans))):
        out, left, right = product.plans[index].out, product.cuts[index], b.cuts[index]
        if out is None:
            continue
        cut: Any = right if out == "n" or left is None else left
        if out == "sum":
            every = all_gather(local.unsqueeze(0).contiguous(), 0, (1,) * len(cut.sizes), cut.group).double()
            local, terms = every.sum(0), every.abs().sum(0)
            continue
        dim = local.ndim - 1 if out == "n" else local.ndim - 2 if gemm is GRAD_WEIGHT else cut.dim
        local = all_gather(local.contiguous(), dim, cut.sizes, cut.group)
        terms = None if terms is None else all_gather(terms.contiguous(), dim, cut.sizes, cut.group)
    return local, terms


def _of_product(product: Product, expected: Product, b: Plain, gemm: Gemm, bias: Tensor | None) -> str | None:
    found, terms = _gathered(product, b, gemm)
    dtype = expected.local.dtype
    want = expected.local.view(found.shape)
    if terms is None:
        return sum_difference(found, want)
    # Each term is rounded, each sum of two, and in one process the sum: half a unit in the last place each. A bias is
    # added to a rounded term, which is no larger than bias and sum together.
    terms = terms if bias is None else terms + 2 * bias.double().abs()
    ranks = sum(each.out == "sum" for each in product.plans) * max(len(c.sizes) for c in (*product.cuts, *b.cuts) if c)
    allowed = (ranks + 2) * torch.finfo(dtype).eps * terms
    apart = (found - want.double()).abs()
    unlike = ~(apart <= allowed) & ~(found.isnan() & want.isnan())
    if not unlike.any():
        return None
    at = tuple(unlike.nonzero()[0].tolist())
    return (
        f"{int(unlike.sum())} of {unlike.numel()} elements differ by more than rounding of sums, the first at "
        f"{list(at)}: {found[at].item():.6g} instead of {want[at].item():.6g}"
    )


def differences(
    gemm: Gemm, a: Plain, b: Plain, operands: Operands, bias: Plain | None, product: Product, multiply: Multiply
) -> Iterator[tuple[str, str, str]]:
    """Compare a distributed GEMM with the same GEMM in one process; every rank of the groups calls this.

    Args:
        gemm: Which of the layer's three GEMMs.
        a: This rank's part of the left operand.
        b: This rank's part of the right operand.
        operands: The object that quantized both operands.
        bias: This rank's part of the bias, or None.
        product: This rank's part of the result.
        multiply: The function that computed the product.

    Yields:
        The operand that differs, or ``"result"``; what differs in it, such as ``"scale"``; the difference in words.
    """
    if operands.weight is not None:
        return
    alone = Operands(operands.recipe, operands.phase, operands.multiplier)
    parts = {gemm.a: a, gemm.b: b}
    wholes = {role: _as_one_process_has_it(whole(part, role, operands)) for role, part in parts.items()}
    if operands.recipe.quantizers(gemm) is not None:
        for role, part in parts.items():
            found = _of_operand(operands.of(part, role), alone.of(wholes[role], role))
            if found is not None:
                yield role, *found
    all_of_bias = None if bias is None else whole(bias)
    expected = multiply(gemm, wholes[gemm.a], wholes[gemm.b], alone, all_of_bias)
    words = _of_product(product, expected, b, gemm, None if all_of_bias is None else all_of_bias.local)
    if words is not None:
        yield "result", "product", words
