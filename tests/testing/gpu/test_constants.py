"""Functions that make a tensor of numbers, ``torch.tensor([...])``: its numbers are a part of the GPU's program."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import nn

from fp8compile.testing import gpu_kernels, run_gpu_program
from fp8compile.testing.memory import memory_report

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs Triton's interpreter"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]


class WithNumbers(nn.Module):
    """A layer whose output is scaled by numbers, in several dtypes."""

    def __init__(self, count=4):
        super().__init__()
        self.layer, self.count = nn.Linear(16, 16), count

    def forward(self, x):
        scaled = self.layer(x).view(-1, self.count) * torch.tensor([0.1 * each for each in range(self.count)])
        index = torch.tensor([[3, 1], [0, 0]])
        return scaled[:, index] + torch.tensor([2.5, 2.5], dtype=torch.float64).float(), torch.tensor([]) * 2


def args():
    return (torch.randn(8, 16, generator=torch.Generator().manual_seed(0)),)


def test_a_program_has_its_numbers(assert_bits_equal):
    torch.manual_seed(0)
    model = WithNumbers()
    run = run_gpu_program(model, *args())
    assert not run.differences, str(run.differences)
    (x,) = args()
    by_hand = (x.double() @ model.layer.weight.double().t() + model.layer.bias.double()).float()
    by_hand = by_hand.view(-1, 4) * torch.tensor([0.0, 0.1, 0.2, 0.1 * 3])
    assert_bits_equal(run.outputs[0], by_hand[:, [[3, 1], [0, 0]]] + 2.5, "output")


def test_its_code_and_its_memory_are_reported():
    forward, backward = gpu_kernels(WithNumbers(), *args())
    assert len(forward.gemms) == len(backward.gemms) == 1
    assert "NVIDIA H200" in str(memory_report(WithNumbers(), *args()))


def test_more_numbers_than_a_program_takes_are_refused_in_words():
    with pytest.raises(
        Exception, match=r"a constant tensor of 128 elements, .* support at most 64 elements\. Make it a buffer"
    ) as caught:
        gpu_kernels(WithNumbers(128), *args())
    assert isinstance(caught.value, NotImplementedError)
