"""Regression tests against graph breaks, recompiles and lost fusions: for any model, FP8 or not."""

from fp8compile.testing.checks import (
    assert_cacheable,
    assert_comm,
    assert_fullgraph,
    assert_no_recompile,
    assert_ops,
)
from fp8compile.testing.compiler_log import CacheBypass, GraphBreak, Recompile
from fp8compile.testing.gemm_share import GemmShare, gemm_share
from fp8compile.testing.gpu_kernels import GpuCode, Launch, gpu_kernels
from fp8compile.testing.gpu_program import EagerRun, eager_run, run_gpu_program
from fp8compile.testing.op_contracts import check_op
from fp8compile.testing.quantizer_contracts import check_quantizer
from fp8compile.testing.recording import Recording
from fp8compile.testing.report import Call, CallReport, Collective, GraphInfo, GraphReport, graph_report
from fp8compile.testing.sends import Send, Sends, sends
from fp8compile.testing.snapshot import snapshot

__all__ = [
    "CacheBypass",
    "Call",
    "CallReport",
    "Collective",
    "EagerRun",
    "GemmShare",
    "GpuCode",
    "GraphBreak",
    "GraphInfo",
    "GraphReport",
    "Launch",
    "Recompile",
    "Recording",
    "Send",
    "Sends",
    "assert_cacheable",
    "assert_comm",
    "assert_fullgraph",
    "assert_no_recompile",
    "assert_ops",
    "check_op",
    "check_quantizer",
    "eager_run",
    "gemm_share",
    "gpu_kernels",
    "graph_report",
    "run_gpu_program",
    "sends",
    "snapshot",
]
