"""Reports on any model under torch.compile, with assertions, snapshots and a pytest plugin."""

from fp8compile.testing.graphs.assertions import (
    assert_cacheable,
    assert_comm,
    assert_fullgraph,
    assert_no_recompile,
    assert_ops,
)
from fp8compile.testing.graphs.compiler_log import CacheBypass, GraphBreak, Recompile
from fp8compile.testing.graphs.messages import register_message
from fp8compile.testing.graphs.recording import Recording
from fp8compile.testing.graphs.report import Call, CallReport, Collective, GraphInfo, GraphReport, graph_report
from fp8compile.testing.graphs.snapshot import snapshot

__all__ = [
    "CacheBypass",
    "Call",
    "CallReport",
    "Collective",
    "GraphBreak",
    "GraphInfo",
    "GraphReport",
    "Recompile",
    "Recording",
    "assert_cacheable",
    "assert_comm",
    "assert_fullgraph",
    "assert_no_recompile",
    "assert_ops",
    "graph_report",
    "register_message",
    "snapshot",
]
