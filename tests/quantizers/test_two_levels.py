"""Two levels of scales, four-bit codes: the references' bits, every contract, the transform, what is refused."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from golden_cases import two_level_cases
from torch import Tensor

import fp8compile as f8
from fp8compile.formats import E2M1, E4M3, pack, unpack
from fp8compile.library import Quantizer, exact_quotient
from fp8compile.quantizers.hadamard import SIGNS, inverse_hadamard, random_hadamard
from fp8compile.quantizers.stochastic_rounding import noise
from fp8compile.testing import check_quantizer


def _quantize_all(xs: list[Tensor], quantizers: tuple):
    found = [f8.quantize(x, quantizer) for x, quantizer in zip(xs, quantizers, strict=True)]
    return [(each.codes, each.scale, each.outer_scale) for each in found]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize(("source", "count"), [("te", 26), ("ao", 6)])
def test_codes_and_both_scales_are_the_references(source, count, backend, assert_bits_equal):
    cases = two_level_cases(source)
    assert len(cases) == count
    quantize = _quantize_all
    if backend != "eager":
        quantize = torch.compile(_quantize_all, fullgraph=True, dynamic=False, backend=backend)
    found = quantize([case.x for case in cases], tuple(case.quantizer for case in cases))
    for case, got in zip(cases, found, strict=True):
        for what, a, b in zip(("codes", "scale", "outer_scale"), got, case.wanted(), strict=True):
            assert_bits_equal(a, b, f"{what} of {case.name}")


@dataclass(frozen=True, repr=False)
class OwnLevels(Quantizer):
    """A third party's: e2m1 codes, one a byte, and scales of its own in two levels."""

    format: str = "e2m1"
    block: tuple[int, int] = (1, 16)

    def outer_scale(self, outer_amax: Tensor) -> Tensor:
        scale = torch.where(outer_amax > 0, outer_amax * (1 / 2688), 1.0)
        return torch.where(outer_amax.isfinite(), scale, torch.nan)

    def block_scale(self, amax: Tensor, outer_amax: Tensor) -> Tensor:
        return E4M3.encode((amax * exact_quotient(1 / 6, self.outer_scale(outer_amax))).clamp(min=2.0**-6))

    def block_multiplier(self, scale: Tensor, outer_scale: Tensor) -> Tensor:
        return exact_quotient(1.0, E4M3.decode(scale) * outer_scale)

    def scale_dtype(self) -> torch.dtype:
        return torch.uint8

    def scale_values(self, scale: Tensor) -> Tensor:
        return E4M3.decode(scale)

    def stores_e8m0(self) -> bool:
        return False


@pytest.mark.parametrize(
    "quantizer",
    [
        f8.TwoLevelScaling(),
        f8.TwoLevelScaling(block=(16, 16), scale="torchao", packed="none"),
        f8.TwoLevelScaling(block=(16, 1), packed="columns", hadamard=SIGNS),
        OwnLevels(),
    ],
    ids=["packed", "torchao", "transformed", "own"],
)
def test_every_contract_holds(quantizer):
    check_quantizer(quantizer, skip=("text_in_a_fresh_process",))


def test_a_class_with_half_of_two_levels_is_told_what_it_lacks():
    own = {"outer_scale": OwnLevels.outer_scale, "__annotations__": {}, "__module__": __name__}
    with pytest.raises(TypeError, match="overrides outer_scale but not block_scale"):
        type("Half", (Quantizer,), own)


# ---------------------------------------------------------------------------------- codes


@pytest.mark.parametrize("dim", [0, 1, -1, -2])
def test_packed_codes_are_two_to_a_byte_and_come_back(dim):
    codes = torch.randint(16, (6, 8), dtype=torch.uint8)
    packed = pack(codes, dim)
    assert packed.numel() * 2 == codes.numel()
    assert torch.equal(unpack(packed, dim), codes)
    assert packed[0, 0] == codes[0, 0] | codes[(1, 0) if dim in (0, -2) else (0, 1)] << 4


def test_e2m1_rounds_every_bfloat16_and_its_neighbours_to_the_nearest_code():
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    values = torch.cat([values, values.nextafter(torch.tensor(torch.inf)), values.nextafter(torch.tensor(-torch.inf))])
    values = values[values.isfinite()]
    table = torch.tensor(E2M1.values, dtype=torch.float64)
    apart = (values.double().abs().clamp(max=6).unsqueeze(1) - table).abs()
    nearest = apart == apart.amin(1, keepdim=True)  # one, or two as near, of which the even one is meant
    expected = torch.where(nearest, torch.arange(8) % 2, 2).argmin(1) | (values.signbit().long() << 3)
    assert torch.equal(E2M1.encode(values).long(), expected)
    assert torch.equal(E2M1.decode(E2M1.encode(values)).abs(), table[expected & 7].float())


