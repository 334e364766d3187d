"""What is the least that a block can read and write with each recipe, and how far from it are we?

The count of `least_mlp` and `least_attention`, in units of elements: M tokens of width d, hidden width h; 2 bytes an
element of bf16, 1 a code. What it rests on:

- Products are library calls: they read their operands once and write a bf16 result once; the residual is added, and
  the gradients of the two branches are summed, by the kernel after them.
- Everything between two products is one kernel that reads each of its inputs once and writes each of its results once.
  Where the scale of a value depends on more than a kernel holds (tensorwise: on all; rowwise, along columns: on all
  tokens), the amax comes first, and the inputs are read once more. What the forward knows by then is kept, so an amax
  of x or of a weight is never taken in the backward.
- The backward makes the activation again from gate and up, and keeps no codes: a weight is read again and cast. Only
  delayed scaling keeps those of weights, made in both layouts from one read.
- Attention is a library call too, forward and backward. Heads of k and v are copied for each where several of q share
  them, since what is kept are heads once; their gradients are summed by the kernel after it.
- Scales, amaxes and statistics are left out.
- Four bits: half a byte a code. The outer scale depends on all of a tensor, so each is read twice, once for the amaxes
  of both directions and once for the codes of both. What makes a tensor is computed in both reads, and the tensor not
  stored; where it is made of two tensors, to store it in the first read comes to the same. The forward makes those
  for the backward too.

    python -m benchmarks.bytes_limit [--json] [--m 8192] [--shape llama3-8b] [--block mlp] [--recipes rowwise ...]
"""

from __future__ import annotations

import argparse

import fp8compile as f8
from benchmarks.blocks import SHAPES, Shape
from benchmarks.kernels import kernel_row
from benchmarks.table import Row, emit

__all__ = ["LEAST", "least_attention", "least_mlp"]


def _properties(recipe: str) -> tuple[bool, bool, bool, bool]:
    """Whether grad_weight is in bf16, what a scale depends on comes first, that in the backward, codes are kept."""
    # along tokens a rowwise scale depends on all of them
    return (
        recipe.endswith("bf16_wgrad"),
        recipe == "tensorwise",
        recipe in ("tensorwise", "rowwise"),
        recipe == "delayed",
    )


TWICE = 2 + 2  # bytes of an element that is read for its amaxes, then for its codes
BOTH = 1  # bytes of an element's codes in both directions, in four bits


def _mlp_in_four_bits(m: int, shape: Shape) -> dict[str, float]:
    tokens, hidden, weight = m * shape.d, m * shape.h, shape.d * shape.h
    return {
        "norm": (TWICE + BOTH) * tokens,
        "activation": (2 * TWICE + BOTH) * hidden,
        "weights": 3 * (TWICE + BOTH) * weight,
        "residual": 6 * tokens,
        "gradient of y": (TWICE + BOTH) * tokens,
        "activation backward": (3 * TWICE + 2 * BOTH) * hidden,
        "norm backward": 8 * tokens + 2 * tokens,
        "output products": tokens + 1.5 * weight + 4 * hidden + 0.5 * hidden + 2 * tokens,
        "grad_input products": 0.5 * tokens + 1.5 * weight + 2 * hidden + hidden + 4 * tokens,
        "grad_weight products": 1.5 * (tokens + hidden) + 6 * weight,
    }


def _attention_in_four_bits(m: int, shape: Shape) -> dict[str, float]:
    tokens, inner, kv = m * shape.d, m * shape.heads * shape.head_dim, m * shape.kv_heads * shape.head_dim
    weights = 2 * shape.d * (shape.heads + shape.kv_heads) * shape.head_dim
    shared = shape.heads != shape.kv_heads
    return {
        "norm": (TWICE + BOTH) * tokens,
        "weights": (TWICE + BOTH) * weights,
        "heads": (4 * kv + 4 * inner) * shared,
        "heads again": (4 * kv + 4 * inner) * shared,
        "attention": 6 * inner + 2 * inner,
        "attended": (TWICE + BOTH) * inner,
        "output products": 1.5 * tokens + 0.5 * weights + 2 * (inner + 2 * kv) + 0.5 * inner + 2 * tokens,
        "residual": 6 * tokens,
        "gradient of y": (TWICE + BOTH) * tokens,
        "attention backward": 10 * inner + 6 * inner,
        "gradient of q": (TWICE + BOTH) * inner,
        "gradients of k and v": 2 * ((2 * inner if shared else 2 * kv) + (TWICE + BOTH) * kv),
        "norm backward": 6 * tokens + 2 * tokens + 2 * tokens + 2 * tokens,
        "grad_input products": 0.5 * tokens + 0.5 * weights + 2 * inner + 0.5 * inner + kv + 6 * tokens,
        "grad_weight products": 2 * tokens + inner + kv + 2 * weights,
    }


