"""Results of running a GPU's generated code, and their differences from the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from fp8compile.testing.bits import bits
from fp8compile.testing.gpu.program.nan_origin import NanOrigin
from fp8compile.testing.gpu.program.products import Product
from fp8compile.testing.gpu.program.wrapper import KernelLaunch

__all__ = ["Difference", "Differences", "GpuRun", "GraphRun", "output_differences", "product_differences"]

VALUES = (Tensor, int, float)  # groups and other objects pass through a graph unchanged


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A tensor of generated code that differs from the reference.

    Attributes:
        where: Description of the tensor: the graph, how its code was run, and the output or the GEMM's operand.
        element: Index of the first element that differs; None if dtypes, shapes or numbers of tensors differ.
        expected: The element's value in the reference, or a description of what was expected.
        got: The element's value by generated code, or a description of what was found.
        count: Number of elements that differ.
        total: Number of elements of the tensor.
    """

    where: str
    element: tuple[int, ...] | None
    expected: float | int | bool | str
    got: float | int | bool | str
    count: int
    total: int

    def __str__(self) -> str:
        if self.element is None:
            return f"{self.where}: {self.got} instead of {self.expected}"
        return (
            f"{self.where}: {self.count} of {self.total} elements differ, the first at {list(self.element)}: "
            f"{self.got!r} instead of {self.expected!r}"
        )


class Differences(tuple[Difference, ...]):
    """All differences of a run; ``str`` has a line for each."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "no differences"


@dataclass(frozen=True, kw_only=True)
class GraphRun:
    """The run of one graph.

    Attributes:
        name: "forward" or "backward".
        source: The generated code.
        products: Calls of matrix products, in order.
        launches: Launches of generated kernels, in order.
        library_calls: Operators that PyTorch's CPU kernels computed. On a GPU a library computes these operators,
            and may give other bits.
        seconds: Time to generate the code, and time to run it in all requested ways.
    """

    name: str
    source: str = field(repr=False)
    products: tuple[Product, ...] = field(repr=False)
    launches: tuple[KernelLaunch, ...] = field(repr=False)
    library_calls: tuple[str, ...]
    seconds: tuple[float, float]

    def __str__(self) -> str:
        generated, ran = self.seconds
        calls = f", {', '.join(self.library_calls)} by PyTorch's CPU kernels" if self.library_calls else ""
        return (
            f"{self.name}: {len(self.launches)} generated kernels launched, {len(self.products)} GEMMs{calls}; "
            f"generated in {generated:.1f} s, ran in {ran:.1f} s"
        )


@dataclass(frozen=True, kw_only=True)
class GpuRun:
    """The results of a function that was run by a GPU's code.

    Attributes:
        outputs: The output tensors.
        gradients: Gradients by name: "args[0]" and the names of parameters.
        graphs: The runs of the forward and, if there is one, of the backward.
        differences: Differences from the reference; empty if each GEMM's operands, each output of a graph
            and each tensor that is changed in place have the reference's bits.
        nan_origin: Where the first NaN comes from; None if no output, gradient or changed argument has one.
    """

    outputs: tuple[Tensor, ...] = field(repr=False)
    gradients: dict[str, Tensor] = field(repr=False)
    graphs: tuple[GraphRun, ...]
    differences: Differences
    nan_origin: NanOrigin | None = None

    @property
    def products(self) -> tuple[Product, ...]:
        """All calls of matrix products, in order, with their operands."""
        return tuple(product for graph in self.graphs for product in graph.products)

    def __str__(self) -> str:
        origin = () if self.nan_origin is None else (str(self.nan_origin),)
        return "\n".join([*map(str, self.graphs), *origin, str(self.differences)])


# ---------------------------------------------------------------------------------- comparison


def _difference(where: str, got: Tensor, expected: Tensor) -> Iterator[Difference]:
    kinds = [f"{tuple(each.shape)} {str(each.dtype).removeprefix('torch.')}" for each in (got, expected)]
    if kinds[0] != kinds[1]:
        yield Difference(
            where=where, element=None, expected=kinds[1], got=kinds[0], count=got.numel(), total=got.numel()
        )
        return
    unlike = bits(got) != bits(expected)
    if unlike.any():
        first = tuple(unlike.nonzero()[0].tolist())
        yield Difference(
            where=where, element=first, expected=expected[first].item(), got=got[first].item(),
            count=int(unlike.sum()), total=unlike.numel(),
        )  # fmt: skip


def output_differences(where: str, got: Sequence[object], expected: Sequence[object]) -> Iterator[Difference]:
    """Yield differences between the results of generated code (``got``) and of its reference (``expected``).

    Arguments after the run may be compared as well, to find changes in place. ``where`` is text for messages.
    """
    if len(got) != len(expected):
        yield Difference(where=where, element=None, expected=f"{len(expected)}", got=f"{len(got)}", count=1, total=1)
        return
    for number, (one, other) in enumerate(zip(got, expected, strict=True)):
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            yield from _difference(f"{where} {number}", one, other)
        elif (isinstance(one, VALUES) or isinstance(other, VALUES)) and one is not other and one != other:
            yield Difference(
                where=f"{where} {number}", element=None, expected=repr(other), got=repr(one), count=1, total=1
            )


def _family(name: str) -> str:
    return name.removeprefix("bias_")


def _unlike(one: Product, other: Product) -> int:
    pairs = zip(one.operands, other.operands, strict=False)
    return sum(
        got.numel() if (got.shape, got.dtype) != (wants.shape, wants.dtype) else int((bits(got) != bits(wants)).sum())
        for got, wants in pairs
    )


def _nearest(product: Product, among: Iterable[Product]) -> Product | None:
    alike: Callable[[Product], bool] = lambda other: (  # noqa: E731
        (_family(other.name), other.result.shape, len(other.operands))
        == (_family(product.name), product.result.shape, len(product.operands))
    )
    return min(filter(alike, among), key=lambda other: _unlike(product, other), default=None)


def product_differences(where: str, called: Sequence[Product], expected: Sequence[Product]) -> Iterator[Difference]:
    """Yield differences between operands of matrix products in generated code and in the reference.

    Generated code may call products in another order than the graph. So each call in ``called`` is compared with the
    call in ``expected`` that has the most similar operands. ``where`` is text for messages.
    """
    left = list(expected)
    pairs: list[Product | None] = []
    for product in called:  # pair equal products first, so that a wrong one can't take the partner of a right one
        same = next((e for e in left if e is _nearest(product, left) and _unlike(product, e) == 0), None)
        pairs.append(same)
        if same is not None:
            left.remove(same)
    for number, (product, same) in enumerate(zip(called, pairs, strict=True)):
        if same is not None:
            continue
        nearest = _nearest(product, left)
        if nearest is None:
            yield Difference(
                where=f"{where}, product {number} {product}", element=None, expected="no such product in the graph",
                got="a product", count=1, total=1,
            )  # fmt: skip
            continue
        left.remove(nearest)
        for name, got, wants in zip(product.operand_names, product.operands, nearest.operands, strict=False):
            yield from _difference(f"{where}, product {number} {product}, {name}", got, wants)
    for product in left:
        yield Difference(
            where=f"{where}, product {product}", element=None, expected="a call of it", got="none", count=1, total=1
        )
