"""What do a decoder layer, its experts and its optimizer take on a GPU, in time and in memory, beside bfloat16?

layer       attention and feed-forward of Llama 3 8B, 8192 tokens, forward and backward, compiled: exact, with saved
            tensors as codes, in a step that a Monitor reads, and under FSDP2, which gathers the weights of our recipes
            in FP8 (of one rank: a copy). "peak" is the most memory beyond weights and input
experts     the feed-forward of Qwen3-30B-A3B behind its router: 65,536 rows sorted into 128 experts
optimizer   a step of AdamW over that layer's weights, PyTorch's fused one and `f8.optim.AdamW`, and its state

On a CPU sizes are tiny, and the numbers show only that the script works.

    python -m benchmarks.gpu_step [--json] [--only layer experts optimizer] [--rounds 7]
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fp8compile as f8
from benchmarks.blocks import SHAPES, Attention
from benchmarks.experts import experts_arguments, feed_forward
from benchmarks.linear import runnable
from benchmarks.machine import machine
from benchmarks.mlp import OURS, Mlp, contenders, converted
from benchmarks.table import Row, emit
from benchmarks.timing import device, medians, where

__all__ = [
    "KINDS",
    "PARTS",
    "experts_rows",
    "experts_steps",
    "layer_row",
    "layer_step",
    "optimizer_rows",
    "optimizers",
    "pairs_of",
]

STATISTICS = ("amax", "saturation", "underflow")
LAYER = {"cuda": ("llama3-8b", 8192), "cpu": ("tiny", 64)}
EXPERTS = {"cuda": (65536, 2048, 768, 128), "cpu": (64, 32, 32, 4)}  # rows, dim, hidden, experts
WITH_EXPERTS = ("rowwise_bf16_wgrad", "rowwise", "blockwise", "blockwise_bf16_wgrad")
KINDS = ("exact", "codes", "read by a Monitor", "FSDP2")
PARTS = ("layer", "experts", "optimizer")


def _layer() -> tuple[nn.Module, Tensor]:
    name, tokens = LAYER[device()]
    shape = SHAPES[name]
    with torch.device(device()):
        model = nn.Sequential(Attention(shape), Mlp(shape.d, shape.h))
        return model, torch.randn(tokens, shape.d, dtype=torch.bfloat16, requires_grad=True)


def _once(step: Callable[[], object]) -> float:
    """Bytes that a step holds at its largest moment, beyond what was there."""
    step()
    gc.collect()
    machine().forget_peak()
    before = torch.cuda.memory_allocated() if device() == "cuda" else 0
    step()
    return machine().peak_bytes() - before


class _Compiled(nn.Module):
    """A module whose forward is compiled, so that FSDP2's hooks run outside of the graph."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.calls = (machine().compile(model, dynamic=False),)  # a tuple, because the compiled model is a module too

    def forward(self, x: Tensor) -> Tensor:
        return self.calls[0](x)


def _fsdp_step(contender: str, model: nn.Module, x: Tensor) -> Callable[[], object]:
    from torch.distributed.fsdp import fully_shard

    if not dist.is_initialized():
        backend = "nccl" if device() == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(device(), (1,))
    if contender in OURS:
        f8.parallel.fsdp_float8_all_gather(model)
    root = nn.Sequential(_Compiled(model))
    for module in (root[0], root):  # FSDP2 frees the weights of all modules but the root after the forward
        fully_shard(module, mesh=mesh)
    grad = torch.randn_like(x)

    def step() -> None:
        root(x).backward(grad)
        root.zero_grad()
        x.grad = None

    return step


