"""Contracts of a quantizer's codes in GEMMs: the result is the product of dequantized values.

GEMMs run on this machine's CPU. For GPUs, only the choice of a GEMM is checked, without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fp8compile.formats import E5M2, E8M0, Float8Format
from fp8compile.layout.quantized import Quantized
from fp8compile.nn import linear
from fp8compile.ops.gemms.emulated import EMULATED
from fp8compile.ops.gemms.nvfp4 import NVFP4
from fp8compile.ops.gemms.selection import select_gemm
from fp8compile.ops.gemms.table import REGISTERED
from fp8compile.quantizers import GEMMS, CurrentScaling, GemmConfig, Quantizer, Recipe, gemm_kind
from fp8compile.quantizers.blocks import as_matrix, expand_blocks
from fp8compile.target import Target, pretend_target
from fp8compile.tensor import QuantizedTensor, quantize, scaled_mm
from fp8compile.testing.bits import difference
from fp8compile.testing.contracts.contract import BrokenContract, NotLookedAt, looking_at

__all__ = ["code_zero_is_zero", "gemms_read_what_dequantize_gives", "products_are_those_of_dequantize"]

# capabilities of L4, H200 and B200: each has another set of FP8 GEMMs
PRETENDED = (Target("cuda", (8, 9)), Target("cuda", (9, 0)), Target("cuda", (10, 0)))
OWN_MEANING = (
    "override gemm_format() only if dequantize returns what the inherited one does, each float8 number times the "
    "scale of its block; override stores_e8m0() only if scales are E8M0 bytes"
)


def _as_left_operand(q: Quantizer) -> Quantizer | None:
    """Return the quantizer or its ``transposed()``, whichever suits a GEMM's left operand; None if neither does."""
    for candidate in (q, q.transposed()):
        if gemm_kind(candidate.block, candidate.transposed().block) is not None:
            return candidate
    return None


def _partner(q: Quantizer) -> Quantizer:
    return CurrentScaling(block=q.block) if q.gemm_format() == E5M2 else q


def _random(rows: int, columns: int, seed: int, device: torch.device) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(device)


def _exact(x: Tensor, q: Quantizer) -> Tensor:
    quantized = quantize(x, q)
    values = q.dequantize(quantized.codes, quantized.scale, torch.float64)
    return values if quantized.outer_scale is None else values * quantized.outer_scale


def _check_product(found: Tensor, a: Tensor, b: Tensor, what: str) -> None:
    """Raise a BrokenContract unless ``found`` is ``a`` (m, k) times ``b`` (k, n), up to roundings in float32.

    Each element may be off by k + 4 roundings of the sum of its terms' magnitudes. ``what`` names the GEMM.
    """
    bound = (a.shape[1] + 4) * 2.0**-23 * (a.abs() @ b.abs())
    apart = (found.double() - a @ b).abs()
    if not (apart <= bound).all():
        raise BrokenContract(
            expected=f"{what} is the matrix product of the dequantized operands",
            found=f"an element differs by {apart.nan_to_num(torch.inf).max().item():.3g}; the largest element is "
            f"{(a @ b).abs().max().item():.3g}",
            mend=OWN_MEANING,
        )


def products_are_those_of_dequantize(q: Quantizer, device: torch.device) -> None:
    """scaled_mm, and a layer with its gradients, multiply the values that dequantize returns."""
    left = _as_left_operand(q)
    if left is None:
        raise NotLookedAt(f"no GEMM supports blocks {q.block}, so scaled_mm and recipes raise an error")
    q = left
    x, weight = looking_at((_random(48, 64, 0, device), _random(32, 64, 1, device)))
    partner = _partner(q)
    product = scaled_mm(quantize(x, q), quantize(weight, partner).t(), out_dtype=torch.float32)
    _check_product(product, _exact(x, q), _exact(weight, partner).t(), "scaled_mm")
    recipe = Recipe(
        input=partner,
        weight=partner,
        grad_output=q,
        weight_for_grad_input=partner.transposed(),
        grad_output_for_grad_weight=q.transposed(),
        input_for_grad_weight=partner.transposed(),
    )
    _check_layer(recipe, x, weight)


