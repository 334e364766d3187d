"""gemm_share reads off a graph which products run in FP8."""

from __future__ import annotations

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn.functional import grouped_mm, scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

import fp8compile as f8
from fp8compile._compat import TORCH_VERSION
from fp8compile.testing.explain.gemm_share import GemmShare, gemm_share
from fp8compile.testing.gpu.gpus import GPUS
from fp8compile.testing.gpu.graphs import gpu_graphs

TOKENS, K, H = 24, 32, 48
ONE = 2 * TOKENS * K * H  # flops of a GEMM of either layer of `mlp`


def mlp(**options):
    return nn.Sequential(nn.Linear(K, H, **options), nn.ReLU(), nn.Linear(H, K, **options)).to(torch.bfloat16)


def batch(*shape):
    return torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True)


def step_graphs(fn, *args, **options):
    """Forward and backward of ``fn(*args).sum()``, as AOTAutograd hands them to a backend."""
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return make_boxed_func(graph)

    out = torch.compile(fn, fullgraph=True, backend=aot_autograd(fw_compiler=keep), **options)(*args)
    if out.requires_grad:
        out.float().sum().backward()
    return graphs


GEMMS_IN_FP8 = [("tensorwise", 6), ("rowwise", 6), ("rowwise_bf16_wgrad", 4), ("delayed", 6)]


@pytest.mark.parametrize(("recipe", "gemms"), GEMMS_IN_FP8)
@pytest.mark.parametrize("bias", [True, False])
def test_a_recipe_decides_which_gemms_are_fp8(recipe, gemms, bias):
    model = f8.convert(mlp(bias=bias), f8.recipes.by_name(recipe))
    share = gemm_share(*step_graphs(model, batch(4, 6, K)))
    assert share == GemmShare(
        fp8=gemms,
        linear=6,
        total=6,
        fp8_flops=gemms * ONE,
        fp8_linear_flops=gemms * ONE,
        linear_flops=6 * ONE,
        flops=6 * ONE,
    )
    assert share.share == share.linear_share == gemms / 6


def test_an_unconverted_model_has_no_fp8():
    share = gemm_share(*step_graphs(mlp(), batch(TOKENS, K)))
    assert (share.fp8, share.linear, share.total, share.flops) == (0, 6, 6, 6 * ONE)
    assert share.share == share.linear_share == 0.0


def test_a_layer_left_out_counts_as_bf16():
    model = f8.convert(mlp(), f8.recipes.rowwise(), filter="!2")
    share = gemm_share(*step_graphs(model, batch(TOKENS, K)))
    assert (share.fp8, share.linear, share.fp8_flops, share.flops) == (3, 6, 3 * ONE, 6 * ONE)


def test_what_a_frozen_weight_leaves_out_is_in_no_graph():
    model = f8.convert(mlp(), f8.recipes.rowwise()).requires_grad_(requires_grad=False)
    share = gemm_share(*step_graphs(model, batch(TOKENS, K)))
    assert (share.fp8, share.total, share.flops) == (4, 4, 4 * ONE)