def layer_step(contender: str, kind: str) -> Callable[[], object]:
    """Forward and backward of one layer."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = _layer()
    model = converted(contender, model)
    if kind == "FSDP2":
        return _fsdp_step(contender, model, x)
    if kind == "read by a Monitor":
        f8.Monitor(model, STATISTICS, every=1)
    saved = f8.SavedAsCodes() if kind == "codes" else None
    compiled = f8.compile(model, saved=saved) if saved else machine().compile(model, dynamic=False)
    grad = torch.randn_like(x)
    return lambda: torch.autograd.grad(compiled(x), [x, *model.parameters()], grad)


def layer_row(contender: str, kind: str, rounds: int) -> Row:
    """Milliseconds and peak of one layer, forward and backward."""
    step = layer_step(contender, kind)
    began = time.perf_counter()
    peak = _once(step)
    row: Row = {"contender": contender, "kind": kind, "ms": medians({"": step}, rounds)[""], "peak MB": peak / 1e6}
    print(f"{row}, after {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)  # a lease may end any time
    return row


def experts_steps(sizes: tuple[int, ...] | None = None) -> dict[str, Callable[[], object]]:
    """The experts' feed-forward, forward and backward, in bfloat16 and with recipes; see ``EXPERTS`` for sizes."""
    rows, dim, hidden, experts = sizes or EXPERTS[device()]
    torch.manual_seed(0)
    *tensors, _ = experts_arguments(rows, dim, hidden, experts)
    values = [torch.randn_like(each, device=device()).mul_(0.1).requires_grad_() for each in tensors]
    chosen = torch.multinomial(torch.rand(experts) + 0.1, rows, replacement=True)
    ends = torch.bincount(chosen, minlength=experts).cumsum(0).int().to(device())
    grad = torch.randn(rows, dim, device=device(), dtype=torch.bfloat16)

    def step_of(recipe: f8.Recipe | None) -> Callable[[], object]:
        torch._dynamo.reset()
        compiled = machine().compile(partial(feed_forward, recipe=recipe), dynamic=False)
        return lambda: torch.autograd.grad(compiled(*values, ends), values, grad)

    recipes = {name: f8.recipes.by_name(name) for name in WITH_EXPERTS}
    recipes["rowwise, fast accumulation"] = replace(
        recipes["rowwise"], fast_accumulation_grad_input=True, fast_accumulation_grad_weight=True
    )
    return {"bf16": step_of(None)} | {name: step_of(recipe) for name, recipe in recipes.items()}


def experts_rows(rounds: int) -> list[Row]:
    """Milliseconds and peak of the experts' feed-forward, in turns."""
    steps, peaks = experts_steps(), {}
    for name, step in steps.items():
        peaks[name] = _once(step)
        print(f"{name}: {peaks[name]} bytes", file=sys.stderr, flush=True)
    found = medians(steps, rounds)
    return [
        {"contender": name, "ms": ms, "speed to bf16": found["bf16"] / ms, "peak MB": peaks[name] / 1e6}
        for name, ms in found.items()
    ]


def optimizers() -> Iterator[tuple[str, torch.optim.Optimizer]]:
    """AdamW over a layer's weights, float32 with gradients: PyTorch's and ours."""
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "torch.optim.AdamW, fused": partial(torch.optim.AdamW, fused=True),
        "f8.optim.AdamW": f8.optim.AdamW,
        "f8.optim.AdamW, nearest": partial(f8.optim.AdamW, rounding="nearest"),
    }
    for name, kind in kinds.items():
        torch._dynamo.reset()
        model, _ = _layer()
        model.float()
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        step_by_step = {"backend": None} if device() == "cpu" and name.startswith("f8") else {}
        yield name, kind(model.parameters(), lr=1e-4, **step_by_step)


def optimizer_rows(rounds: int) -> list[Row]:
    """Milliseconds of an AdamW step over a layer's weights, and MB of its state."""
    rows: list[Row] = []
    for name, optimizer in optimizers():
        ms = medians({"": optimizer.step}, rounds)[""]
        print(f"{name}: {ms} ms", file=sys.stderr, flush=True)
        tensors = [each for state in optimizer.state.values() for each in state.values() if isinstance(each, Tensor)]
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        sizes = {
            "state MB": sum(each.nbytes for each in tensors) / 1e6,
            "parameters": sum(map(Tensor.numel, parameters)),
        }
        rows.append({"optimizer": name, "ms": ms} | sizes)
    return rows


def pairs_of(names: Sequence[str], kinds: Sequence[str]) -> list[tuple[str, str]]:
    """Contenders of the layer and their kinds: no Monitor reads bf16, torchao's layers are exact or under FSDP2."""
    pairs = []
    for name in names:
        without = KINDS[1:3] if name.startswith("torchao") else KINDS[2:3] if name == "bf16" else ()
        possible = [kind for kind in KINDS if kind not in without]
        pairs += [(name, kind) for kind in possible if kind in kinds or (name, kind) == ("bf16", "exact")]
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--contenders", nargs="+", choices=contenders(), default=runnable(), help="of the layer")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="of the layer")
    args = parser.parse_args()
    pairs = pairs_of(list(dict.fromkeys(["bf16", *args.contenders])), args.kinds)
    if "layer" in args.only:
        found = [layer_row(*pair, args.rounds) for pair in pairs]
        rows = [row | {"speed to bf16": float(found[0]["ms"]) / float(row["ms"])} for row in found]
        name, tokens = LAYER[device()]
        emit(f"A decoder layer of {name}, {tokens} tokens, {where()}", rows, as_json=args.json)
    if "experts" in args.only:
        emit(f"Experts' feed-forward {EXPERTS[device()]}, {where()}", experts_rows(args.rounds), as_json=args.json)
    if "optimizer" in args.only:
        emit(f"AdamW over a layer's weights, {where()}", optimizer_rows(args.rounds), as_json=args.json)


if __name__ == "__main__":
    main()
