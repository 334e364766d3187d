"""`quantize(group=)` under fullgraph: equal bits, no warning of Dynamo's, one graph."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist

import fp8compile as f8
from fp8compile._compat import TORCH_VERSION
from fp8compile.testing.bits import bits

pytestmark = pytest.mark.skipif(
    TORCH_VERSION < (2, 12), reason=f"a group as a part of a tensor needs PyTorch 2.12, this is {torch.__version__}"
)


@pytest.fixture(scope="module")
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("sizes", [None, (64,)], ids=["shards", "sizes"])
@pytest.mark.parametrize("operand", ["input", "weight", "grad_output"])
@pytest.mark.parametrize("name", ["rowwise", "mxfp8", "nvfp4"])
def test_compiled_is_eager_and_dynamo_has_nothing_to_warn_of(name, operand, sizes, group):
    quantizer = getattr(f8.recipes.by_name(name), operand)
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    if sizes is None and not quantizer.is_local():
        pytest.skip("codes that depend on their place need sizes")

    def quantized(x):
        found = f8.quantize(x, quantizer, group=group, shard_dim=0, sizes=sizes)
        return found.codes, found.scale, found.dequantize()

    torch._dynamo.reset()
    with warnings.catch_warnings(), torch._dynamo.config.patch(error_on_recompile=True):
        warnings.simplefilter("error")
        compiled = torch.compile(quantized, fullgraph=True, backend="aot_eager")
        found, again = compiled(x), compiled(x)
    for each, once_more, expected in zip(found, again, quantized(x), strict=True):
        assert torch.equal(bits(each), bits(expected))
        assert torch.equal(bits(once_more), bits(expected))