def _check_layer(recipe: Recipe, x: Tensor, weight: Tensor) -> None:
    grad = _random(x.shape[0], weight.shape[0], 2, x.device)
    leaves = [each.clone().requires_grad_() for each in (x, weight)]
    y = linear(*leaves, recipe=recipe)
    y.backward(grad)
    given = {"output": (x, weight), "grad_input": (grad, weight), "grad_weight": (grad, x)}
    found: dict[str, Any] = {"output": y.detach(), "grad_input": leaves[0].grad, "grad_weight": leaves[1].grad}
    for gemm in GEMMS:
        quantizers = recipe.quantizers(gemm)
        assert quantizers is not None, f"the recipe quantizes {gemm.name}"
        operands = zip(given[gemm.name], quantizers, strict=True)
        a, b = gemm.oriented(*(_exact(tensor, quantizer) for tensor, quantizer in operands))
        _check_product(found[gemm.name], a, b, f"{gemm.name} of a layer")


def _as_read(quantized: QuantizedTensor, read: Float8Format) -> Tensor:
    """Return the float64 values that a GPU's GEMM reads: codes in the format ``read``, times block scales."""
    q = quantized.quantizer
    stored = E8M0.decode(quantized.scale) if q.stores_e8m0() else q.scale_values(quantized.scale)
    scales = expand_blocks(stored.double(), quantized.shape, q.block)
    return as_matrix(quantized.codes).view(read.dtype).double() * scales


def _gemms(q: Quantizer) -> Iterator[str]:
    """Yield the names of GEMMs that GPUs would select for a quantizer's codes times their transpose."""
    for target in PRETENDED:
        with pretend_target(target):
            try:
                gemm = select_gemm(q, q.transposed(), torch.device("cpu"), torch.bfloat16)
            except RuntimeError:  # this GPU refuses them, and says what to do
                continue
            if gemm not in REGISTERED:  # a GEMM that a package registered may read codes as it likes
                yield gemm


def _check_four_bit_product(q: Quantizer) -> None:
    """Raise a BrokenContract unless nvfp4_mm on the CPU equals the product of dequantized values."""
    quantized = quantize(looking_at(_random(48, 48, 0, torch.device("cpu"))), q)
    codes, scale, outer = quantized.codes, quantized.scale, quantized.outer_scale
    a = Quantized(codes=codes, scale=scale, quantizer=q, outer_scale=outer)
    arguments = (a, a.t(), torch.float32, GemmConfig())
    if (differs := difference(NVFP4.multiply(*arguments), EMULATED.multiply(*arguments))) is not None:
        raise BrokenContract(
            expected="quantized data that nvfp4_mm reads as dequantize does", found=differs, mend=OWN_MEANING
        )


def gemms_read_what_dequantize_gives(q: Quantizer, device: torch.device) -> None:
    """A GPU's GEMM is only chosen for codes that it interprets as dequantize does."""
    left = _as_left_operand(q)
    chosen = sorted(set(_gemms(left))) if left is not None else []
    if left is not None and chosen == [NVFP4.name]:
        _check_four_bit_product(left)
        return
    if (read := q.gemm_format()) is None:
        if chosen:
            raise BrokenContract(
                expected="no native GEMM where gemm_format() is None", found=", ".join(chosen), mend=OWN_MEANING
            )
        return
    quantized = quantize(looking_at(_random(48, 48, 0, device)), q)
    exact = q.dequantize(quantized.codes, quantized.scale, torch.float64)
    if (differs := difference(_as_read(quantized, read), exact)) is not None:
        raise BrokenContract(
            expected=f"quantized data that the GEMMs of GPUs ({', '.join(chosen) or 'none today'}) read as "
            f"dequantize does, because gemm_format() is {read.name}",
            found=differs,
            mend=OWN_MEANING,
        )


def code_zero_is_zero(q: Quantizer, device: torch.device) -> None:
    """Code 0 stands for zero, because odd sizes and shards that divide blocks are padded with code 0."""
    quantized = quantize(looking_at(_random(48, 48, 0, device)), q)
    found = q.dequantize(torch.zeros_like(quantized.codes), quantized.scale)
    if found.any():
        raise BrokenContract(
            expected="zero bytes stand for zeros",
            found=f"{found.abs().max().item()}",
            mend="store the value zero as the byte 0: let cast add an offset, and let dequantize subtract it",
        )
