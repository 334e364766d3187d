"""Hashes of outputs, gradients, FP8 data and monitored statistics, to compare a checkout before and after a change.

    python -m benchmarks.hashes > before.txt
    ... change something ...
    python -m benchmarks.hashes | diff before.txt -

Prints one line for each case: every recipe, dense and grouped, in eager mode, traced with "aot_eager" and, for some
recipes, compiled by Inductor for the CPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import fp8compile as f8
from fp8compile.recipes import READY

__all__ = ["cases"]

ROWS = (64, 48)  # the second one has a block that is not full
OPTIONS: dict[str, dict[str, Any]] = {name: {} for name in READY} | {
    "rowwise pow2": {"scale": "pow2"},
    "blockwise fp32": {"scale": "fp32"},
    "nvfp4 dequantized": {"backward": "dequantized", "grad_rounding": "nearest"},
    "nvfp4 plain": {"weight_block": (1, 16), "grad_rounding": "nearest", "hadamard": ()},
}
BACKENDS = (None, "aot_eager", "inductor")
INDUCTOR = ("tensorwise", "blockwise", "nvfp4", "delayed")
WITHOUT_GROUPS = ("delayed",)
ROLES = (
    "input", "weight", "grad_output", "weight_for_grad_input", "grad_output_for_grad_weight", "input_for_grad_weight",
)  # fmt: skip


def _hash(tensors: dict[str, Any]) -> str:
    found = []
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor):
            data = tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
        else:
            data = json.dumps(tensor).encode()
        found.append(f"{name}={hashlib.sha256(data).hexdigest()[:12]}")
    return " ".join(found)


def _values(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    return (x * torch.exp(torch.randn(shape, generator=generator))).bfloat16()


def _recipe(name: str) -> f8.Recipe:
    return READY[name.split()[0]](**OPTIONS[name])


def _dense(recipe: f8.Recipe, rows: int, backend: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    for monitored in (False, True):
        model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)).bfloat16()
        with torch.no_grad():
            for seed, parameter in enumerate(model.parameters()):
                parameter.copy_(_values(*parameter.shape, seed=seed))
        f8.convert(model, recipe=recipe)
        statistics = ("amax", "saturation", "underflow", "mse", "scale_max")
        monitor = f8.Monitor(model, statistics, every=1) if monitored else None
        run = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
        found: dict[str, Any] = {}
        for step in range(2):  # delayed scaling reads the amaxes of the first step
            x = _values(rows, 128, seed=7 + step).requires_grad_()
            y = run(x)
            y.backward(_values(*y.shape, seed=17))
            found |= {f"y{step}": y, f"dx{step}": x.grad}
        found |= {f"d{name}": each.grad for name, each in model.named_parameters()}
        yield "dense", found
        if monitor is not None:
            yield "dense monitor", dict(monitor.read())
            monitor.remove()


def _grouped(recipe: f8.Recipe, rows: int, backend: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    def layer(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        return f8.grouped_linear(x, weight, offsets, recipe=recipe)

    run = layer if backend is None else torch.compile(layer, backend=backend, fullgraph=True)
    x, weight = (_values(rows, 128, seed=3).requires_grad_(), _values(3, 128, 128, seed=4).requires_grad_())
    y = run(x, weight, torch.tensor([16, 16, rows - 5], dtype=torch.int32))
    y.backward(_values(*y.shape, seed=17))
    yield "grouped", {"y": y, "dx": x.grad, "dw": weight.grad}


def _data(recipe: f8.Recipe) -> Iterator[tuple[str, dict[str, Any]]]:
    for role in ROLES:
        quantizer = getattr(recipe, role)
        if quantizer is not None and not recipe.history():
            found = f8.quantize(_values(64, 128, seed=5), quantizer)
            yield (
                f"data of {role}",
                {name: value for name, value in _fields(found).items() if isinstance(value, Tensor)},
            )


def _fields(found: Any) -> dict[str, Any]:
    names = ("codes", "scale", "outer_scale")
    return {name: getattr(found, name, None) for name in names} | {"values": found.dequantize()}


def cases() -> Iterator[str]:
    """Yield one line for each case."""
    for name in OPTIONS:
        recipe = _recipe(name)
        for what, found in _data(recipe):
            yield f"{name} | {what} | {_hash(found)}"
        for backend in BACKENDS:
            if backend == "inductor" and name not in INDUCTOR:
                continue
            for rows in ROWS[:1] if backend == "inductor" else ROWS:
                for layer in (_dense, _grouped):
                    if layer is _grouped and name in WITHOUT_GROUPS:
                        continue
                    torch.compiler.reset()
                    try:
                        for what, found in layer(recipe, rows, backend):
                            yield f"{name} | {what} | {rows} rows | {backend or 'eager'} | {_hash(found)}"
                    except (ValueError, RuntimeError) as error:
                        what = f"{type(error).__name__}: {str(error)[:60]!r}"
                        yield f"{name} | {layer.__name__} | {rows} rows | {backend or 'eager'} | {what}"


def main() -> None:
    argparse.ArgumentParser(description="Hashes of all recipes.").parse_args()
    for line in cases():
        print(line, flush=True)


if __name__ == "__main__":
    main()
