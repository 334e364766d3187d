"""What docs/upstream.md says of PyTorch and a user's Triton kernels; a version that fixes it fails here."""

from __future__ import annotations

import importlib.util
import time

import pytest
import torch

from fp8compile._compat import TORCH_VERSION
from fp8compile.testing import gpu_kernels, run_gpu_program
from fp8compile.testing.gpu.gpus import GPUS, pretend_triton

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs Triton's interpreter"),
]


@pytest.mark.parametrize(("name", "copies"), [("loads", 0), ("loads_by_a_helper", 1)])
def test_what_a_helper_loads_for_an_address_is_copied(name, copies):
    import upstream_kernels

    x, index = torch.randn(4096), torch.zeros(4096, dtype=torch.int32)
    (code,) = gpu_kernels(getattr(upstream_kernels, name), x, index)
    assert sum(launch.name.startswith("triton_poi") for launch in code.launches) == copies


@pytest.mark.skipif(TORCH_VERSION < (2, 13), reason="2.11 remembers what it has visited")
def test_the_analysis_takes_time_that_doubles_with_each_step():
    from torch._higher_order_ops.triton_kernel_wrap import identify_accessed_tensors
    from upstream_kernels import deep_kernel

    def seconds(depth):
        arguments = {"x_ptr": torch.empty(2), "out_ptr": torch.empty(2), "n": 64, "DEPTH": depth, "BLOCK": 64}
        started = time.process_time()
        identify_accessed_tensors(deep_kernel, arguments, {})
        return time.process_time() - started

    with pretend_triton(GPUS["h200"]):
        assert seconds(18) > 6 * seconds(14)  # 16 times, and what both do alike


def test_an_autotuner_gets_the_configuration_of_another():
    import upstream_kernels

    x = torch.randn(512)
    run = run_gpu_program(upstream_kernels.doubled_twice, x)
    assert [bool((each == 2 * x).all()) for each in run.outputs] == [True, False]
