"""What do saved tensors as codes cost: in bytes moved, in how far gradients move, in loss?

moved       GB that generated code reads and writes, forward and backward, for blocks of `benchmarks.kept`, exact and
            with ``fp8compile.SavedAsCodes()``; for an H200 (mxfp8, nvfp4: B200)
gradients   how far the gradient of a small decoder over bytes moves if tensors of one kind become codes, as a share of
            its norm; and how far from the gradient in float64 it then is. Eager mode, float32 beside the recipes' own
            casts, from the start and after some steps
loss        of the same decoder after some steps, each seed compared with itself without compression

    python -m benchmarks.saved_codes moved [--json] [--recipes rowwise ...] [--blocks mlp ...]
    python -m benchmarks.saved_codes gradients [--json] [--recipes bf16 rowwise] [--steps 100]
    python -m benchmarks.saved_codes loss [--json] [--recipes rowwise] [--steps 1000] [--seeds 0 1 2] [--out DIR]
        [--page]

With ``--out`` a training's losses are kept in that folder, so that a script that was killed goes on; ``--page`` writes
the section of docs/results/saved-codes.md.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fp8compile as f8
from benchmarks.blocks import Attention, Shape
from benchmarks.experts_bytes import CONTENDERS
from benchmarks.kept import BLOCKS, SAVED, block_and_arguments
from benchmarks.kernels import arch_for
from benchmarks.mlp import Mlp
from benchmarks.resumed import resumed
from benchmarks.table import Row, emit, replace_section
from examples.train.data import load_text, training_batch
from fp8compile.saved_tensors import partitioner
from fp8compile.testing import gpu_kernels

__all__ = ["distance", "gradient_rows", "loss_row", "moved_gb", "moved_row"]

SHAPE = Shape(d=128, h=384, heads=4, kv_heads=2, head_dim=32)
TOKENS, LAYERS = 512, 2
PAGE = Path(__file__).parents[1] / "docs" / "results" / "saved-codes.md"
KINDS = {
    "norm": ("norm",),
    "activation": ("activation",),
    "attention": ("attention",),
    "gemm, other": ("gemm", "other"),
    "default": ("norm", "activation", "checkpoint"),
    "all": ("norm", "activation", "checkpoint", "attention", "gemm", "other"),
}


def moved_gb(kind: str, recipe: str, saved: f8.SavedAsCodes | None = None) -> float:
    """GB (10**9 bytes) that the generated code of a block reads and writes, forward and backward."""
    torch._dynamo.reset()
    cut = torch._inductor.config.patch(custom_partitioner_fn=saved and partitioner(saved))
    with FakeTensorMode(allow_non_fake_inputs=True), cut:
        call, args = block_and_arguments(kind, recipe)
        return sum(code.bytes for code in gpu_kernels(call, *args, arch=arch_for(recipe))) / 1e9


def moved_row(kind: str, recipe: str) -> Row:
    """GB of a block exact and with codes, and their ratio."""
    exact, codes = moved_gb(kind, recipe), moved_gb(kind, recipe, SAVED["default"])
    return {"block": kind, "recipe": recipe, "exact GB": exact, "default GB": codes, "ratio": codes / exact}


class Decoder(nn.Module):
    """A small decoder over bytes that returns its loss."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed = nn.Embedding(256, SHAPE.d)
            blocks = [part for _ in range(LAYERS) for part in (Attention(SHAPE, torch.float32), Mlp(SHAPE.d, SHAPE.h))]
            self.blocks = nn.Sequential(*blocks, nn.RMSNorm(SHAPE.d))
            self.head = nn.Linear(SHAPE.d, 256, bias=False)
        self.to(dtype)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross entropy of bytes, shape (), tokens and targets of shape (M,)."""
        return nn.functional.cross_entropy(self.head(self.blocks(self.embed(tokens))), targets)


def _decoder(seed: int, recipe: str) -> nn.Module:
    model = Decoder(seed, torch.float32)
    if recipe == "float32":
        return model
    return f8.convert(model, f8.recipes.by_name(recipe), filter=lambda name, layer: name != "head")


def _batches(seed: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    text = load_text(None, batch=1, seq=TOKENS)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        tokens, targets = training_batch(text, seed=seed, step=step, batch=1, seq=TOKENS)
        return tokens[0], targets[0]

    return batch


def _of_kinds(kinds: tuple[str, ...]) -> f8.SavedAsCodes:
    return f8.SavedAsCodes(filter=lambda tensor: tensor.kind in kinds)


def _train(model: nn.Module, seed: int, steps: int, saved: f8.SavedAsCodes | None) -> float:
    """Train a decoder; returns the mean loss of the last quarter of the steps."""
    batch, optimizer = _batches(seed), torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for step in range(steps):
        with f8.saved_as_codes(saved) if saved else contextlib.nullcontext():
            loss = model(*batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    last = losses[-max(1, steps // 4) :]
    return sum(last) / len(last)


def _gradient(model: nn.Module, batch: tuple[Tensor, Tensor], saved: f8.SavedAsCodes | None = None) -> Tensor:
    model.zero_grad()
    with f8.saved_as_codes(saved) if saved else contextlib.nullcontext():
        loss = model(*batch)
    loss.backward()
    return torch.cat([each.grad.double().flatten() for each in model.parameters() if each.grad is not None])


def distance(found: Tensor, expected: Tensor) -> float:
    """How far a gradient is from another one, as a share of that one's norm."""
    return ((found - expected).norm() / expected.norm()).item()


