"""The reference of a `Program`, which is generated code: runs its graph, operator by operator in PyTorch.

Inductor computes in float32 and rounds a value to bfloat16 or float16 when it is stored, so values that never leave a
kernel are not rounded. The reference does the same: it keeps such results in float32 until something stores them or
reads their bits, as `fp8compile.ops.rounding_barrier` does. With Inductor's ``emulate_precision_casts``, every
operator rounds, in generated code and in the reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional
from torch._inductor import inductor_prims
from torch.utils import _pytree as pytree

from fp8compile.testing.gpu.gpus import Gpu
from fp8compile.testing.gpu.program.bounds import (
    SIDES,
    Bounded,
    bounded_attention,
    bounded_product,
    in_float64,
    is_attention,
    outside,
)
from fp8compile.testing.gpu.program.messages import message
from fp8compile.testing.gpu.program.operators import computed
from fp8compile.testing.gpu.program.own_kernels import implementation_on_gpu, launched
from fp8compile.testing.gpu.program.products import PRODUCTS, Products
from fp8compile.testing.gpu.program.random_numbers import RandomNumbers, seeds
from fp8compile.testing.gpu.program.result import Difference
from fp8compile.testing.gpu.schedule import Schedule, ScheduledLaunch, is_fused_addition, taken_from

__all__ = ["Reference"]

aten: Any = torch.ops.aten
prims: Any = torch.ops.prims
LOW_PRECISION = (torch.bfloat16, torch.float16)
DRAWS = (inductor_prims.random, inductor_prims.randint)
COMPARISONS = tuple(getattr(aten, name).Scalar for name in ("gt", "ge", "lt", "le", "eq", "ne"))


class Reference(fx.Interpreter):
    """Runs a graph by the rules of generated code.

    Args:
        graph: The graph.
        gpu: The GPU, whose requirements on matrix products are checked.
        found: Inductor's schedule of the graph.
        numbers: The random numbers of the run.
        written: Results of templates in generated code, by the buffer's name.
        rounds_each: Whether each operator's result is rounded to its dtype.

    Attributes:
        products: Computes the matrix products, and records each call.
        outside: Results of templates that are further from the exact ones than their bounds.
    """

    def __init__(
        self, graph: fx.GraphModule, gpu: Gpu, found: Schedule, numbers: RandomNumbers,
        written: Mapping[str, Tensor], *, rounds_each: bool,
    ) -> None:  # fmt: skip
        super().__init__(graph, garbage_collect_values=False)
        self._gpu = gpu
        self.products: Products = Products(gpu, interprets=True)
        self.outside: list[Difference] = []
        self._numbers = numbers
        self._by_fours = {_id(launch) for launch in found.launches if "4x(" in found.kernel(launch.name)}
        self._rounds_each = rounds_each
        self._stored_by = found.stored_by
        self._computed_by = _computed_by(found)
        self._templates = {_id(launch): launch.name for launch in found.launches if launch.is_template}
        taken = {taken_from(node) for node in graph.graph.nodes}
        self._written: dict[fx.Node, dict[tuple[int, ...], Tensor]] = {}
        for name, tensor in written.items():
            if found.of_templates[name] in taken:
                node, place = found.of_templates[name]
                self._written.setdefault(node, {})[place] = tensor
        self._bounded: dict[tuple[fx.Node, str], Bounded] = {}  # values in a template
        self._inside: dict[tuple[fx.Node, str], Any] = {}  # a node's value in a kernel, before a store rounds it
        self._sums = _sums_in_products(found)
        self._with_bias = {found.makes(launch) for launch in found.launches if "addmm" in launch.name}
        # a library's operator reads memory; Inductor computes all others
        self._library = {launch.name.removesuffix(".default") for launch in found.launches if launch.kind == "opaque"}

    def run_node(self, node: fx.Node) -> Any:
        """Run a node's operator once for each kernel that computes the node; return the result that is stored.

        Results may differ between kernels: what a kernel reads from memory was rounded when it was stored, and what
        the kernel has just computed itself was not.
        """
        if node.op == "output":
            return fx.node.map_arg(node.args[0], self._memory)
        if node.op != "call_function":
            return self._unrounded(super().run_node(node))
        if node in self._sums.values():
            return None  # a product that Inductor fused with an addition; the addition computes it
        kernels = self._computed_by.get(node, [])
        if self._rounds_each or self._is_called(node):
            kernels = [kernel for kernel in kernels if kernel in self._templates]
        for kernel in kernels:
            if (found := self._in_template(node, kernel)) is not None:
                return self._settled(node, kernel, found)
            self._inside[node, kernel] = self._compute(node, kernel)
        storing = self._stored_by.get(node)
        if storing is not None and (node, _id(storing)) in self._inside:
            return self._inside[node, _id(storing)]
        return self._inside[node, kernels[0]] if kernels else self._compute(node, None)

    def _compute(self, node: fx.Node, kernel: str | None) -> Any:
        if node in self._sums:
            return self._unrounded(self._sum_in_product(node))
        args: Any
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda operand: self._operand(node, operand, kernel))
        if node.target in DRAWS:
            drawing: Any = node.target
            name = drawing._schema.name.partition("::")[2]
            return self._numbers.drawn(name, args, by_fours=kernel in self._by_fours)
        if node.target in COMPARISONS:  # a number is rounded to the dtype of the tensor that it is compared with
            compared: Any = node.args[0]
            value: Any = args[1]
            args = args[0], torch.tensor(value, dtype=compared.meta["val"].dtype).item()
        if node.target is aten.addmm.default and node not in self._with_bias:
            bias, *factors = args
            return self._unrounded(self._bias_added_later("mm", bias, factors))
        if node.target is aten.convolution.default and args[2] is not None:
            x, weight, bias, *sizes = args
            bias = bias.view(-1, *[1] * (x.ndim - 2))
            return self._unrounded(self._bias_added_later("convolution", bias, (x, weight, None, *sizes)))
        return self._unrounded(self.call_function(node.target, args, kwargs))

    def _bias_added_later(self, name: str, bias: Tensor, args: Sequence[Any]) -> Tensor:
        """Compute a GEMM or convolution, round it, and then add the bias, as Inductor does in a later kernel."""
        product = self.products.multiply(name, *args)
        return (bias.float() + product.float()).to(product.dtype)

    def _in_template(self, node: fx.Node, kernel: str) -> Bounded | None:
        """Return value and bounds of a node that the template ``kernel`` computes; None if it does not."""
        if kernel not in self._templates:
            return None
        if node in self._sums:
            other, a, b = (self._operand(node, each, kernel) for each in self._terms(node))
            return bounded_product("addmm", self._gpu, (other, a, b), {})
        given = (node.args, node.kwargs)
        if self._is_called(node):
            args, kwargs = fx.node.map_arg(given, lambda operand: self._operand(node, operand, kernel))
            if is_attention(node.target):
                return bounded_attention(node.target, args, kwargs)
            op: Any = node.target
            return bounded_product(op._schema.name.partition("::")[2], self._gpu, args, kwargs)
        bounded = {each: found for each in node.all_input_nodes if (found := self._bounded_value(each, kernel))}
        if not bounded:
            return None
        return Bounded(*(self._fused(node, kernel, bounded, side) for side in SIDES))

    def _fused(self, node: fx.Node, kernel: str, bounded: Mapping[fx.Node, Bounded], side: str) -> Any:
        """Compute a node fused after a template, for one ``side`` of the template's bounds, such as "low".

        Operands that the template computes are taken from this side of ``bounded``.
        """
        is_single = side == "single"

        def operand_of(operand: fx.Node) -> Any:
            value = getattr(bounded[operand], side) if operand in bounded else self._operand(node, operand, kernel)
            if is_single and operand in bounded and operand.meta["val"].dtype != torch.float64:
                return value.float() if value.is_floating_point() else value
            return value if is_single else in_float64(value)

        args: Any
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), operand_of)
        if not is_single and node.target is prims.convert_element_type.default and args[1].is_floating_point:
            return args[0]
        return self._unrounded(self.call_function(node.target, args, kwargs))

    def _bounded_value(self, operand: fx.Node, kernel: str) -> Bounded | None:
        whole, place = taken_from(operand)
        found = self._bounded.get((whole, kernel))
        return None if found is None else found.at(place)

    def _settled(self, node: fx.Node, kernel: str, value: Bounded) -> Any:
        """Note which stored results of a template exceed their bounds; return the results that later nodes read.

        A result that was stored is returned as it was stored, any other is the exact one in ``value``.
        """
        self._bounded[node, kernel] = value
        result, where = value.exact, f"{self._templates[kernel]}, {node}"
        for place, got in self._written.get(node, {}).items():
            self.outside += outside(f"{where}{list(place) or ''}", got, value.at(place))
            result = _with(result, place, got)
        return pytree.tree_map(self._unrounded, result)

    def _unrounded(self, result: Any) -> Any:
        is_low = isinstance(result, Tensor) and result.dtype in LOW_PRECISION
        return result.float() if is_low and not self._rounds_each else result

    def _operand(self, node: fx.Node, operand: fx.Node, kernel: str | None) -> Any:
        """Return an operand's value as ``kernel`` sees it when it computes ``node``.

        If the same kernel computes the operand, the value is unrounded; if it is read from memory, rounded.
        """
        if self._rounds_each:
            return self.env[operand]
        value = self.env[operand] if kernel is None else self._inside.get((operand, kernel), self.env[operand])
        if self._looks_at_bits(node):
            return _rounded(operand, value)
        if operand in self._stored_by and (operand, kernel) not in self._inside:
            return self._unrounded(_rounded(operand, value))
        return value

    def _memory(self, node: fx.Node) -> Any:
        return _rounded(node, self.env[node])

    def _sum_in_product(self, node: fx.Node) -> Tensor:
        return self.products.multiply("addmm", *map(self._memory, self._terms(node)))

    def _terms(self, node: fx.Node) -> tuple[fx.Node, ...]:
        product = self._sums[node]
        (other,) = (arg for arg in node.args if arg is not product)
        factors: tuple[Any, ...] = product.args
        return other, *factors

    def _looks_at_bits(self, node: fx.Node) -> bool:
        """Whether a node needs rounded operands: it views their bits as another dtype, or a library computes it."""
        return node.target is aten.view.dtype or self._is_called(node)

    def _is_called(self, node: fx.Node) -> bool:
        """Whether generated code calls the node's operator, as for GEMMs, instead of generating a kernel."""
        if node.target is triton_kernel_wrapper_functional or is_attention(node.target):
            return True
        if not isinstance(node.target, torch._ops.OpOverload):
            return False
        namespace, _, name = node.target._schema.name.partition("::")
        is_library = f"{namespace}.{name}" in self._library or namespace not in ("aten", "prims")
        return name in PRODUCTS or is_library

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute the operator ``target`` as generated code does; casts to 16 bits only round with ``rounds_each``."""
        if target is triton_kernel_wrapper_functional:
            return launched(**kwargs)
        if not isinstance(target, torch._ops.OpOverload):
            return super().call_function(target, args, kwargs)
        namespace, _, name = target._schema.name.partition("::")
        if own := implementation_on_gpu(target):
            return own(*args, **kwargs)
        if namespace == "_c10d_functional":
            return message(target, *(arg.clone() if isinstance(arg, Tensor) else arg for arg in args), **kwargs)
        if name in PRODUCTS:
            return self.products.multiply(name, *args, **kwargs)
        if target is inductor_prims.seeds:
            return seeds(args[0])
        if name.startswith("rand_eager"):
            raise NotImplementedError(
                f"run_gpu_program: {target} draws the random numbers of a GPU's eager mode, which is not supported. "
                "Set torch._inductor.config.align_random_eager = False."
            )
        if target is prims.convert_element_type.default and not self._rounds_each and args[1] in LOW_PRECISION:
            return args[0].float()
        return computed(target, args, kwargs)


def _with(value: Any, place: tuple[int, ...], item: Tensor) -> Any:
    if not place:
        return item.reshape(value.shape)
    first, *others = place
    return (*value[:first], _with(value[first], tuple(others), item), *value[first + 1 :])


def _rounded(node: fx.Node, value: Any) -> Any:
    meta = node.meta.get("val")
    if isinstance(value, Tensor) and isinstance(meta, Tensor) and value.dtype != meta.dtype:
        return value.to(meta.dtype)
    return value


def _computed_by(found: Schedule) -> dict[fx.Node, list[str]]:
    makers: dict[fx.Node, list[str]] = {}
    for launch in found.launches:
        # a launch that reads nothing writes constants, such as padding, around the results of others
        for node in found.computed(launch) if launch.read else ():
            makers.setdefault(node, []).append(_id(launch))
    return makers


def _id(launch: ScheduledLaunch) -> str:
    return next(iter(launch.made))


def _sums_in_products(found: Schedule) -> dict[fx.Node, fx.Node]:
    sums: dict[fx.Node, fx.Node] = {}
    for lowered in found.lowered.nodes:
        node = found.source_of(lowered)
        if node is not None and is_fused_addition(lowered, node):
            added = found.source_of(lowered.args[0])
            given: list[Any] = [arg for arg in node.args if arg is not added]
            (sums[node],) = (arg for arg in given if arg.target in (aten.mm.default, aten.bmm.default))
    return sums
