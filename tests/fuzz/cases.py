"""What the fuzzer draws: tensors of any shape, layout, dtype and values; quantizers; recipes; wrong arguments.

Drawn are small frozen descriptions, never tensors: they print as what failed, and hypothesis makes them smaller. Their
``tensor()`` is the same in every process.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

import fp8compile as f8
from fp8compile.quantizers import GEMMS

__all__ = [
    "DTYPES",
    "FORMATS",
    "LAYOUTS",
    "PROFILES",
    "RULES",
    "Drawn",
    "Layer",
    "dtypes",
    "layers",
    "quantizers",
    "recipes",
    "shapes",
    "tensors",
]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FORMATS = ("e4m3", "e5m2")
E8M0_RULES = ("e8m0_rceil", "e8m0_floor")
RULES = ("fp32", "pow2", *E8M0_RULES)
BLOCK_SIDES = (-1, 1, 2, 3, 16, 32, 128)
EPS = (0.0, 0.0, 0.0, 1e-12, 1e-6, 0.3, 1.0, 2.0**-20, 3.0)  # 0.3 and 1e-6 are no float32
SPECIALS = ("nan", "inf", "-inf", "-0.0", "max", "-max", "smallest")

# ---------------------------------------------------------------------------------- values


def _normal(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator).to(dtype)


def _heavy(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Magnitudes over many binades, a scale a row: outliers beside small ones."""
    exponents = torch.randint(-14, 12, shape, generator=generator).float()
    return (torch.randn(shape, generator=generator) * torch.exp2(exponents)).to(dtype)