class Attention(nn.Module):
    """Two heads of 16, of one projection; its own product is no linear layer's."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(K, 3 * K, bias=False, dtype=torch.bfloat16)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, K // 2)).permute(2, 0, 3, 1, 4)
        return scaled_dot_product_attention(q, k, v, is_causal=True)


def test_attention_counts_in_all_products_and_not_in_linear_ones():
    b, s = 4, 8
    share = gemm_share(*step_graphs(f8.convert(Attention(), f8.recipes.rowwise()), batch(b, s, K)))
    linear = 3 * 2 * b * s * K * 3 * K
    # two products forward; backward the scores again and four gradients (a mask saves none by this count)
    attention = 7 * 2 * b * s * s * K
    assert (share.fp8, share.linear, share.total) == (3, 3, 5)
    assert (share.fp8_flops, share.linear_flops, share.flops) == (linear, linear, linear + attention)
    assert share.linear_share == 1.0
    assert share.share == linear / (linear + attention)


def test_repeated_heads_count_as_often_as_they_are_used():
    if TORCH_VERSION < (2, 12):
        pytest.skip("the formula of PyTorch 2.11 takes equal numbers of heads only")
    q, k, v = (batch(2, heads, 8, 16) for heads in (4, 2, 2))
    share = gemm_share(*step_graphs(lambda *qkv: scaled_dot_product_attention(*qkv, enable_gqa=True), q, k, v))
    assert (share.total, share.flops) == (2, 7 * 2 * 2 * 4 * 8 * 8 * 16)


GROUPED = {
    "tokens by experts": ((TOKENS, K), (4, K, H), (4,), 2 * TOKENS * K * H),
    "experts by tokens": ((4, H, K), (K, TOKENS), (4,), 2 * TOKENS * K * H),
    "gradient of experts": ((K, TOKENS), (TOKENS, H), (4,), 2 * TOKENS * K * H),
    "equal groups": ((4, 8, K), (4, K, H), None, 4 * 2 * 8 * K * H),
}


@pytest.mark.parametrize(("a", "b", "groups", "flops"), GROUPED.values(), ids=GROUPED)
def test_a_grouped_product_counts_each_token_once(a, b, groups, flops):
    a, b = (torch.randn(shape, dtype=torch.bfloat16) for shape in (a, b))
    ends = None if groups is None else torch.tensor([8, 8, 16, 24], dtype=torch.int32)
    share = gemm_share(*step_graphs(lambda a, b: grouped_mm(a, b, offs=ends), a, b))
    assert (share.fp8, share.linear, share.total, share.flops) == (0, 0, 1, flops)


# in four bits two codes share a byte, and count as two
@pytest.mark.parametrize("quantizer", [f8.CurrentScaling(block=(1, -1)), f8.TwoLevelScaling()], ids=["rows", "nvfp4"])
def test_quantized_matrices_count_as_fp8(quantizer):
    def product(a, b):
        return f8.scaled_mm(f8.quantize(a, quantizer), f8.quantize(b, quantizer).t(), out_dtype=torch.bfloat16)

    share = gemm_share(*step_graphs(product, *(batch(TOKENS, K).detach() for _ in range(2))))
    assert (share.fp8, share.linear, share.flops) == (1, 1, 2 * TOKENS * TOKENS * K)


def test_products_in_a_gpus_layout_count_as_what_they_multiply():
    layer = f8.Linear(64, 96, bias=False, recipe=f8.recipes.nvfp4(), dtype=torch.bfloat16)
    rows = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    graphs = [each.graph for each in gpu_graphs(layer, (rows,), GPUS["b200"])]
    share = gemm_share(*graphs)
    assert (share.fp8, share.linear, share.total, share.flops) == (3, 3, 3, 3 * 2 * 32 * 64 * 96)


def test_pytorchs_own_fp8_product_counts_by_the_dtype_of_its_operands():
    a, b = (torch.randn(m, K).to(torch.float8_e4m3fn) for m in (TOKENS, H))
    one = torch.ones(())

    def product(a, b):
        return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)

    share = gemm_share(*step_graphs(product, a, b))
    assert (share.fp8, share.linear, share.flops) == (1, 1, ONE)


def test_convolutions_and_batched_products_agree_with_pytorchs_counter():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3, dtype=torch.bfloat16)

        def forward(self, x):
            y = self.conv(x).flatten(2)
            return torch.baddbmm(torch.zeros((), dtype=torch.bfloat16), y, y.mT)

    model, x = Model(), batch(2, 3, 6, 6)
    with FlopCounterMode(display=False) as counter:
        model(x).float().sum().backward()
    share = gemm_share(*step_graphs(model, x))
    assert share.linear == share.fp8 == 0
    assert share.flops == counter.get_total_flops() > 0


def test_both_branches_of_a_cond_count():
    model = f8.convert(mlp(), f8.recipes.rowwise())

    def either(x):
        return torch.cond(x.sum() > 0, lambda x: model[0](x), lambda x: model[0](-x), (x,))

    with torch.no_grad():
        share = gemm_share(*step_graphs(either, batch(TOKENS, K).detach()))
    assert (share.fp8, share.total, share.flops) == (2, 2, 2 * ONE)


def test_printed_it_says_both_shares():
    share = GemmShare(fp8=6, linear=9, total=11, fp8_flops=600, fp8_linear_flops=600, linear_flops=900, flops=1200)
    assert str(share) == ("6 GEMMs in FP8: 50.0% of the FLOPs of all 11, 66.7% of those of the 9 in linear layers")


def test_no_product_is_no_share():
    share = gemm_share(*step_graphs(torch.relu, batch(4)))
    assert (share.total, share.share, share.linear_share) == (0, 0.0, 0.0)


def test_a_product_without_a_formula_raises():
    graphs = step_graphs(torch.mv, batch(4, 4), batch(4))
    with pytest.raises(ValueError, match=r"aten::mv looks like a matrix product.*register_flop_formula"):
        gemm_share(*graphs)


def test_symbolic_sizes_raise():
    graphs = step_graphs(mlp(), batch(TOKENS, K), dynamic=True)
    with pytest.raises(ValueError, match=r"are symbolic.*dynamic=False"):
        gemm_share(*graphs)


def test_a_call_that_may_hide_a_product_raises():
    graph = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(K, H)))
    with pytest.raises(ValueError, match=r"node _0 calls module '0', which may contain GEMMs.*Recording"):
        gemm_share(graph)
    graph = torch.fx.symbolic_trace(lambda a, b: a.matmul(b))
    with pytest.raises(ValueError, match="node matmul calls method 'matmul'"):
        gemm_share(graph)


def test_what_is_no_graph_raises():
    with pytest.raises(ValueError, match="no graph was passed"):
        gemm_share()
    with pytest.raises(TypeError, match=r"expected .*gemm_share\(\*recording.traced\)"):
        gemm_share([torch.fx.symbolic_trace(lambda x: x + 1)])


def test_a_graph_without_shapes_raises():
    graph = torch.fx.symbolic_trace(lambda a, b: torch.ops.aten.mm.default(a, b))
    with pytest.raises(ValueError, match=r"no meta\['val'\].*AOTAutograd"):
        gemm_share(graph)
