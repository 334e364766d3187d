"""The golden vectors: codes and scales that TransformerEngine's and torchao's reference code made, bit for bit."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
import torch
from golden_cases import BLOCKS, CASES, Case
from torch import Tensor

import fp8compile as f8

PROMISED = {
    "tensorwise": 47,
    "rowwise": 29,
    "rowwise_axis0": 3,
    "blockwise_1x128": 35,
    "blockwise_128x128": 29,
    "blockwise_128x1": 24,
    "mx_1x32": 48,
    "mx_32x1": 4,
    "mx_32x32": 5,
}


def _quantize(x: Tensor, quantizer: f8.CurrentScaling) -> tuple[Tensor, Tensor]:
    quantized = f8.quantize(x, quantizer)
    return quantized.codes, quantized.scale


def _quantize_all(xs: list[Tensor], quantizers: tuple) -> list[tuple[Tensor, Tensor]]:
    return [_quantize(x, quantizer) for x, quantizer in zip(xs, quantizers, strict=True)]


def _check(case: Case, codes: Tensor, scale: Tensor, assert_bits_equal) -> None:
    assert_bits_equal(scale, case.scale, f"scale of {case.name}")
    assert_bits_equal(codes, case.codes, f"codes of {case.name}")


def test_224_cases_are_promised():
    assert len(CASES) == len({case.name for case in CASES}) == 224
    assert Counter(case.kind for case in CASES) == PROMISED


@pytest.mark.parametrize("kind", BLOCKS)
def test_eager_codes_and_scales_are_the_references(kind, assert_bits_equal):
    compared = 0
    for case in CASES:
        if case.kind == kind:
            _check(case, *_quantize(case.x, case.quantizer), assert_bits_equal)
            compared += 1
    assert compared == PROMISED[kind]


# one of each layout of blocks; of the others, compiled is held against eager mode in test_contracts.py
@pytest.mark.parametrize("kind", ["tensorwise", "rowwise", "blockwise_1x128", "blockwise_128x1", "mx_32x32"])
def test_compiled_codes_and_scales_are_the_references(kind, assert_bits_equal):
    # One graph a kind, with one quantization for each different (quantizer, dtype, shape): a graph each would take ten
    # minutes of C++ compiler. The graph runs as often as the most frequent of these has cases.
    groups = defaultdict(list)
    for case in CASES:
        if case.kind == kind:
            groups[case.signature()].append(case)
    quantizers = tuple(quantizer for quantizer, _, _ in groups)
    compiled = torch.compile(_quantize_all, fullgraph=True, dynamic=False)
    compared = set()
    for turn in range(max(map(len, groups.values()))):
        cases = [group[turn % len(group)] for group in groups.values()]
        for case, result in zip(cases, compiled([case.x for case in cases], quantizers), strict=True):
            _check(case, *result, assert_bits_equal)
            compared.add(case.name)
    assert len(compared) == PROMISED[kind]


@pytest.mark.parametrize("kind", BLOCKS)
def test_the_comparison_sees_one_ulp_in_one_element(kind, assert_bits_equal):
    case = next(case for case in CASES if case.kind == kind)
    codes, scale = _quantize(case.x, case.quantizer)
    next_scale = scale.view(torch.uint8 if scale.dtype == torch.uint8 else torch.int32).clone()
    next_scale.view(-1)[-1] += 1
    next_codes = codes.clone()
    next_codes.view(-1)[-1] ^= 1
    _check(case, codes, scale, assert_bits_equal)
    with pytest.raises(AssertionError, match=f"codes of {case.name}: 1 of "):
        _check(case, next_codes, scale, assert_bits_equal)
    with pytest.raises(AssertionError, match=f"scale of {case.name}: 1 of "):
        _check(case, codes, next_scale.view(scale.dtype), assert_bits_equal)