def _subnormal(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    smallest = torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    return (torch.randint(-9, 10, shape, generator=generator).double() * smallest).to(dtype)


def _huge(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    signs = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    return (torch.rand(shape, generator=generator).double() * signs * torch.finfo(dtype).max).to(dtype)


def _any_bits(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """All bit patterns alike: NaN of any payload, infinities, subnormals."""
    width = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    info = torch.iinfo(width)
    return torch.randint(info.min, info.max, shape, generator=generator, dtype=torch.int64).to(width).view(dtype)


def _ties(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Small multiples of powers of two: with a power-of-two scale many lie in the middle of two codes."""
    exponents = torch.randint(-6, 7, shape, generator=generator).float()
    return (torch.randint(-33, 34, shape, generator=generator) * torch.exp2(exponents)).to(dtype)


PROFILES = {
    "normal": _normal,
    "heavy": _heavy,
    "zeros": lambda shape, dtype, generator: torch.zeros(shape, dtype=dtype),
    "subnormal": _subnormal,
    "huge": _huge,
    "any bits": _any_bits,
    "ties": _ties,
}


def _special(name: str, dtype: torch.dtype) -> float:
    info = torch.finfo(dtype)
    return {"max": info.max, "-max": info.min, "smallest": info.tiny * info.eps}.get(name) or float(name)


# ---------------------------------------------------------------------------------- layouts
# What lies between the elements of a view is NaN: whoever reads it shows.


def _surrounded(values: Tensor, *, step: int, margin: int) -> Tensor:
    storage = torch.full([2 * margin + step * size for size in values.shape], torch.nan, dtype=values.dtype)
    view = storage[tuple(slice(margin, margin + step * size, step) for size in values.shape)]
    return view.copy_(values)


def _reversed(values: Tensor) -> Tensor:
    dims = tuple(range(values.ndim))[::-1]
    return values.permute(dims).contiguous().permute(dims)


LAYOUTS = {
    "contiguous": lambda values: values,
    "transposed": lambda values: (
        values.transpose(-1, -2).contiguous().transpose(-1, -2) if values.ndim > 1 else values
    ),
    "reversed dims": _reversed,
    "every other": lambda values: _surrounded(values, step=2, margin=0),
    "offset": lambda values: _surrounded(values, step=1, margin=3),
    "expanded rows": lambda values: values[:1].expand(values.shape) if values.ndim and len(values) else values,
    "expanded columns": lambda values: values[..., :1].expand(values.shape) if values.ndim else values,
}


@dataclass(frozen=True)
class Drawn:
    """A tensor, described.

    Attributes:
        shape: Its shape.
        dtype: A key of ``DTYPES``.
        layout: A key of ``LAYOUTS``.
        profile: A key of ``PROFILES``: the values.
        specials: What stands where: names of ``SPECIALS`` and positions, taken modulo the number of elements.
        seed: Of the random numbers.
    """

    shape: tuple[int, ...]
    dtype: str = "bf16"
    layout: str = "contiguous"
    profile: str = "normal"
    specials: tuple[tuple[str, int], ...] = ()
    seed: int = 0

    def tensor(self) -> Tensor:
        """The tensor: always the same one."""
        dtype = DTYPES[self.dtype]
        values = PROFILES[self.profile](self.shape, dtype, torch.Generator().manual_seed(self.seed))
        if values.numel():
            for name, position in self.specials:
                values.view(-1)[position % values.numel()] = _special(name, dtype)
        return LAYOUTS[self.layout](values)


SIZES = st.one_of(st.integers(1, 40), st.sampled_from((1, 15, 16, 17, 31, 32, 33, 48, 64, 127, 128, 129)))
dtypes = st.sampled_from(tuple(DTYPES))


@st.composite
def shapes(draw: st.DrawFn, *, last: int | None = None, least: int = 0) -> tuple[int, ...]:
    """0 to 4 dims of ``least`` or more elements, a few thousand in all; the last one may be given."""
    last = draw(st.one_of(SIZES, st.just(least))) if last is None else last
    leading = draw(
        st.one_of(
            st.tuples(st.one_of(SIZES, st.just(least))),
            st.just(()),
            st.lists(st.integers(least, 6), min_size=2, max_size=3).map(tuple),
        )
    )
    return (*leading, last)


@st.composite
def tensors(
    draw: st.DrawFn, shape: tuple[int, ...], dtype: str, *, layouts: tuple[str, ...] = tuple(LAYOUTS)
) -> Drawn:
    """Any values in any layout."""
    return Drawn(
        shape=shape,
        dtype=dtype,
        layout=draw(st.sampled_from(layouts)),
        profile=draw(st.sampled_from(tuple(PROFILES))),
        specials=draw(st.lists(st.tuples(st.sampled_from(SPECIALS), st.integers(0, 4095)), max_size=2).map(tuple)),
        seed=draw(st.integers(0, 2**16)),
    )


# ---------------------------------------------------------------------------------- quantizers and recipes


@st.composite
def quantizers(
    draw: st.DrawFn, block: tuple[int, int] | None = None, formats: tuple[str, ...] = FORMATS
) -> f8.CurrentScaling:
    """Any CurrentScaling to the nearest code, or any with this block or these formats."""
    side = st.sampled_from(BLOCK_SIDES)
    return f8.CurrentScaling(
        format=draw(st.sampled_from(formats)),
        block=draw(st.tuples(side, side)) if block is None else block,
        scale=draw(st.sampled_from(RULES)),
        eps=draw(st.sampled_from(EPS)),
    )


@st.composite
def _gemm_blocks(draw: st.DrawFn) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Blocks of (m, k) and (k, n) that some GEMM multiplies; None for high precision."""
    n = draw(st.sampled_from((2, 16, 32, 128)))
    return draw(
        st.sampled_from(
            (None, ((-1, -1), (-1, -1)), ((1, -1), (-1, 1)), ((1, n), (n, 1)), ((1, n), (n, n)), ((n, n), (n, 1)))
        )
    )


@st.composite
def _custom_recipes(draw: st.DrawFn) -> f8.Recipe:
    roles = {}
    for gemm in GEMMS:
        blocks = draw(_gemm_blocks())
        if blocks is None:
            continue
        a = draw(quantizers(blocks[0]))
        b = draw(quantizers(blocks[1], formats=("e4m3",) if a.format == "e5m2" else FORMATS))
        roles[gemm.a] = a.transposed() if gemm.a_transposed else a
        roles[gemm.b] = b.transposed() if gemm.b_transposed else b
    return f8.Recipe(**roles)


# delayed scaling needs a state, which these cases have none of: tests/nn/test_delayed.py; nvfp4: two_levels.py
CURRENT = ("tensorwise", "rowwise", "rowwise_bf16_wgrad", "blockwise", "mxfp8")


@st.composite
def _ready_recipes(draw: st.DrawFn) -> f8.Recipe:
    name = draw(st.sampled_from(CURRENT))
    return f8.recipes.by_name(
        name,
        grad_format=draw(st.sampled_from(FORMATS)),
        scale=draw(st.sampled_from(E8M0_RULES if name == "mxfp8" else RULES)),
        eps=draw(st.sampled_from(EPS)),
    )


def recipes() -> st.SearchStrategy[f8.Recipe]:
    """Ready recipes of CurrentScaling with any arguments, and any others that can be made of it."""
    return st.one_of(_ready_recipes(), _custom_recipes())


# ---------------------------------------------------------------------------------- layers


@dataclass(frozen=True)
class Layer:
    """A call of ``f8.linear`` and of its backward, described."""

    recipe: f8.Recipe
    x: Drawn
    weight: Drawn
    bias: Drawn | None
    grad_output: Drawn

    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """x, weight, bias or None, grad_output."""
        bias = None if self.bias is None else self.bias.tensor()
        return self.x.tensor(), self.weight.tensor(), bias, self.grad_output.tensor()


@st.composite
def layers(
    draw: st.DrawFn,
    recipe: st.SearchStrategy[f8.Recipe] | None = None,
    x_shape: st.SearchStrategy[tuple[int, ...]] | None = None,
    n: st.SearchStrategy[int] | None = None,
    dtype: st.SearchStrategy[str] = dtypes,
    layouts: tuple[str, ...] = tuple(LAYOUTS),
) -> Layer:
    """Any layer, or one of these recipes, shapes, dtypes and layouts."""
    name, shape = draw(dtype), draw(shapes() if x_shape is None else x_shape)
    out = draw(st.one_of(SIZES, st.just(0)) if n is None else n)
    bias = draw(tensors((out,), name, layouts=("contiguous",))) if draw(st.booleans()) else None
    return Layer(
        recipe=draw(recipes() if recipe is None else recipe),
        x=draw(tensors(shape, name, layouts=layouts)),
        weight=draw(tensors((out, shape[-1]), name, layouts=layouts)),
        bias=bias,
        grad_output=draw(tensors((*shape[:-1], out), name, layouts=layouts)),
    )
