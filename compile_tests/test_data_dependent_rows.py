"""A number of rows that only the data knows, as of tokens routed to an expert: one graph, with Inductor too."""

from __future__ import annotations

import pytest
import torch

import fp8compile as f8

SPLITS = ([16, 0], [5, 11])  # an expert without tokens, then other numbers in the same graph


def experts(x, weights, counts, recipe):
    sizes = counts.tolist()
    for size in sizes:
        torch._check(size >= 0)
    torch._check(sum(sizes) <= x.shape[0])
    parts = torch.split(x[: sum(sizes)], sizes)
    return torch.cat([f8.linear(part, w, recipe=recipe) for part, w in zip(parts, weights.unbind(0), strict=True)])


# blockwise and mxfp8 compile four times as long; they went through before the others did
@pytest.mark.parametrize(
    "name",
    [
        "tensorwise",
        "rowwise",
        pytest.param("rowwise_bf16_wgrad", marks=pytest.mark.slow),
        pytest.param("blockwise", marks=pytest.mark.slow),
        pytest.param("mxfp8", marks=pytest.mark.slow),
    ],
)
def test_rows_that_only_the_data_knows_have_the_bits_of_eager(name, assert_bits_equal):
    recipe = f8.recipes.by_name(name)
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(2, 48, 32, generator=generator).bfloat16()
    x, grad = (torch.randn(16, size, generator=generator).bfloat16() for size in (32, 48))
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(experts, fullgraph=True)
        for split in SPLITS:
            results = []
            for call in (compiled, experts):
                leaves = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
                y = call(*leaves, torch.tensor(split), recipe)
                y.backward(grad)
                results.append((y, *(leaf.grad for leaf in leaves)))
            for what, actual, expected in zip(("output", "grad_input", "grad_weight"), *results, strict=True):
                assert_bits_equal(actual, expected, f"{what} of {split}")
