"""What FSDP2 sends is listed by the modules that it shards: bf16 parameters, or codes and scales; then gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import fp8compile as f8
from fp8compile._compat import TORCH_VERSION
from fp8compile.testing import sends
from fp8compile.testing.explain.mesh import explain_mesh, pretended_mesh

N, K = 64, 32


def unchanged(model):
    return model


def sharded(mesh, *, gathers_codes, compiled=unchanged):
    model = nn.Sequential(nn.Linear(K, N), nn.SiLU(), nn.Linear(N, K)).bfloat16()
    f8.convert(model, f8.recipes.rowwise())
    if gathers_codes:
        f8.parallel.fsdp_float8_all_gather(model)
    for at in (0, 2):
        model[at] = compiled(model[at])
        fully_shard(model[at], mesh=mesh)
    return fully_shard(model, mesh=mesh), (torch.randn(16, K, dtype=torch.bfloat16),)


@pytest.mark.parametrize(
    ("gathers_codes", "dtype", "size", "what"),
    [
        (False, "bfloat16", 2 * N * K + 2 * N, "parameters"),
        pytest.param(
            True,
            "uint8",
            N * K + 4 * N + 2 * N,  # weight, scales, bias
            "parameters, FP8 parameters with their scales",
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


def compiled_in_place(block):
    block.compile(fullgraph=True, backend="aot_eager")
    return block


def compiled_as_module(block):
    return torch.compile(block, fullgraph=True, backend="aot_eager")


@pytest.mark.skipif(TORCH_VERSION < (2, 12), reason="groups in a subclass need PyTorch 2.12")
@pytest.mark.parametrize("compiled", [compiled_in_place, compiled_as_module])
@pytest.mark.parametrize("ranks", [1, 4])
def test_compiled_blocks_send_what_eager_ones_do(compiled, ranks):
    found = []
    for how in (unchanged, compiled):
        with pretended_mesh({"fsdp": ranks}) as mesh:
            model, args = sharded(mesh, gathers_codes=True, compiled=how)
            rows = sends(model, *args).rows
        found.append([replace(row, layer=row.layer.removesuffix("._orig_mod")) for row in rows])
    assert found[0] == found[1]
    assert {row.gemm for row in found[0]} == {"fsdp"}
    gathers = [row.what for row in found[0] if row.op == "all_gather"]
    assert set(gathers) == ({"parameters, FP8 parameters with their scales"} if ranks > 1 else {"scales"})


def test_a_model_that_fsdp2_shards_is_no_model_for_a_mesh():
    with pytest.raises(ValueError, match=r"fully_shard was called on the model.*graph_fsdp"):
        explain_mesh(lambda mesh: sharded(mesh, gathers_codes=False), {"fsdp": 4})
