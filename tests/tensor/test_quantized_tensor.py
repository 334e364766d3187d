"""QuantizedTensor: what it stands for, and what it is taken apart into."""

from __future__ import annotations

import math

import pytest
import torch
from quantized_samples import DTYPES, QUANTIZERS, fake_group, spread_values

import fp8compile as f8

SPECIAL = (0.0, -0.0, 1e-45, -1e-39, 1e-8, 448.0, -3.3e38, 65504.0)


def reference_values(q, dtype):
    """codes x scale by indexing, each product exact in float64 and rounded to float32, then to ``dtype``."""
    rows, columns = math.prod(q.shape[:-1]), q.shape[-1]
    codes = q.codes.reshape(rows, columns).view(q.quantizer.element_format().dtype).double()
    scale = q.scale.reshape(*grid_sides((rows, columns), q.quantizer.block))
    if scale.dtype == torch.uint8:
        scale = torch.where(scale == 255, torch.nan, torch.exp2(scale.double() - 127))
    block_rows, block_columns = (
        max(size, 1) if side == -1 else side for side, size in zip(q.quantizer.block, (rows, columns), strict=True)
    )
    row, column = torch.arange(rows) // block_rows, torch.arange(columns) // block_columns
    return (codes * scale.double()[row][:, column]).float().to(dtype).view(q.shape)


def grid_sides(sides, block):
    return tuple(1 if length == -1 else -(-side // length) for side, length in zip(sides, block, strict=True))


@pytest.mark.parametrize("out_dtype", [None, *DTYPES], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=str)
def test_dequantize_is_codes_times_scale_rounded_once(quantizer, dtype, out_dtype, assert_bits_equal):
    for shape in ((0, 48), (1, 5), (33, 50), (3, 7, 17), (31,), (4, 0)):
        q = f8.quantize(spread_values(shape, dtype), quantizer)
        assert (q.shape, q.dtype) == (torch.Size(shape), dtype)
        values = q.dequantize(out_dtype)
        assert type(values) is torch.Tensor
        assert_bits_equal(values, reference_values(q, out_dtype or dtype), f"{shape}")


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=str)
def test_zeros_keep_their_sign_and_a_block_with_nan_or_inf_is_nan_alone(quantizer, assert_bits_equal):
    x = torch.zeros(32, 48)
    x[:16, :16] = torch.tensor(SPECIAL).repeat(32).view(16, 16)
    zeros = f8.quantize(torch.tensor([0.0, -0.0]), quantizer).dequantize()
    assert_bits_equal(zeros, torch.tensor([0.0, -0.0]))
    for value in (torch.nan, torch.inf, -torch.inf):
        x[20, 20] = value
        q = f8.quantize(x, quantizer)
        in_block = f8.quantize(torch.where(x.isfinite(), 0.0, value), quantizer).dequantize().isnan()
        assert torch.equal(q.dequantize().isnan(), in_block)
        assert in_block[20, 20]
        assert_bits_equal(q.dequantize(), reference_values(q, torch.float32), f"block with {value}")


# ---------------------------------------------------------------------------------- flatten, unflatten


@pytest.mark.parametrize("group", [None, fake_group()], ids=["no group", "group"])
@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=str)
def test_unflatten_of_flatten_is_the_tensor_itself(quantizer, group, assert_bits_equal):
    q = f8.quantize(spread_values((32, 48)), quantizer)
    q = f8.QuantizedTensor(q.codes, q.scale, quantizer, q.dtype, group)
    names, metadata = q.__tensor_flatten__()
    inner = {name: getattr(q, name) for name in names}
    again = f8.QuantizedTensor.__tensor_unflatten__(inner, metadata, q.shape, q.stride())
    assert names == ["codes", "scale"] + ([] if group is None else ["group"])
    assert again.codes is q.codes
    assert again.scale is q.scale
    assert again.group is group
    assert (again.shape, again.stride(), again.dtype) == (q.shape, q.stride(), q.dtype)
    assert again.quantizer == quantizer
    assert again.__tensor_flatten__()[1] == metadata
    assert_bits_equal(again.dequantize(), q.dequantize())


@pytest.mark.parametrize(
    "other",
    [
        {"group": fake_group(name="8")},
        {"group": fake_group(size=2)},
        {"group": fake_group(rank=0)},
        {"group": None},
        {"quantizer": f8.CurrentScaling(eps=1e-12)},
        {"dtype": torch.float16},
    ],
    ids=["group name", "group size", "rank", "no group", "quantizer", "dtype"],
)
def test_metadata_tells_apart_what_a_graph_must_not_confuse(other):
    q = f8.quantize(spread_values((16, 16)), f8.CurrentScaling())
    own = {"codes": q.codes, "scale": q.scale, "quantizer": q.quantizer, "dtype": q.dtype, "group": fake_group()}
    metadata = f8.QuantizedTensor(**own).__tensor_flatten__()[1]
    assert metadata == f8.QuantizedTensor(**own | {"group": fake_group()}).__tensor_flatten__()[1]
    assert metadata != f8.QuantizedTensor(**own | other).__tensor_flatten__()[1]
    assert hash(metadata) != hash(f8.QuantizedTensor(**own | other).__tensor_flatten__()[1])


def test_repr_says_what_it_is_without_numbers():
    q = f8.quantize(torch.ones(2, 3), f8.CurrentScaling())
    assert repr(q) == f"{q}" == str(q)
    assert repr(q) == (
        "QuantizedTensor(shape=(2, 3), dtype=torch.float32, device=cpu, quantizer=CurrentScaling(format='e4m3', "
        "block=(-1, -1), scale='fp32', eps=0.0, rounding='nearest', seed=0), group=None)"
    )
    grouped = f8.QuantizedTensor(q.codes, q.scale, q.quantizer, q.dtype, fake_group(name="tp"))
    assert repr(grouped).endswith("group='tp')")
