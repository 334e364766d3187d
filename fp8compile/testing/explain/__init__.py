"""Reports whether a model really runs in FP8: for each GEMM of its linears, with its graphs as proof."""

import fp8compile.testing.explain.exchanges  # noqa: F401  registers the exchanges' messages
from fp8compile.testing.explain.explanation import Explanation, explain, explain_in_steps
from fp8compile.testing.explain.gpu_code import Cast, GpuExplanation, GraphCost
from fp8compile.testing.explain.layers import GemmExplanation, LayerExplanation
from fp8compile.testing.explain.mesh import MeshExplanation, Product, explain_mesh
from fp8compile.testing.explain.messages import Message
from fp8compile.testing.explain.roofline import PEAKS, Peaks, Roofline

__all__ = [
    "PEAKS",
    "Cast",
    "Explanation",
    "GemmExplanation",
    "GpuExplanation",
    "GraphCost",
    "LayerExplanation",
    "MeshExplanation",
    "Message",
    "Peaks",
    "Product",
    "Roofline",
    "explain",
    "explain_in_steps",
    "explain_mesh",
]
