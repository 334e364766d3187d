"""Tools to test and explain models with torch.compile, in FP8 or not, even on machines without GPUs.

graphs/       graphs, breaks and recompiles of any model under torch.compile; imports nothing of FP8
contracts/    checks for authors of operators and quantizers
gpu/          a GPU's code on a machine without a GPU
explain/      reports on each FP8 layer of a model
memory/       what a training step holds in memory
samples/      arguments of our operators, for their contracts
numerics/     advice on recipes; where FP8, or ranks, change the values of a model
"""

import fp8compile.testing.own_library  # noqa: F401  # it makes our operators known to the programs of gpu/
from fp8compile.testing.contracts import check_op, check_quantizer, check_statistic
from fp8compile.testing.explain.bytes_sent_by_layer import Send, Sends, sends
from fp8compile.testing.explain.emulation import emulation_note
from fp8compile.testing.explain.gemm_share import GemmShare, gemm_share
from fp8compile.testing.gpu import EagerRun, GpuCode, Launch, eager_run, gpu_kernels, run_gpu_program
from fp8compile.testing.graphs import (
    CacheBypass,
    Call,
    CallReport,
    Collective,
    GraphBreak,
    GraphInfo,
    GraphReport,
    Recompile,
    Recording,
    assert_cacheable,
    assert_comm,
    assert_fullgraph,
    assert_no_recompile,
    assert_ops,
    graph_report,
    snapshot,
)
from fp8compile.testing.memory import CachedCodes, KeptTensor, MemoryReport, Moment, memory_report
from fp8compile.testing.numerics import (
    Advice,
    Comparison,
    ComparisonRow,
    Cost,
    LayerAdvice,
    RankComparison,
    RankFinding,
    advise,
    compare,
    compare_ranks,
)

__all__ = [
    "Advice",
    "CacheBypass",
    "CachedCodes",
    "Call",
    "CallReport",
    "Collective",
    "Comparison",
    "ComparisonRow",
    "Cost",
    "EagerRun",
    "GemmShare",
    "GpuCode",
    "GraphBreak",
    "GraphInfo",
    "GraphReport",
    "KeptTensor",
    "Launch",
    "LayerAdvice",
    "MemoryReport",
    "Moment",
    "RankComparison",
    "RankFinding",
    "Recompile",
    "Recording",
    "Send",
    "Sends",
    "advise",
    "assert_cacheable",
    "assert_comm",
    "assert_fullgraph",
    "assert_no_recompile",
    "assert_ops",
    "check_op",
    "check_quantizer",
    "compare",
    "compare_ranks",
    "check_statistic",
    "eager_run",
    "emulation_note",
    "gemm_share",
    "gpu_kernels",
    "graph_report",
    "memory_report",
    "run_gpu_program",
    "sends",
    "snapshot",
]
