"""What a run of a GPU's program gave, and how it differs from its reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from fp8compile.testing.bits import bits
from fp8compile.testing.gpu.program.products import Product
from fp8compile.testing.gpu.program.wrapper import KernelLaunch

__all__ = ["Difference", "Differences", "GpuRun", "GraphRun", "output_differences", "product_differences"]

SCALED = ("left operand", "right operand", "left scale", "right scale")
VALUES = (Tensor, int, float)  # groups and other objects pass through a graph unchanged
BIASED = ("bias", "left operand", "right operand")


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A tensor of the program that has not the reference's bits.

    Attributes:
        where: The graph, the product and its operand or the output, and how the program was run.
        element: Index of the first element that differs; None where dtypes, shapes or numbers of tensors do.
        expected: That element of the reference, or what was expected in words.
        got: The program's.
        count: How many elements differ.
        total: Total of how many.
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
    """All of a run; ``str`` has a line for each."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "no differences"


@dataclass(frozen=True, kw_only=True)
class GraphRun:
    """One graph.

    Attributes:
        name: "forward" or "backward".
        source: The generated code.
        products: In their order.
        launches: Launches of generated kernels, in order.
        library_calls: Operators that PyTorch's CPU kernels computed: what a GPU's library makes of them isn't seen.
        seconds: To generate it, and to run it in all the ways that were asked for.
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
            f"{self.name}: {len(self.launches)} generated kernels launched, {len(self.products)} products{calls}; "
            f"generated in {generated:.1f} s, ran in {ran:.1f} s"
        )


@dataclass(frozen=True, kw_only=True)
class GpuRun:
    """A function, run by the code that a GPU would run.

    Attributes:
        outputs: Its tensors.
        gradients: Gradients by name: "args[0]" and the names of parameters.
        graphs: Forward and, where there is one, backward.
        differences: From the reference; empty where every product's operands, every output of each graph and every
            tensor that is changed have its bits.
    """

    outputs: tuple[Tensor, ...] = field(repr=False)
    gradients: dict[str, Tensor] = field(repr=False)
    graphs: tuple[GraphRun, ...]
    differences: Differences

    @property
    def products(self) -> tuple[Product, ...]:
        """Every matrix product in its order, with its operands."""
        return tuple(product for graph in self.graphs for product in graph.products)

    def __str__(self) -> str:
        return "\n".join([*map(str, self.graphs), str(self.differences)])


# ---------------------------------------------------------------------------------- comparison


def _difference(where: str, got: Tensor, expected: Tensor) -> Iterator[Difference]:
    """How two tensors differ; all NaN count as one."""
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
    """The differences between what two graphs return, or between arguments that they may have changed."""
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
    """How many elements of the operands differ."""
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
    """The differences between operands of products, which a program may call in another order than the graph."""
    left = list(expected)
    pairs: list[Product | None] = []
    for product in called:  # those that are equal first, so that one that isn't takes no other's place
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
        names = SCALED if product.name == "_scaled_mm" else BIASED if "add" in product.name else SCALED
        for name, got, wants in zip(names, product.operands, nearest.operands, strict=False):
            yield from _difference(f"{where}, product {number} {product}, {name}", got, wants)
    for product in left:
        yield Difference(
            where=f"{where}, product {product}", element=None, expected="a call of it", got="none", count=1, total=1
        )
