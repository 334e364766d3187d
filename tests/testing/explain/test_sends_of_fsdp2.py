"""What FSDP2 sends is listed by the modules that it shards: bf16 parameters, or codes and scales; then gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import fp8compile as f8
from fp8compile._compat import TORCH_VERSION
from fp8compile.testing import sends
from fp8compile.testing.explain.mesh import explain_mesh, pretended_mesh

N, K = 64, 32


def sharded(mesh, *, gathers_codes):
    model = nn.Sequential(nn.Linear(K, N), nn.SiLU(), nn.Linear(N, K)).bfloat16()
    f8.convert(model, f8.recipes.rowwise())
    if gathers_codes:
        f8.parallel.fsdp_float8_all_gather(model)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh), (torch.randn(16, K, dtype=torch.bfloat16),)


@pytest.mark.parametrize(
    ("gathers_codes", "dtype", "size", "what"),
    [
        (False, "bfloat16", 2 * N * K + 2 * N, "parameters"),
        pytest.param(
            True,
            "uint8",
            N * K + 4 * N + 2 * N,  # weight, scales, bias
            "parameters, FP8 ones as codes and scales",
            marks=pytest.mark.skipif(TORCH_VERSION < (2, 12), reason="groups in a subclass need PyTorch 2.12"),
        ),
    ],
)
def test_parameters_are_gathered_twice_and_gradients_reduced_once(gathers_codes, dtype, size, what):
    with pretended_mesh({"fsdp": 4}) as mesh:
        model, args = sharded(mesh, gathers_codes=gathers_codes)
        found = sends(model, *args)
        assert all(parameter.grad is None for parameter in model.parameters())
    sent = [(row.what, row.op, row.dtype, row.bytes, row.backward) for row in found.of("0", "fsdp")]
    gradients = ("gradients", "reduce_scatter", "bfloat16", 2 * N * K + 2 * N, True)
    assert sent == [(what, "all_gather", dtype, size, False), (what, "all_gather", dtype, size, True), gradients]
    assert "nothing" not in str(found)


def test_a_model_that_fsdp2_shards_is_no_model_for_a_mesh():
    with pytest.raises(ValueError, match=r"fully_shard was called on the model.*graph_fsdp"):
        explain_mesh(lambda mesh: sharded(mesh, gathers_codes=False), {"fsdp": 4})
