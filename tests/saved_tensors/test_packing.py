"""The packing rule: values of packed tensors are those of the quantizer, bit for bit, with the strides they had."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fp8compile as f8
from fp8compile.saved_tensors.packing import OPS_OF_STEPS, PYTHON_OF_STEPS, Packing
from fp8compile.testing.bits import difference

BLOCKS = ((1, -1), (1, 128), (1, 32), (-1, -1), (16, 1), (2, 1))
POWERS = [f8.CurrentScaling(block=block, scale="pow2") for block in BLOCKS]
QUANTIZERS = [
    *POWERS,
    f8.CurrentScaling(block=(1, 32), scale="e8m0_rceil"),
    f8.CurrentScaling(block=(1, 128)),
    f8.CurrentScaling(format="e5m2", block=(128, 128)),
    f8.TwoLevelScaling(),
]


def values(shape, dtype):
    torch.manual_seed(0)
    x = torch.randn(shape) * torch.logspace(-30, 4, shape[-1], base=2)
    x[0] = 0
    return x.to(dtype)


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=repr)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("steps", [OPS_OF_STEPS, PYTHON_OF_STEPS], ids=["ops", "python"])
def test_unpacked_values_are_those_that_the_quantizer_gives(quantizer, dtype, steps):
    for shape in ((3, 256), (2, 3, 144), (5, 7), (4, 8, 40)):
        x = values(shape, dtype)
        packing = Packing.of(x, quantizer)
        parts = packing.pack(x, steps)
        own = packing.quantizer
        amax = own.amax(x)
        multiplier = own.multiplier(amax)
        outer = own.outer_scale(own.outer_amax(amax)) if own.has_outer_scale() else 1.0
        scale = own.block_scale(amax, own.outer_amax(amax)) if own.has_outer_scale() else own.scale_of(multiplier)
        expected = (own.dequantize(own.cast(x, multiplier), scale) * outer).to(dtype)
        assert difference(packing.unpack(parts), expected) is None


def test_groups_of_rows_are_packed_in_the_loop_that_reads_them():
    """Without a reduction, which Inductor would put into a kernel of its own."""
    packing = Packing.of(torch.empty(64, 96), POWERS[4])
    nodes = [str(node.target) for node in make_fx(lambda x: packing.pack(x))(torch.empty(64, 96)).graph.nodes]
    assert nodes.count("aten.maximum.default") == 15
    assert "fp8compile.amax.default" not in nodes


def test_codes_and_scales_take_the_bytes_that_the_blocks_say():
    x = values((64, 1024), torch.bfloat16)
    sizes = {}
    for quantizer in (*POWERS[:3], f8.TwoLevelScaling()):
        parts = Packing.of(x, quantizer).pack(x)
        sizes[quantizer.block] = sum(part.numel() * part.element_size() for part in parts) / (x.numel() * 2)
    assert sizes == {
        (1, -1): 0.5 + 1 / 1024,
        (1, 128): 0.5 + 1 / 128,
        (1, 32): 0.5 + 1 / 32,
        (1, 16): 0.25 + 1 / 32 + 4 / x.numel() / 2,
    }


def test_values_have_the_strides_of_the_tensor_and_tensors_with_gaps_are_left():
    x = values((2, 4, 8, 256), torch.bfloat16)
    for laid in (x, x.transpose(1, 2), x.transpose(-1, -2), x.permute(1, 3, 0, 2)):
        packing = Packing.of(laid, POWERS[1])
        found = packing.unpack(packing.pack(laid))
        assert (found.shape, found.stride()) == (laid.shape, laid.stride())
        assert (found.float() - laid.float()).norm() < 0.05 * laid.float().norm()
    assert Packing.of(x[..., ::2], POWERS[1]) is None
    assert Packing.of(x[..., :1, :].expand(2, 4, 8, 256), POWERS[1]) is None


def test_a_value_that_is_not_a_number_is_seen_in_the_backward():
    x = values((4, 256), torch.bfloat16)
    x[1, 3], x[2, 5] = torch.inf, torch.nan
    packing = Packing.of(x, POWERS[0])
    assert packing.unpack(packing.pack(x)).isfinite().all(-1).tolist() == [True, False, False, True]
