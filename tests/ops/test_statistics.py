"""Each statistic of each operand beside NumPy, for values with NaN, infinities, subnormals and zeros among them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import fp8compile as f8
from fp8compile.layout.quantized import Plain, Quantized, TensorLayout
from fp8compile.monitor.definitions import STATISTICS, TOTALS
from fp8compile.monitor.elements import elements_of, pieces_of
from fp8compile.nn import Observed
from fp8compile.ops.groups.group_outer_amaxes import group_outer_amaxes
from fp8compile.ops.groups.group_quantize_two_levels import group_quantize_two_levels
from fp8compile.ops.groups.group_two_levels import group_two_levels
from fp8compile.quantizers.hadamard import random_hadamard
from fp8compile.quantizers.recipe import ROLES, TENSORS

RECIPES = ("tensorwise", "rowwise", "rowwise_bf16_wgrad", "blockwise", "mxfp8", "delayed", "nvfp4")
FORMATS = {"e4m3": (4, 3), "e5m2": (5, 2), "e2m1": (2, 1)}  # bits of the exponent and of the mantissa
M, K, N = 48, 96, 64
BACKENDS = (None, "aot_eager", pytest.param("inductor", marks=pytest.mark.slow))


def fuzzed(rows, columns, seed, *, nonfinite=False):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(rows, columns)) * 2.0 ** generator.integers(-30, 20, size=(rows, columns))
    special = [0.0, -0.0, 1e-39, -3e-40, 2.0**-126, *([math.nan, math.inf, -math.inf] if nonfinite else [])]
    places = generator.choice(rows * columns, size=2 * len(special), replace=False)
    x.reshape(-1)[places] = special * 2
    return torch.from_numpy(x).bfloat16()


def decoded(codes, name):
    exponent_bits, mantissa_bits = FORMATS[name]
    bias = 2 ** (exponent_bits - 1) - 1
    sign = np.where(codes >> (exponent_bits + mantissa_bits) & 1, -1.0, 1.0)
    field = (codes >> mantissa_bits) & (2**exponent_bits - 1)
    mantissa = (codes & (2**mantissa_bits - 1)) / 2**mantissa_bits
    found = np.where(field == 0, mantissa * 2.0 ** (1 - bias), (1 + mantissa) * 2.0 ** (field.astype(float) - bias))
    if name == "e4m3":
        found = np.where((field == 15) & (mantissa == 7 / 8), np.nan, found)
    if name == "e5m2":
        found = np.where(field == 31, np.where(mantissa == 0, np.inf, np.nan), found)
    return sign * found, field, 1 - bias


LARGEST = {"e4m3": (448.0, 32.0), "e5m2": (57344.0, 8192.0), "e2m1": (6.0, 2.0)}  # and the step below it


def expected(x, quantizer, multiplier=None):
    """The statistics in float64, of float32 values, codes and scales."""
    signs = quantizer.transform()
    if multiplier is not None:
        own = multiplier.view(1, 1)
        codes, scales = quantizer.cast(x, own), quantizer.scale_of(own).numpy()
    else:
        missing = -x.shape[0] % 16 if signs else 0
        found = f8.quantize(torch.nn.functional.pad(x, (0, 0, 0, missing)), quantizer.unpacked() or quantizer)
        codes = found.codes
        scales = quantizer.scale_values(found.scale).float().numpy()
        if found.outer_scale is not None:
            scales = scales * found.outer_scale.numpy()
    values = x.float()
    if signs:
        values = random_hadamard(values, 0 if quantizer.block[1] == 1 else 1, signs)
    values, codes = values.numpy(), codes.numpy().astype(np.int64)
    for dim in (0, 1):
        block = quantizer.block[dim]
        if block != -1:
            scales = np.repeat(scales, block, axis=dim)
    scales = np.broadcast_to(scales[: values.shape[0], : values.shape[1]], values.shape).astype(np.float32)
    c, field, smallest_exponent = decoded(codes, quantizer.format)
    limit, step = LARGEST[quantizer.format]
    size, magnitude = values.size, np.abs(values)
    is_nan = np.isnan(c) | np.isnan(values)
    with np.errstate(all="ignore"):
        error = (values - (c.astype(np.float32) * scales)).astype(np.float64) ** 2
        square = values.astype(np.float64) ** 2
        beyond = (magnitude > scales * np.float32(limit + step / 2)) & (scales > 0)
        smallest = np.where(magnitude == 0, np.inf, magnitude).min()
        ratio = square.sum() / error.sum()
        return {
            "amax": magnitude.max(),
            "underflow": ((c == 0) & (magnitude > 0)).sum() / size,
            "saturation": beyond.sum() / size,
            "subnormal": ((np.abs(c) > 0) & (np.abs(c) < 2.0**smallest_exponent)).sum() / size,
            "nonfinite": (~np.isfinite(values)).sum(),
            "scale_min": scales.min(),
            "scale_max": scales.max(),
            "scale_std": scales.astype(np.float64).std(),
            "square_error": error.sum(),
            "mse": error.sum() / size,
            "sqnr": 10 * np.log10(ratio) if np.isfinite(ratio) else np.nan,
            "range": np.log2(float(magnitude.max()) / float(smallest)) if np.isfinite(magnitude.max()) else np.nan,
            "exponents": [int(((field == each) & ~is_nan).sum()) for each in range(32)],
        }, square.sum()


def check(found, x, quantizer, multiplier=None):
    wanted, square = expected(x, quantizer, multiplier)
    assert wanted.keys() == STATISTICS.keys()
    for name, own in found.items():
        value = wanted[name]
        if name in ("square_error", "mse"):
            # a piece is a float32 sum of at most max(M, K, N) numbers; compilers may fuse the product into the
            # difference, which changes an error by the rounding of a value
            scale = 1 if name == "square_error" else x.numel()
            assert own == pytest.approx(
                value, rel=(max(M, K, N) + 3) * 2**-24, abs=2**-40 * square / scale, nan_ok=True
            )
        elif name in ("scale_std", "sqnr", "range"):
            # of sums as above: 10 log10(1 + d) is less than 5 d; a variance is a difference of float64 sums
            bound = 1e-6 * float(wanted["scale_max"]) if name == "scale_std" else 1e-4
            assert own == pytest.approx(value, abs=bound, nan_ok=True), name
        else:
            assert own == value or (own != own and value != value), (name, own, value)


def statistics(backend):
    """All; but to count exponents takes Inductor ten times as long as all others."""
    return tuple(name for name in STATISTICS if (backend, name) != ("inductor", "exponents"))


def run(module, backend, *inputs, grad):
    torch._dynamo.reset()
    step = module if backend is None else torch.compile(module, backend=backend, fullgraph=True)
    step(*inputs).backward(grad)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_statistics_of_a_matrix_are_those_of_numpy(recipe, backend):
    how = f8.recipes.by_name(recipe)
    for nonfinite in (False, True):
        layer = f8.Linear(K, N, bias=False, recipe=how, dtype=torch.bfloat16)
        x, grad = (fuzzed(M, size, seed, nonfinite=nonfinite) for seed, size in enumerate((K, N)))
        with torch.no_grad():
            layer.weight.copy_(fuzzed(N, K, 7, nonfinite=nonfinite))
            if how.history():
                layer.multiplier.copy_(torch.tensor([2.0**-10, 2.0**3, 1.5 * 2.0**-12]))
        used = layer.multiplier.clone() if how.history() else [None] * 3
        monitor = f8.Monitor(layer, statistics(backend))
        run(layer, backend, x.requires_grad_(), grad=grad)
        (reading,) = monitor.read().values()
        tensors = {"input": x.detach(), "weight": layer.weight.detach(), "grad_output": grad}
        assert list(reading) == [role for role in ROLES if getattr(how, role) is not None]
        assert all(set(each) == set(statistics(backend)) for each in reading.values())
        for (tensor, roles), multiplier in zip(TENSORS.items(), used, strict=True):
            for role in set(roles) & reading.keys():
                check(reading[role], tensors[tensor], getattr(how, role), multiplier)


class Experts(Observed, nn.Module):
    """A stack of matrices for rows in groups."""

    observed_weights = ("weight",)

    def __init__(self, weight, recipe):
        super().__init__()
        self.weight, self.recipe = nn.Parameter(weight), recipe

    def forward(self, x, offsets):
        return f8.grouped_linear(x, self.weight, offsets, recipe=self.recipe, observer=self.observer("weight"))


SIZES = (16, 0, 32, 19)  # an expert without tokens, and one whose tokens fill no block


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("recipe", [each for each in RECIPES if each != "delayed"])
def test_statistics_of_experts_are_those_of_numpy(recipe, backend):
    how = f8.recipes.by_name(recipe)
    for nonfinite in (False, True):
        weight = torch.stack([fuzzed(N, K, 10 + expert, nonfinite=nonfinite) for expert in range(len(SIZES))])
        module, offsets = Experts(weight, how), torch.tensor(SIZES).cumsum(0).to(torch.int32)
        rows = sum(SIZES) + 5  # the last ones belong to no expert
        x, grad = (fuzzed(rows, size, seed, nonfinite=nonfinite) for seed, size in enumerate((K, N)))
        monitor = f8.Monitor(module, statistics(backend))
        run(module, backend, x.requires_grad_(), offsets, grad=grad)
        reading = monitor.read()
        assert list(reading) == [f"weight.{expert}" for expert in range(len(SIZES))]
        for expert, (own, size) in enumerate(zip(reading.values(), SIZES, strict=True)):
            start = int(offsets[expert]) - size
            tensors = {"input": x.detach(), "grad_output": grad}
            part = {name: each[start : start + size] for name, each in tensors.items()} | {"weight": weight[expert]}
            for tensor, roles in TENSORS.items():
                for role in roles:
                    quantizer = getattr(how, role)
                    assert (role in own) == (quantizer is not None and part[tensor].numel() > 0), (role, expert)
                    # noise depends on the place among all rows
                    if role in own and getattr(quantizer, "rounding", "nearest") == "nearest":
                        check(own[role], part[tensor], quantizer)


@pytest.mark.parametrize("signs", [(), (1, -1, -1, 1) * 4], ids=["plain", "transformed"])
def test_codes_of_experts_in_a_gpus_tiles_have_the_totals_of_codes_that_lie_plainly(signs):
    offsets = torch.tensor([7, 7, 150, 180], dtype=torch.int32)
    x = fuzzed(200, 80, seed=3)
    quantizer = f8.TwoLevelScaling(block=(16, 1), packed="columns", hadamard=signs)
    how = quantizer, quantizer, "tokens"
    *_, codes, scale, outer = group_quantize_two_levels(x, offsets, group_outer_amaxes(x, offsets, *how), *how)
    tiled = codes, scale, outer, quantizer
    along_tokens = True
    plain = *group_two_levels(x, offsets, quantizer.unpacked(), along_tokens), quantizer.unpacked()
    layout, totals = TensorLayout(offs=offsets), []
    for codes, scale, outer, own in (tiled, plain):
        found = Quantized(codes=codes, scale=scale, quantizer=own, outer_scale=outer, layout=layout)
        elements = elements_of(Plain(x, layout), found, x.shape, along_tokens=True)
        found_here: list[torch.Tensor] = []
        rows = [pieces_of(elements, total.compute(elements), total.combine) for total in TOTALS.values()]
        for total, own in zip(TOTALS.values(), rows, strict=True):
            for group in range(4):
                mine = own[elements.group == group]
                found_here.append(
                    mine.sum() if total.combine == "sum" else mine.amax() if mine.numel() else mine.sum()
                )
        totals.append(found_here)
    assert all(torch.equal(one, other) for one, other in zip(*totals, strict=True))
