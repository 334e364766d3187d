"""GPU code of a step of f8.optim.AdamW: one kernel a parameter, which reads and writes everything once."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8compile.optim import AdamW
from fp8compile.optim.compiled_step import advance
from fp8compile.testing import gpu_kernels

ROWS, COLUMNS = 4096, 1024


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_a_step_is_one_kernel_that_reads_and_writes_everything_once(rounding):
    with FakeTensorMode(), torch.no_grad():
        p = nn.Parameter(torch.empty(ROWS, COLUMNS))
        p.grad = torch.empty(ROWS, COLUMNS)
        optimizer = AdamW([p], rounding=rounding)
        list(optimizer._with_state(optimizer.param_groups[0], p.device))
        shape, own, moments, *others = optimizer.job(p, optimizer.param_groups[0]).arguments()

        def step(scalars, parameter, grad, *parts):
            advance(AdamW.rule, scalars, [(shape, (parameter, grad, parameter), (parts[:2], parts[2:]), *others)])

        (code,) = gpu_kernels(step, torch.empty(1, 12), *own[:2], *moments[0], *moments[1])
    (launch,) = code.launches
    # a parameter, its gradient, codes and scales of two moments
    assert launch.bytes_written == ROWS * COLUMNS * (4 + 2 + 2 * 4 / 128)
    read = ROWS * COLUMNS * (4 + 4 + 2 + 2 * 4 / 128)
    assert read < launch.bytes_read <= read + 12 * 4  # and the scalars
