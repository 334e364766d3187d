"""Is this really running in FP8? A model's linears, GEMM by GEMM, with the proof from its graphs."""

import fp8compile.testing.explain.exchanges  # noqa: F401  reports of graphs hear of the exchanges
from fp8compile.testing.explain.explanation import Explanation, explain, explain_in_steps
from fp8compile.testing.explain.gpu import Cast, GpuExplanation, GraphCost
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
