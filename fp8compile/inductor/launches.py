"""Ops that are one Triton kernel: Inductor prints the kernel's launch, and times its candidates on the user's GPU.

    op called from a graph     wrapper --> Python op --> Triton's launcher         one configuration, copies unseen
    launch that is printed     wrapper --> the kernel, tuned at its first call     results and copies are Inductor's

The op stays a node of the graph. Inductor keeps the choice on disk, beside the generated code.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from fp8compile._compat import print_launch, statically_true, when_imported
from fp8compile.inductor.registration import register_fallback

__all__ = ["register_launch"]


def register_launch(op: torch._ops.OpOverload, launch: Callable[..., Any], *, strided: tuple[int, ...] = ()) -> None:
    """Let Inductor print the launch of an op's kernel on a GPU, and call the op elsewhere.

    Args:
        op: The operator; it returns one tensor or several.
        launch: Takes the op's results, then its arguments, all as fake tensors; returns a
            `fp8compile.kernels.launch.Launch`, or None to call the op.
        strided: Positions of the tensors that the kernel reads by their strides. Inductor writes all other arguments
            in contiguous memory.
    """
    register_fallback(op, contiguous=min(strided, default=-1))

    def register() -> None:
        from torch._inductor import lowering

        call = lowering.lowerings[op]

        def lower(*args: Any) -> Any:
            printed = _printed(launch, args, strided)
            return call(*args) if printed is None else printed

        lowering.register_lowering(op, type_promotion_kind=None)(lower)

    when_imported("torch._inductor.lowering", register)


def _printed(launch: Callable[..., Any], args: tuple[Any, ...], strided: tuple[int, ...]) -> Any:
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    node = V.graph.current_node
    device: Any = next(each for each in args if isinstance(each, ir.IRNode)).get_device()
    if device.type != "cuda":
        return None
    fakes = list(torch.fx.map_arg(list(node.args), lambda each: each.meta["val"]))
    for at, fake in enumerate(fakes):
        if isinstance(fake, torch.Tensor) and (at not in strided or _is_expanded(fake)):
            fakes[at] = fake.contiguous()
    value = node.meta["val"]
    results = value if isinstance(value, (tuple, list)) else (value,)
    found = launch(results, *fakes)
    if found is None:
        return None
    laid_out = {
        id(fake): ir.ExternKernel.require_exact_strides(arg, _exprs(fake.stride()))
        for arg, fake in zip(args, fakes, strict=True)
        if isinstance(fake, torch.Tensor)
    }
    zeroed = {id(found.arguments[name]) for name in found.zeroed}
    made = [_allocated(each, device, zero=id(each) in zeroed) for each in results]
    laid_out |= {id(fake): each for fake, each in zip(results, made, strict=True)}
    tensors = {name: laid_out[id(each)] for name, each in found.arguments.items() if isinstance(each, torch.Tensor)}
    others = {name: _expr(each) for name, each in found.arguments.items() if name not in tensors}
    candidates = found.candidates[:1] if _takes_the_first() else found.candidates
    grids = [(*_exprs(found.grid(each.kwargs)), 1, 1)[:3] for each in candidates]
    print_launch(_tuned(found.kernel, candidates), grids, tensors, others, found.writes)
    return type(value)(made) if isinstance(value, (tuple, list)) else made[0]


def _takes_the_first() -> bool:
    """Whether nothing is timed: the option ``triton.autotune_pointwise`` is off, or code is compiled ahead of time."""
    from torch._inductor import config
    from torch._inductor.virtualized import V

    return V.graph.aot_mode or not config.triton.autotune_pointwise


@cache
def _tuned(kernel: Any, candidates: Any) -> Any:
    """Return the kernel under `triton.autotune`; one object, because Inductor tells kernels apart by identity."""
    import triton

    return triton.autotune(list(candidates), key=[])(kernel)


def _is_expanded(fake: torch.Tensor) -> bool:
    return any(statically_true(stride == 0) for stride in fake.stride())


def _allocated(like: torch.Tensor, device: torch.device, *, zero: bool) -> Any:
    from torch._inductor import lowering

    if not zero:
        return lowering.empty_strided(_exprs(like.shape), _exprs(like.stride()), dtype=like.dtype, device=device)
    zeros = lowering.full(_exprs(like.shape), 0, dtype=like.dtype, device=device)
    zeros.realize()
    return zeros


def _expr(number: Any) -> Any:
    return number.node.expr if isinstance(number, torch.SymInt) else number


def _exprs(sizes: Any) -> list[Any]:
    import sympy

    return [sympy.sympify(_expr(size)) for size in sizes]
