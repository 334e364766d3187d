"""What a block in four bits reads and writes on a B200, beside the least that `benchmarks.bytes_limit` counts."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from block_rows import LLAMA, TOKENS, row_of
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import silu

import fp8compile as f8
from benchmarks.bytes_limit import LEAST
from fp8compile.testing import gpu_kernels

pytestmark = [
    pytest.mark.skipif(
        not importlib.util.find_spec("triton"), reason="needs Triton: Inductor prints its kernels with it"
    ),
]
CODES, AMAXES = (f"fp8compile.{name}.default" for name in ("quantize_two_levels", "outer_amaxes"))


# A launched kernel reads its operand from memory: SwiGLU's output and the gradients behind it are written, and read by
# quantize_two_levels. In the attention block, no operand is the result of pointwise code alone.
MOST_TO_LEAST = {"mlp": 1.22, "attention": 1.10}


@pytest.mark.slow
@pytest.mark.parametrize("kind", LEAST)
def test_a_block_is_near_the_least_bytes(kind):
    least = sum(LEAST[kind]("nvfp4", TOKENS, LLAMA).values()) / 1e9
    found = row_of("nvfp4", kind)["sum GB"]
    assert found <= MOST_TO_LEAST[kind] * least, f"{found:.3f} GB, the least {least:.3f}: {found / least:.3f}"


class Gated(nn.Module):
    """Two layers, of a norm's output and of a silu's with a product: what computes an operand takes its amaxes too."""

    def __init__(self, dim, hidden):
        super().__init__()
        self.norm = nn.RMSNorm(dim, dtype=torch.bfloat16)
        self.up, self.down = (
            nn.Linear(*sizes, bias=False, dtype=torch.bfloat16) for sizes in ((dim, hidden), (hidden, dim))
        )

    def forward(self, x, gate):
        return self.down(silu(gate) * self.up(self.norm(x)))


@pytest.mark.slow
def test_no_generated_kernel_spills():
    """The kernels of outer amaxes hold sixteen rows of a column and their transform: 178 of 255 registers."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = f8.convert(Gated(4096, 14336), f8.recipes.nvfp4(), filter="*")
        x, gate = (torch.empty(8192, n, dtype=torch.bfloat16, requires_grad=True) for n in (4096, 14336))
        codes = gpu_kernels(model, x, gate, arch="b200")
    found = [each for code in codes for each in code.resources()]
    assert {each.name for each in found} == {name for code in codes for name in code.kernels}
    assert max(each.registers for each in found) > 100, "no kernel that takes amaxes of a transform"
    assert not any(each.spilled_bytes for each in found), [*map(str, found)]


def test_an_activation_and_a_gradient_are_read_twice_each():
    m, k, n = 4096, 2048, 1024
    with FakeTensorMode(allow_non_fake_inputs=True):
        layer = f8.Linear(k, n, bias=False, dtype=torch.bfloat16, recipe=f8.recipes.nvfp4())
        x = torch.empty(m, k, dtype=torch.bfloat16, requires_grad=True)
        codes = gpu_kernels(lambda x: layer(torch.relu(x)), x, arch="b200")
    launches = [launch for code in codes for launch in code.launches]
    quantizing = [launch for launch in launches if launch.op == CODES]
    of_x, of_grad = 2 * m * k, 2 * m * n  # bytes
    by_size = [launch for launch in launches if launch.kind != "gemm" and launch.bytes_read >= of_grad]
    # relu's result, then its amaxes; the weight for its amax, gradients, then relu's backward
    (amaxes,) = [each for each in launches if each.op == AMAXES and each.bytes_read in range(of_x, of_x + 100)]
    assert amaxes.bytes_written == 2 * 4
    for launch, size in zip(quantizing, (of_x, of_grad), strict=True):
        assert launch.bytes_read - size < 10_000, launch
        assert launch.bytes_written <= 0.6 * size, f"codes and scales of both directions: {launch}"
    assert sum(launch.bytes_read for launch in by_size if launch.bytes_read in range(of_grad, of_grad + 10_000)) == (
        pytest.approx(2 * of_grad, rel=0.01)
    ), "a gradient is read for its amaxes and for its codes"