def gradient_rows(recipe: str, *, steps: int = 0, seed: int = 0) -> list[Row]:
    """How far the gradient moves by codes of each kind of tensor, after some steps without codes."""
    model, batch = _decoder(seed, recipe), _batches(seed)(steps)
    if steps:
        _train(model, seed, steps, None)
    wide = Decoder(seed, torch.float64)
    wide.load_state_dict({name: each for name, each in model.state_dict().items() if name in wide.state_dict()})
    oracle, exact = _gradient(wide, batch), _gradient(model, batch)
    rows: list[Row] = [{"recipe": recipe, "compressed": "none", "moved": 0.0, "from float64": distance(exact, oracle)}]
    for name, kinds in KINDS.items():
        found = _gradient(model, batch, _of_kinds(kinds))
        row: Row = {"recipe": recipe, "compressed": name, "moved": distance(found, exact)}
        rows.append(row | {"from float64": distance(found, oracle)})
    return rows


def loss_row(recipe: str, seed: int, steps: int) -> Row:
    """Loss of a training without and with codes, from one seed."""
    exact, default, every = (
        _train(_decoder(seed, recipe), seed, steps, saved)
        for saved in (None, _of_kinds(KINDS["default"]), _of_kinds(KINDS["all"]))
    )
    return {"recipe": recipe, "seed": seed, "exact": exact, "default": default - exact, "all": every - exact}


def kept_loss_row(recipe: str, seed: int, steps: int, out: Path | None) -> Row:
    """A row of `loss_row`, from a file below ``out`` if there is one."""
    path = None if out is None else out / f"saved-{recipe}-{steps}-{seed}.json"
    found: Row = resumed(path, lambda: loss_row(recipe, seed, steps))
    return found


def loss_section(rows: Sequence[Row], steps: int) -> list[str]:
    """The section of the page: each seed compared with itself, and how far seeds are from one another."""
    lines = [
        f"Mean training loss of the last quarter of {steps} steps of that decoder, each seed compared with itself",
        "without compression, and the distance between the seeds' largest and smallest loss without compression;",
        f"eager mode. From `python -m benchmarks.saved_codes loss --steps {steps} --page`.",
        "",
        "| recipe | seeds | loss without compression | spread of seeds | default, seed by seed | every kind |",
        "|---|---|---|---|---|---|",
    ]
    for recipe in dict.fromkeys(row["recipe"] for row in rows):
        own: list[dict[str, Any]] = [dict(row) for row in rows if row["recipe"] == recipe]
        exact = [row["exact"] for row in own]
        gaps = (", ".join(f"{row[name]:+.4f}" for row in own) for name in ("default", "all"))
        mean = sum(exact) / len(exact)
        cells = [recipe, len(own), f"{mean:.4f}", f"{max(exact) - min(exact):.4f}", *gaps]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of FP8 activation compression.")
    parser.add_argument("what", choices=["moved", "gradients", "loss"])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--recipes", nargs="+", default=None)
    parser.add_argument("--blocks", nargs="+", choices=BLOCKS, default=("mlp", "attention", "experts"))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, help="keep the losses of trainings there")
    parser.add_argument("--page", action="store_true", help=f"write the section of {PAGE.name} on losses")
    args = parser.parse_args()
    if args.what == "moved":
        recipes = args.recipes or ["bf16", *f8.recipes.names()]
        asked = [(kind, recipe) for kind in args.blocks for recipe in recipes]
        rows = [moved_row(kind, recipe) for kind, recipe in asked if kind != "experts" or recipe in CONTENDERS]
        emit("GB moved: Llama 3 8B, 8192 tokens; experts of 65,536 rows", rows, as_json=args.json)
    elif args.what == "gradients":
        recipes = args.recipes or ["float32", "rowwise", "mxfp8"]
        rows = [row for recipe in recipes for row in gradient_rows(recipe, steps=args.steps)]
        emit(f"gradient of a small decoder after {args.steps} steps", rows, as_json=args.json, digits=4)
    else:
        recipes = args.recipes or ["float32", "rowwise"]
        rows = [kept_loss_row(recipe, seed, args.steps, args.out) for recipe in recipes for seed in args.seeds]
        if args.page:
            replace_section(PAGE, f"Loss after {args.steps} steps", loss_section(rows, args.steps))
        emit(f"loss of a small decoder, last quarter of {args.steps} steps", rows, as_json=args.json, digits=4)


if __name__ == "__main__":
    main()
