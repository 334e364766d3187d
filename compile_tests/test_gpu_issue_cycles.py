"""Kernels limited by memory issue few enough instructions to reach the GPU's bandwidth; GEMMs do not spill.

The ratio finds slow kernels without a GPU: see `fp8compile.testing.explain.issue_cycles`.
"""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fp8compile as f8

pytest.importorskip("triton", reason="needs Triton: it compiles to PTX, and brings ptxas")

from benchmarks.experts import experts_arguments, feed_forward
from benchmarks.gpu_resources import BLOCKS
from fp8compile.optim.adamw import AdamW
from fp8compile.optim.compiled_step import Job, advance
from fp8compile.optim.moments import MomentRows, StoredMoment
from fp8compile.testing.explain.issue_cycles import MOST, issue_cycles
from fp8compile.testing.gpu.compiled import compiled_kernels
from fp8compile.testing.gpu.gpus import GPUS
from fp8compile.testing.gpu.graphs import gpu_graphs
from fp8compile.testing.gpu.schedule import schedule

# why a kernel's ratio on an H200 may be this large
EXCEPTIONS = {
    "groups_both_kernel": (1.5, "each scale is computed by the 8 to 16 threads that use it"),
    "both_kernel": (1.4, "as groups_both_kernel"),
}
SWIGLU = "silu and its derivative in float32 for each amax and each cast of a SwiGLU, which Inductor computes again"
# the largest ratio of Inductor's kernels that move a MB or more, and why it is above MOST
GENERATED = {
    ("h200", "feed-forward", "rowwise"): (1.6, SWIGLU),
    ("h200", "feed-forward", "blockwise"): (1.8, SWIGLU),
    ("h200", "experts", "blockwise"): (1.4, "rows times routing weights, an index x // 2048 an element; as in bf16"),
}
CASES = [
    ("h200", "experts", "rowwise"),
    ("h200", "experts", "blockwise"),
    ("h200", "feed-forward", "rowwise"),
    ("h200", "feed-forward", "blockwise"),
    ("rtx5090", "experts", "rowwise"),
    ("rtx5090", "experts", "blockwise"),
    ("rtx5090", "feed-forward", "rowwise"),
]
MEGABYTE = 2**20
NUMBER = re.compile(r"_\d+$")


def block_of(block, recipe):
    if block != "experts":
        return BLOCKS[block](recipe)
    return partial(feed_forward, recipe=f8.recipes.by_name(recipe)), experts_arguments(65536, 2048, 768, 128)


def kernels(arch, block, recipe):
    """Name, counts and bytes of each kernel that a step launches."""
    gpu = GPUS[arch]
    torch._dynamo.reset()
    with FakeTensorMode():
        graphs = gpu_graphs(*block_of(block, recipe), gpu)
        schedules = [schedule(graph, gpu) for graph in graphs]
    torch._dynamo.reset()
    for found in schedules:
        moved = {each.name: each.bytes_read + each.bytes_written for each in found.launches}
        for compiled in compiled_kernels(found.source, gpu, most=1):
            yield compiled.name, issue_cycles(compiled, arch), moved.get(compiled.name, 0)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_kernels_reach_the_bandwidth_by_the_instructions_that_they_issue(case):
    arch, *block = case
    every = list(kernels(arch, *block))
    check_generated(case, [counts for name, counts, moved in every if name.startswith("triton_") and moved > MEGABYTE])
    found = [(NUMBER.sub("", name), counts) for name, counts, _ in every if not name.startswith("triton_")]
    assert found
    assert not any(counts.spills_in_loop for _, counts in found), found
    moving = [(name, counts) for name, counts in found if not counts.has_tensor_cores]
    limits = {name: limit for name, (limit, _) in EXCEPTIONS.items()} if arch == "h200" else {}
    slow = [counts for name, counts in moving if counts.ratio > limits.get(name, MOST)]
    assert not slow, "\n".join(map(str, slow))
    names = {name for name, counts in moving if counts.ratio > MOST}
    assert names == {name for name, _ in moving} & limits.keys(), "an exception that is none any more"


def check_generated(case, kernels):
    assert kernels
    most, _ = GENERATED.get(case, (MOST, ""))
    slow = [counts for counts in kernels if counts.ratio > most and not counts.has_tensor_cores]
    assert not slow, "\n".join(map(str, slow))
    if case in GENERATED:
        assert any(counts.ratio > MOST for counts in kernels), "an exception that is none any more"


# limits of the ratio of Inductor's kernel for a step, in its fastest configuration, and reasons
ADAMW = {
    "nearest": (0.8, "clamps before each cast, and in both maxima, propagate NaN: 6 comparisons an element"),
    "stochastic": (1.4, "as for nearest, and a hash in 64-bit integers for each moment"),
}


def adamw_step(rounding):
    """The step of `f8.optim.AdamW` for a parameter (4096, 4096), and its arguments."""
    parameter = torch.empty(4096, 4096)
    rows, group = MomentRows.of(parameter), {"rounding": rounding, "seed": 0}
    stored = [
        StoredMoment.of_group(name, {**group, f"{name}_dtype": torch.float8_e4m3fn}, root=root)
        for name, root in AdamW.moments.items()
    ]
    moments = tuple(each.parts(each.zeros(parameter, rows), rows) for each in stored)
    quantizers, (shape, _) = tuple(each.quantizer_for(rows) for each in stored), rows.in_blocks()

    def step(parameter, grad, moments, scalars):
        advance(AdamW.rule, scalars, [Job(shape, parameter, grad, parameter, moments, quantizers).arguments()])

    return step, (parameter, torch.empty_like(parameter), moments, torch.empty(1, 12))


@pytest.mark.slow
@pytest.mark.parametrize("rounding", ADAMW)
def test_a_step_of_adamw_issues_few_instructions(rounding):
    gpu = GPUS["h200"]
    with FakeTensorMode():
        (graph,) = gpu_graphs(*adamw_step(rounding), gpu)
        source = schedule(graph, gpu).source
    found = [issue_cycles(each, "h200") for each in compiled_kernels(source, gpu, most=3)]
    assert {each.name for each in found} == {"triton_per__0"}, "a step is not a single kernel"
    most, _ = ADAMW[rounding]
    least = min(found, key=lambda each: each.ratio)
    assert MOST < least.ratio <= most, "\n".join(map(str, found))
    assert not least.float64, least
