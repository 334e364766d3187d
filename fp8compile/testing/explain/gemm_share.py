"""The share of a model's matrix products that runs in FP8, computed from AOTAutograd's graphs.

    model --Dynamo, AOTAutograd--> forward graph, backward graph --inspect each node--> GemmShare

The graphs come from after autograd, but before this package's ops are decomposed. Each GEMM of a layer is one node of
these graphs, and the node's recipe tells whether the operands are FP8. A layer that fell back to bf16 is an `mm` node,
which counts as bf16. `fp8compile doctor` reports how a device multiplies FP8 operands; a CPU may emulate.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from fp8compile import ops
from fp8compile.formats import ELEMENT_FORMATS, Float8Format
from fp8compile.testing.graphs.recording import node_value, op_name

__all__ = ["GemmShare", "LOOKS_LIKE_PRODUCT", "flop_formulas", "gemm_share"]

FLOAT8 = frozenset(f.dtype for f in ELEMENT_FORMATS.values() if isinstance(f, Float8Format))
CODE_PRODUCTS = frozenset(op.name() for op in (ops.scaled_mm, ops.scaled_grouped_mm, *ops.FOUR_BIT_PRODUCTS))
LAYER_GEMMS = {op.name(): gemm for op, gemm in ops.LAYER_OPS.items()}
# products of two matrices; those of attention, stacked experts and convolutions are batched, grouped or fused
MATRIX_OPS = frozenset({
    "aten::mm", "aten::addmm", "aten::_scaled_mm", "aten::_scaled_mm_v2",
    *(op.name() for op in ops.FLOP_FORMULAS),
})  # fmt: skip
# an op with such a name and no formula raises, because the share would be silently wrong
LOOKS_LIKE_PRODUCT = re.compile(r"(mm|mv|dot|matmul|linear)(_|$)|attention|convolution")


@dataclass(frozen=True, kw_only=True)
class GemmShare:
    """Counts of the GEMMs in graphs, and of those with FP8 or FP4 operands.

    ``str`` returns the counts in one line.

    Attributes:
        fp8: Number of GEMMs with FP8 or FP4 operands.
        linear: Number of GEMMs of two matrices: those of linear layers, converted or not, and of similar layers that
            are not an ``nn.Linear`` (``Conv1D``, routers). Grouped GEMMs of converted experts are included.
        total: Number of all GEMMs, including attention, stacked weights of experts, and convolutions.
        fp8_flops: Floating-point operations of the GEMMs in ``fp8``.
        fp8_linear_flops: Floating-point operations of the GEMMs in both ``fp8`` and ``linear``.
        linear_flops: Floating-point operations of the GEMMs in ``linear``.
        flops: Floating-point operations of all GEMMs.
    """

    fp8: int
    linear: int
    total: int
    fp8_flops: int
    fp8_linear_flops: int
    linear_flops: int
    flops: int

    @property
    def share(self) -> float:
        """Fraction (0 to 1) of the floating-point operations of all GEMMs that runs in FP8."""
        return self.fp8_flops / self.flops if self.flops else 0.0

    @property
    def linear_share(self) -> float:
        """Fraction (0 to 1) of the floating-point operations of linear layers that runs in FP8."""
        return self.fp8_linear_flops / self.linear_flops if self.linear_flops else 0.0

    def __str__(self) -> str:
        return (
            f"{self.fp8} GEMMs in FP8: {self.share:.1%} of the FLOPs of all {self.total}, {self.linear_share:.1%} "
            f"of those of the {self.linear} in linear layers"
        )


@dataclass(frozen=True, kw_only=True)
class _Product:
    flops: int
    is_fp8: bool
    is_linear: bool


def flop_formulas() -> dict[str, Callable[..., int]]:
    """FLOP formulas by operator name: PyTorch's registry, and formulas that some versions lack.

    The registry includes this package's formulas for PyTorch's grouped GEMMs and ``_scaled_mm_v2``, see
    `fp8compile.ops.layer.flop_formulas`.
    """
    from torch.utils.flop_counter import flop_registry

    def attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
        # scores, then the output; if there are fewer heads of keys than of queries, they are repeated
        return 2 * q.shape[:-1].numel() * k.shape[-2] * (q.shape[-1] + v.shape[-1])

    def attention_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
        # scores again, gradients of scores, v, q and k
        return 2 * q.shape[:-1].numel() * k.shape[-2] * (3 * q.shape[-1] + 2 * v.shape[-1])

    found: dict[str, Callable[..., int]] = {op_name(op): formula for op, formula in flop_registry.items()}
    missing: dict[str, Callable[..., int]] = {
        "aten::_scaled_dot_product_flash_attention_for_cpu": attention,  # PyTorch has these two from 2.15
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward": attention_backward,
    }
    return missing | found


def _is_fp8(name: str, args: Sequence[Any]) -> bool:
    namespace, _, op = name.partition("::")
    if namespace != "fp8compile":
        return "scaled" in op and all(getattr(a, "dtype", None) in FLOAT8 for a in args[:2])
    if name in CODE_PRODUCTS:
        return True
    if op == "grouped_mm":
        return False
    return args[-1].quantizers(LAYER_GEMMS[name]) is not None


def _product(node: fx.Node, name: str, formula: Callable[..., int]) -> _Product:
    args, kwargs = fx.map_arg((node.args, node.kwargs), node_value)
    flops = formula(*args, **kwargs, out_val=node_value(node))
    if not isinstance(flops, int):
        raise ValueError(
            f"gemm_share: the sizes of node {node.name} are symbolic, so its FLOPs are unknown. Compile with "
            "dynamic=False."
        )
    return _Product(flops=flops, is_fp8=_is_fp8(name, args), is_linear=name in MATRIX_OPS)


def _products(graph: fx.GraphModule) -> Iterator[_Product]:
    formulas = flop_formulas()
    modules = [module for module in graph.modules() if isinstance(module, fx.GraphModule)]
    for node in (node for module in modules for node in module.graph.nodes):
        if node.op in ("call_module", "call_method"):
            raise ValueError(
                f"gemm_share: node {node.name} calls {'module' if node.op == 'call_module' else 'method'} "
                f"{node.target!r}, which may contain GEMMs that are not counted. Pass the graphs that AOTAutograd "
                "passes to a backend, as recorded by fp8compile.testing.Recording."
            )
        if node.op != "call_function":
            continue
        name = op_name(node.target)
        if name in formulas:
            yield _product(node, name, formulas[name])
        elif LOOKS_LIKE_PRODUCT.search(name):
            raise ValueError(
                f"gemm_share: {name} looks like a matrix product, but its FLOPs are unknown. Register a formula "
                "with torch.utils.flop_counter.register_flop_formula."
            )


def gemm_share(*graphs: fx.GraphModule) -> GemmShare:
    """Count the GEMMs in graphs, and those among them with FP8 operands.

    Pass the graphs that AOTAutograd passes to a backend, without decompositions of this package's ops.
    ``Recording`` records such graphs:

        recording = Recording()
        torch.compile(model, backend=recording, dynamic=False)(x).sum().backward()
        print(gemm_share(*recording.traced))

    Operations are counted with the formulas of ``torch.utils.flop_counter``: a mask does not save operations, and both
    branches of a ``cond`` count. A GEMM that the recipe leaves in high precision does not count as FP8.

    Args:
        graphs: Forward and backward graphs. Each node must have its value in ``meta["val"]``, and sizes must be
            static.

    Returns:
        The counts, with the share of FP8 in all GEMMs and in GEMMs of linear layers.

    Raises:
        TypeError: An argument is not a graph.
        ValueError: There is no graph; a shape is unknown or symbolic; a node calls a module or method; or an operator
            that looks like a GEMM has no formula.
    """
    if not graphs:
        raise ValueError(
            "gemm_share: no graph was passed. Record them: recording = fp8compile.testing.Recording('aot_eager'); "
            "torch.compile(model, backend=recording)(x).sum().backward(); gemm_share(*recording.traced)."
        )
    for graph in graphs:
        if not isinstance(graph, fx.GraphModule):
            raise TypeError(
                f"gemm_share: expected torch.fx.GraphModule arguments, got a {type(graph).__name__}. Pass one graph "
                "per argument: gemm_share(*recording.traced)."
            )
    products = [product for graph in graphs for product in _products(graph)]
    return GemmShare(
        fp8=sum(p.is_fp8 for p in products),
        linear=sum(p.is_linear for p in products),
        total=len(products),
        fp8_flops=sum(p.flops for p in products if p.is_fp8),
        fp8_linear_flops=sum(p.flops for p in products if p.is_fp8 and p.is_linear),
        linear_flops=sum(p.flops for p in products if p.is_linear),
        flops=sum(p.flops for p in products),
    )
