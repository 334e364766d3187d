"""How many bytes does a mixture of experts read and write with each recipe, and what is the least?

Counted as in `benchmarks.bytes_limit`, on generated code: the feed-forward of `benchmarks.experts` on rows that are
sorted by expert, forward and backward, x, weights and the router's weights needing gradients. The rules there hold
here; besides:

- x is given, so its codes are made by a kernel of their own, along rows and along tokens from one read; along tokens a
  rowwise or tensorwise scale depends on a whole group, whose amax comes first.
- Four bits: outer amaxes of a group come before its codes, so whatever is cast is read, or computed, twice, and a code
  has its sixteenth of an e4m3 scale. Weights are read in the forward alone, which writes the codes of both products.
- Rows behind the last group are zeros in dx: a kernel reads it and writes it. Where a model gathers x, that is part of
  the kernel that adds up the gradients of the tokens. The masks of y are part of the kernels behind it.

    python -m benchmarks.experts_bytes [--json] [--rows 65536] [--dim 2048] [--hidden 768] [--experts 16]
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fp8compile as f8
from benchmarks.experts import experts_arguments, feed_forward
from benchmarks.table import Row, emit
from fp8compile.testing import gpu_kernels

__all__ = ["CONTENDERS", "ON_B200", "SIZES", "experts_row", "least_experts", "recipe_of_experts"]

SIZES = {"rows": 65536, "dim": 2048, "hidden": 768, "experts": 16}
RECIPES = (
    "rowwise_bf16_wgrad",
    "rowwise",
    "tensorwise",
    "blockwise",
    "blockwise_bf16_wgrad",
    "mxfp8",
    "nvfp4",
)
ON_B200 = ("mxfp8", "nvfp4")


def least_experts(recipe: str, *, rows: int, dim: int, hidden: int, experts: int) -> dict[str, float]:
    """Bytes of the block's parts, forward and backward; ``"bf16"`` is a recipe, too."""
    x, h, w = rows * dim, rows * hidden, 3 * experts * dim * hidden  # elements
    if recipe == "nvfp4":
        return _least_in_four_bits(x, h, w)
    in_bf16, bf16_wgrad = recipe == "bf16", recipe == "bf16" or recipe.endswith("bf16_wgrad")
    again = recipe in ("tensorwise", "rowwise")  # what is cast along tokens is read once more, behind its amax
    codes = 0 if in_bf16 else 1 if bf16_wgrad else 2  # of a tensor: along rows, and along tokens
    kept = 2 if bf16_wgrad else 0  # bytes of what a product over tokens has in bf16
    row, token = (2, 2) if in_bf16 else (1, 2 if bf16_wgrad else 1)  # bytes that products read of an operand
    return {
        "x": 0 if in_bf16 else (2 + 2 * again) * x + codes * x,
        "activation": (4 + 4 * again) * h + (codes + kept) * h,
        "weights": 0 if in_bf16 else 2 * (2 + 1) * w + 2 * w * (recipe == "tensorwise"),
        "weights of the router": 4 * x,
        "gradient of y": (4 + 2 * again) * x + (codes + kept) * x,
        "activation backward": (6 + 6 * again) * h + 2 * (codes + kept) * h,
        # PyTorch leaves it unwritten in bf16; our grouped GEMM writes it itself
        "tail of dx": 4 * x if recipe == "mxfp8" else 0,
        "output products": row * (x + h + w) + 4 * h + 2 * x,
        "grad_input products": row * (x + 2 * h + w) + 2 * h + 2 * x,
        "grad_weight products": token * (2 * x + 3 * h) + 2 * w,
    }


def _least_in_four_bits(x: int, h: int, w: int) -> dict[str, float]:
    """Likewise, of elements of x, of the activation and of the weights."""
    code = 1 / 2 + 1 / 16  # bytes of a code and of its share of a scale
    return {
        "x": 4 * x + 2 * code * x,
        "activation": 8 * h + 2 * code * h,
        "weights": 4 * w + 2 * code * w,
        "weights of the router": 4 * x,
        "gradient of y": 6 * x + 2 * code * x,
        "activation backward": 12 * h + 4 * code * h,
        "tail of dx": 4 * x,
        "output products": code * (x + h + w) + 4 * h + 2 * x,
        "grad_input products": code * (x + 2 * h + w) + 2 * h + 2 * x,
        "grad_weight products": code * (2 * x + 3 * h) + 2 * w,
    }


def recipe_of_experts(name: str) -> f8.Recipe:
    """A ready recipe, whose products of groups a GPU has: it takes e4m3 alone."""
    return f8.recipes.tensorwise(grad_format="e4m3") if name == "tensorwise" else f8.recipes.by_name(name)


def _of_recipe(recipe: str) -> Callable[..., Tensor]:
    return partial(feed_forward, recipe=recipe_of_experts(recipe))


CONTENDERS: dict[str, Callable[[], Callable[..., Tensor]]] = {
    "bf16": lambda: partial(feed_forward, recipe=None),
    **{recipe: partial(_of_recipe, recipe) for recipe in RECIPES},
}


def experts_row(name: str, **sizes: int) -> Row:
    """A contender's figures.

    Args:
        name: A key of ``CONTENDERS``.
        sizes: As of `least_experts`, those of ``SIZES`` where they are not given.
    """
    sizes = {**SIZES, **sizes}
    torch._dynamo.reset()
    with FakeTensorMode():
        arguments = experts_arguments(*sizes.values())
        arch = "b200" if name in ON_B200 else "h200"
        codes = gpu_kernels(CONTENDERS[name](), *arguments, arch=arch)
    generated, least = sum(code.bytes for code in codes) / 1e9, sum(least_experts(name, **sizes).values()) / 1e9
    return {
        "recipe": name,
        "GPU": arch,
        "generated GB": generated,
        "least GB": least,
        "ratio": generated / least,
        "Triton kernels": sum(len(code.kernels) for code in codes),
        "GEMMs": sum(len(code.gemms) for code in codes),
        "CUDA graph": "no" if any(code.no_cuda_graph for code in codes) else "possible",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Bytes of a mixture of experts, and the least.")
    parser.add_argument("--json", action="store_true")
    for name, size in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--recipes", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    args = parser.parse_args()
    if not importlib.util.find_spec("triton"):
        raise SystemExit("benchmarks.experts_bytes needs Triton: Inductor prints a GPU's kernels with it.")
    sizes = {name: getattr(args, name) for name in SIZES}
    rows = [experts_row(name, **sizes) for name in args.recipes]
    emit(f"Bytes of experts: {', '.join(f'{name} {size}' for name, size in sizes.items())}", rows, as_json=args.json)


if __name__ == "__main__":
    main()