@pytest.mark.parametrize("drawn", ["independent", "by the hash"])
def test_stochastic_e2m1_is_right_on_average_over_every_bfloat16(drawn):
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    values = values[values.abs() <= 6]
    by_seed = (noise(values.unsqueeze(0), seed).squeeze(0) for seed in range(64))
    numbers = by_seed if drawn == "by the hash" else (torch.rand(values.shape) for _ in range(64))
    tries = torch.stack([E2M1.encode_stochastic(values, each) for each in numbers])
    found = E2M1.decode(tries).double()
    step = torch.where(values.abs() < 2, 0.5, torch.where(values.abs() < 4, 1.0, 2.0)).double()
    error = (found - values.double()) / step
    assert error.abs().max() < 1  # never off by more than one code
    share = (values.double().abs() / step) % 1
    sigma = (share * (1 - share)).sum().mul(64).sqrt() / error.numel()
    assert error.mean().abs() < 4 * sigma


# ---------------------------------------------------------------------------------- the transform


def _matrix(signs):
    h = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(4):
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return torch.tensor(signs, dtype=torch.float64).unsqueeze(1) * h / 4


@pytest.mark.parametrize("dim", [0, 1])
def test_the_transform_is_that_of_a_float64_matrix_and_undoes_itself(dim, assert_bits_equal):
    # bfloat16 numbers of eight binades: their sums are exact in float32
    x = ((torch.randn(48, 64).abs() + 1).clamp(max=255) * torch.randn(48, 64).sign()).bfloat16().float()
    x = x if dim else x.t()
    turned = random_hadamard(x, dim, SIGNS)
    rows = x if dim else x.t()
    wanted = (rows.double().reshape(-1, 16) @ _matrix(SIGNS)).reshape(rows.shape).float()
    assert_bits_equal(turned if dim else turned.t(), wanted, "transformed")
    assert_bits_equal(inverse_hadamard(turned, dim, SIGNS), x, "transformed back")


def test_a_transformed_product_of_tokens_that_are_no_multiple_of_sixteen_is_the_product():
    a, b = torch.randn(37, 5).double(), torch.randn(37, 7).double()
    turned = [random_hadamard(each, 0, SIGNS) for each in (a, b)]
    assert torch.allclose(turned[0].t() @ turned[1], a.t() @ b, rtol=0, atol=1e-13)  # roundings of float64


# ---------------------------------------------------------------------------------- QuantizedTensor


def test_a_quantized_tensor_keeps_its_outer_scale(tmp_path, assert_bits_equal):
    q = f8.quantize(torch.randn(32, 64), f8.TwoLevelScaling())
    assert (q.codes.shape, q.scale.shape, q.outer_scale.shape) == ((32, 32), (32, 4), (1,))
    torch.save(q, tmp_path / "q.pt")
    for other in (
        q.clone(),
        q.detach(),
        q.to(torch.device("cpu"), copy=True),
        q.t().t(),
        torch.load(tmp_path / "q.pt"),
    ):
        assert_bits_equal(other.outer_scale, q.outer_scale)
        assert_bits_equal(other.dequantize(), q.dequantize())
    assert_bits_equal(q.t().dequantize(), q.dequantize().t())
    product = f8.scaled_mm(q, q.t(), out_dtype=torch.float32)
    exact = q.quantizer.dequantize(q.codes, q.scale, torch.float64)
    outer = q.outer_scale.double() * q.outer_scale.double()
    assert_bits_equal(product, ((exact @ exact.t()) * outer).float())


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"format": "e4m3"}, "`format` is 'e4m3'; it must be 'e2m1'"),
        ({"block": (1, 32)}, r"`block` is \(1, 32\); it must be \(1, 16\), \(16, 1\) or \(16, 16\)"),
        ({"packed": "columns"}, "`packed` is 'columns' with block"),
        ({"scale": "te"}, "`scale` is 'te'; it must be one of 'transformer_engine', 'reciprocal', 'torchao'"),
        ({"rounding": "up"}, "TwoLevelScaling: `rounding` is 'up'"),
        ({"hadamard": (1, 2)}, r"it must be \(\), or a tuple of sixteen 1 and -1"),
        ({"hadamard": SIGNS, "block": (16, 16)}, r"`hadamard` is .* with block \(16, 16\)"),
    ],
    ids=str,
)
def test_wrong_fields_say_what_is_allowed(fields, says):
    with pytest.raises(ValueError, match=says):
        f8.TwoLevelScaling(**fields)


def test_sizes_that_do_not_fit_are_refused_where_there_is_no_layer_to_pad_them():
    with pytest.raises(ValueError, match=r"stores two values of a row in one byte.* has 9"):
        f8.quantize(torch.randn(4, 9), f8.TwoLevelScaling())
    turned = f8.TwoLevelScaling(hadamard=SIGNS)
    for quantizer in (f8.TwoLevelScaling(), f8.TwoLevelScaling(packed="none"), turned):
        with pytest.raises(ValueError, match=r"`x` has shape \(\), .* Add a dim: x\.reshape\(1\)"):
            f8.quantize(torch.tensor(3.0), quantizer)
    with pytest.raises(ValueError, match=r"but this quantizer would return a tensor of shape \(4, 48\)"):
        f8.quantize(torch.randn(4, 40), turned)
    assert math.isfinite(
        f8.quantize(torch.randn(4, 9), replace(f8.TwoLevelScaling(), packed="none")).dequantize().sum()
    )
