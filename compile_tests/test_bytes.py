"""The byte table: what a block reads and writes on an H200, forward and backward, ours and torchao's in one run.

Bytes are Inductor's count for generated code, each buffer once a kernel, with what opaque ops launch inside.
"""

from __future__ import annotations

import importlib.util

import pytest
from block_rows import LLAMA, TOKENS, row_of
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.blocks import block
from fp8compile.testing.gpu.gpus import gpu_called
from fp8compile.testing.gpu.graphs import gpu_graphs

pytestmark = [
    pytest.mark.skipif(
        not importlib.util.find_spec("triton"), reason="needs Triton: Inductor prints its kernels with it"
    ),
    pytest.mark.skipif(
        not importlib.util.find_spec("torchao"), reason="compares with torchao, which is not installed"
    ),
]
MOST = [
    ("tensorwise", "torchao tensorwise", 1.00),
    ("rowwise", "torchao rowwise", 0.70),
    ("rowwise_bf16_wgrad", "torchao rowwise_with_gw_hp", 0.95),
    ("delayed", "torchao tensorwise", 0.75),
    ("delayed_freeing", "torchao tensorwise", 0.80),
    ("tensorwise_keeping", "torchao tensorwise", 0.95),
    ("blockwise", "torchao tensorwise", 0.93),
    ("tensorwise_parameters", "torchao tensorwise", 0.87),
    ("blockwise_parameters", "torchao tensorwise", 0.85),
]
# The backward repeats heads of k and v again, in GB: 101 MB less are kept (tests of `test_kept_mb.py`). torchao's keep
# the repeated ones.
HEADS_AGAIN = 2 * 2 * TOKENS * (LLAMA.kv_heads + LLAMA.heads) * LLAMA.head_dim / 1e9
# attention itself and the copies before it, a quarter of the bytes, are the same for all
MOST_OF_ATTENTION = [
    ("tensorwise", "torchao tensorwise", 0.97),
    ("rowwise", "torchao rowwise", 0.88),
    ("rowwise_bf16_wgrad", "torchao rowwise_with_gw_hp", 0.88),
    ("delayed", "torchao tensorwise", 0.93),
    ("blockwise", "torchao tensorwise", 0.95),
]


def assert_ratio(kind, ours, theirs, most):
    own, other = (row_of(contender, kind)["sum GB"] for contender in (ours, theirs))
    own -= HEADS_AGAIN if kind == "attention" else 0
    assert own <= most * other, f"{ours}: {own:.6f} GB, {theirs}: {other:.6f} GB, ratio {own / other:.4f}"


@pytest.mark.parametrize(("ours", "theirs", "most"), MOST)
def test_bytes_of_a_feed_forward_block(ours, theirs, most):
    assert_ratio("mlp", ours, theirs, most)


@pytest.mark.parametrize(("ours", "theirs", "most"), MOST_OF_ATTENTION)
def test_bytes_of_an_attention_block(ours, theirs, most):
    assert_ratio("attention", ours, theirs, most)


def saved_on_gpu(contender):
    """Bytes of what a GPU's forward graph keeps for the backward, without parameters and the input."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, x = block("mlp", contender, TOKENS, LLAMA)
        forward, _ = gpu_graphs(model, (x,), gpu_called("h200"))
    (outputs,) = forward.graph.graph.find_nodes(op="output")[0].args
    kept = [node.meta["val"] for node in outputs[1:] if node.op != "placeholder"]
    return sum(value.untyped_storage().nbytes() for value in kept)


@pytest.mark.parametrize(
    ("contender", "beside"),
    [
        ("tensorwise", 0),
        ("rowwise", 4 * (2 * LLAMA.d + LLAMA.h)),  # the amax of each column of the weights
        ("blockwise", 3 * 4 * LLAMA.d * LLAMA.h // 128**2),  # the amax of each block of the weights
        ("delayed_freeing", 0),
        ("delayed", 3 * LLAMA.d * LLAMA.h),  # the codes of the weights
    ],
)
def test_what_saves_bytes_keeps_no_codes_but_those_of_weights_that_a_recipe_asks_for(contender, beside):
    """Two hidden activations, the norm's statistics, a few scalars."""
    assert beside <= saved_on_gpu(contender) <= 2 * 2 * TOKENS * LLAMA.h + 4 * TOKENS + beside + 1024


def test_inductor_launches_every_kernel():
    from benchmarks.kernels import arch_for
    from fp8compile.testing import gpu_kernels

    for contender in ("rowwise", "blockwise"):
        with FakeTensorMode(allow_non_fake_inputs=True):
            model, x = block("mlp", contender, TOKENS, LLAMA)
            codes = gpu_kernels(model, x, arch=arch_for(contender))
        opaque = {launch.name for code in codes for launch in code.launches if launch.kind == "opaque"}
        assert not opaque, opaque