def least_mlp(recipe: str, m: int, shape: Shape) -> dict[str, int] | dict[str, float]:
    """Bytes of the feed-forward block's parts, forward and backward."""
    if recipe == "nvfp4":
        return _mlp_in_four_bits(m, shape)
    tokens, hidden, weight = m * shape.d, m * shape.h, shape.d * shape.h  # elements
    bf16_wgrad, twice, twice_back, keeps = _properties(recipe)
    layers = 2 if recipe == "delayed" else 1  # gate and up have a scale each
    per_grad = 3 if bf16_wgrad else 2  # codes and the gradient itself, or codes in two layouts
    kept = 2 if bf16_wgrad else 0  # bytes an element of what grad_weight has in bf16: normed, act
    operand = 2 if bf16_wgrad else 1  # bytes an element that grad_weight reads
    return {
        "norm": (2 + 2 * twice) * tokens + (layers + kept) * tokens,
        "activation": (4 + 4 * twice) * hidden + (1 + kept) * hidden,
        "weights": 3 * (2 + 2 * twice + 1) * weight + 3 * (1 if keeps else 2 + 1) * weight,
        "residual": 6 * tokens,
        "gradient of y": (2 + 2 * twice_back) * tokens + (2 - bf16_wgrad) * tokens,
        "activation backward": (6 + 6 * twice_back) * hidden + (2 * per_grad + (1 - bf16_wgrad)) * hidden,
        "norm backward": 8 * tokens + 2 * tokens + (0 if bf16_wgrad else layers) * tokens,
        # gate and up, then down
        "output products": 2 * (tokens + weight + 2 * hidden) + hidden + weight + 2 * tokens,
        # down, then gate and up
        "grad_input products": tokens + weight + 2 * hidden + 2 * (hidden + weight + 2 * tokens),
        "grad_weight products": 3 * operand * (tokens + hidden) + 6 * weight,
    }


def least_attention(recipe: str, m: int, shape: Shape) -> dict[str, int] | dict[str, float]:
    """Bytes of the attention block's parts, forward and backward."""
    if recipe == "nvfp4":
        return _attention_in_four_bits(m, shape)
    tokens, inner, kv = m * shape.d, m * shape.heads * shape.head_dim, m * shape.kv_heads * shape.head_dim
    of_q, of_k = shape.d * shape.heads * shape.head_dim, shape.d * shape.kv_heads * shape.head_dim  # weights
    weights = 2 * of_q + 2 * of_k
    bf16_wgrad, twice, twice_back, keeps = _properties(recipe)
    layers = 3 if recipe == "delayed" else 1
    codes = 1 if bf16_wgrad else 2  # of a gradient
    operand = 2 if bf16_wgrad else 1
    shared = shape.heads != shape.kv_heads
    # gradients of k and v: heads are summed on the way; what is read twice is stored in between, and grad_weight in
    # bf16 reads what is stored
    stored = twice_back or bf16_wgrad
    return {
        "norm": (2 + 2 * twice) * tokens + (layers + (2 if bf16_wgrad else 0)) * tokens,
        "weights": (2 + 2 * twice + 1) * weights + (1 if keeps else 2 + 1) * weights,
        "heads": (4 * kv + 4 * inner) * shared,
        "heads again": (4 * kv + 4 * inner) * shared,
        "attention": 6 * inner + 2 * inner,
        "attended": (2 + 2 * twice) * inner + inner,
        "output products": 3 * tokens + of_q + 2 * of_k + 2 * (inner + 2 * kv) + inner + of_q + 2 * tokens,
        "residual": 6 * tokens,
        "gradient of y": (2 + 2 * twice_back) * tokens + codes * tokens,
        "attended again": 0 if bf16_wgrad else 2 * inner + inner,
        "attention backward": 10 * inner + 6 * inner,
        "gradient of q": (2 + 2 * twice_back) * inner + codes * inner,
        "gradients of k and v": 2
        * ((2 * inner if shared else 2 * kv) + 2 * kv * stored + 2 * kv * twice_back + codes * kv),
        "norm backward": 6 * tokens + 2 * tokens + 2 * tokens + 2 * tokens + (0 if bf16_wgrad else layers) * tokens,
        # o, then q, k, v
        "grad_input products": tokens + of_q + 2 * inner + inner + of_q + 2 * (kv + of_k) + 6 * tokens,
        "grad_weight products": operand * (tokens + inner + 3 * tokens + inner + 2 * kv) + 2 * weights,
    }


LEAST = {"mlp": least_mlp, "attention": least_attention}


def main() -> None:
    parser = argparse.ArgumentParser(description="The least bytes of a block, and what is generated.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--m", type=int, default=8192, help="tokens")
    parser.add_argument("--shape", choices=SHAPES, default="llama3-8b")
    parser.add_argument("--block", choices=LEAST, default="mlp")
    names = f8.recipes.names()
    parser.add_argument("--recipes", nargs="+", choices=names, default=names)
    args = parser.parse_args()
    rows: list[Row] = []
    for recipe in args.recipes:
        limit = sum(LEAST[args.block](recipe, args.m, SHAPES[args.shape]).values()) / 1e9
        found = kernel_row(recipe, args.m, SHAPES[args.shape], args.block)["sum GB"]
        rows.append({"recipe": recipe, "least GB": limit, "generated GB": found, "ratio": found / limit})
    emit(f"Bytes of the {args.block} block of {args.shape}: M={args.m}", rows, as_json=args.json)


if __name__ == "__main__":
    main()
