"""Self-checks of `fp8compile doctor`: registrations with PyTorch, exact scales, compiled results."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["run_checks"]

log: logging.Logger = logging.getLogger(__name__)
REINSTALL = ". Reinstall fp8compile in a new environment; if this remains, please report it."


def _every_op_is_registered() -> str:
    import torch

    from fp8compile.ops import OPS

    prefix = "fp8compile::"
    known = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith(prefix)}
    missing = known ^ {name for name in OPS if name.startswith(prefix)}  # OPS has ops of other libraries too
    if missing:
        raise RuntimeError(
            f"{', '.join(sorted(missing))}: registered in PyTorch or in fp8compile.ops.OPS, but not in both{REINSTALL}"
        )
    for name in sorted(known):
        for key in ("CompositeExplicitAutograd", "Autograd"):
            if not torch._C._dispatch_has_kernel_for_dispatch_key(name, key):
                raise RuntimeError(f"the op {name} has no {key} kernel{REINSTALL}")
    return f"{len(known)} ops with a kernel and a derivative rule"


def _inductor_sees_through() -> str:
    from torch._inductor.decomposition import select_decomp_table

    from fp8compile.ops import OPS

    table = select_decomp_table()
    wanted = [op for op in OPS.values() if op.decompose is not None]
    for op in wanted:
        if op.overload not in table:
            raise RuntimeError(f"{op.name} is not in Inductor's decomposition table{REINSTALL}")
    return f"{len(wanted)} decompositions in Inductor's table"


def _quantizers_are_constants() -> str:
    import torch

    from fp8compile import CurrentScaling, Recipe
    from fp8compile._compat import is_constant_type

    for cls in (CurrentScaling, Recipe):
        if not is_constant_type(cls):
            raise RuntimeError(
                f"PyTorch {torch.__version__} does not accept {cls.__name__} as a constant of graphs{REINSTALL}"
            )
    return "quantizers and recipes are constants of graphs"


def _scales_are_exact() -> str:
    import torch

    from fp8compile import CurrentScaling, quantize

    # expected multipliers by hand; a rounded reciprocal or a flush of subnormals to zero would miss them
    x = torch.tensor([3.0, 1e-40])
    q = quantize(x, CurrentScaling(block=(1, 1)))
    scale = q.scale.double() * torch.tensor([448.0 / 3.0, torch.finfo(torch.float32).max], dtype=torch.float64)
    if not torch.allclose(scale, torch.ones(2, dtype=torch.float64), rtol=2**-23, atol=0):
        raise RuntimeError(
            f"the values 3 and 1e-40 were quantized with scales {q.scale.tolist()}, but must be 3/448 and "
            "1/torch.finfo(torch.float32).max. Subnormal numbers may be flushed to zero; check "
            "torch.set_flush_denormal."
        )
    return "divisions are correctly rounded, and subnormals are kept"


def _compiled(backend: str) -> str:
    import torch

    import fp8compile as f8

    torch.manual_seed(0)
    layer = f8.Linear(64, 48, recipe=f8.recipes.rowwise(), dtype=torch.bfloat16)
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)

    def step(layer: Any) -> tuple[Any, ...]:
        y = layer(x)
        return y, *torch.autograd.grad(y.float().square().sum(), (x, layer.weight, layer.bias))

    torch._dynamo.reset()
    compiled = step(torch.compile(layer, fullgraph=True, backend=backend))
    for name, got, expected in zip(
        ("output", "grad_input", "grad_weight", "grad_bias"), compiled, step(layer), strict=True
    ):
        if not torch.equal(got, expected):
            raise RuntimeError(
                f"{name} of a layer compiled with backend={backend!r} differs from eager mode. Please report this."
            )
    return "one graph, the same bits as eager mode, forward and backward"


def _aot_eager() -> str:
    return _compiled("aot_eager")


def _inductor() -> str:
    return _compiled("inductor")


CHECKS: dict[str, Callable[[], str]] = {
    "operators": _every_op_is_registered,
    "decompositions": _inductor_sees_through,
    "constants": _quantizers_are_constants,
    "scales": _scales_are_exact,
    "torch.compile, aot_eager": _aot_eager,
    "torch.compile, Inductor": _inductor,
}


def run_checks() -> Iterator[dict[str, Any]]:
    """Run all self-checks; yield for each a dict with ``name``, ``ok`` and ``detail``, a finding or an error."""
    for name, check in CHECKS.items():
        log.info("checking %s", name)
        try:
            ok, detail = True, check()
        except Exception as error:  # doctor reports whatever goes wrong, one line each
            ok, detail = False, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        yield {"name": name, "ok": ok, "detail": detail}
