"""The bytes of a schedule have what an operator writes and nobody reads."""

from __future__ import annotations

import pytest
import torch

import fp8compile as f8
from fp8compile import ops
from fp8compile.testing.gpu.gpus import GPUS
from fp8compile.testing.gpu.graphs import gpu_graphs
from fp8compile.testing.gpu.schedule import schedule

M, K = 1024, 512
ROWS, COLUMNS = f8.CurrentScaling(block=(1, 128)), f8.CurrentScaling(block=(128, 1))
CODES, SCALES = M * K, 4 * M * K // 128  # of each direction


@pytest.mark.parametrize("read", [1, 2, 4])
def test_a_result_that_nobody_reads_is_written_all_the_same(read):
    x = torch.empty(M, K, dtype=torch.bfloat16)
    (graph,) = gpu_graphs(lambda x: ops.cast_transpose(x, ROWS, COLUMNS)[:read], (x,), GPUS["h200"])
    found = schedule(graph, GPUS["h200"])
    (launch,) = found.launches
    assert (launch.kind, launch.op) == ("triton", "fp8compile.cast_transpose.default")
    assert launch.bytes_read == 2 * M * K
    assert launch.bytes_written == 2 * (CODES + SCALES)
    assert found.bytes == launch.bytes_read + launch.bytes_written
