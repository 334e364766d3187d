"""run_gpu_program: runs a GPU's generated code on the CPU, and compares it with a reference."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8compile.target import CASTS_BY_FLOAT16, pretend_target
from fp8compile.testing.gpu.flex_attention import pretend_flex_attention
from fp8compile.testing.gpu.gpus import check_is_nvidia, gpu_called, pretend_triton
from fp8compile.testing.gpu.program.step import step

if TYPE_CHECKING:
    from fp8compile.testing.gpu.program.result import GpuRun

__all__ = ["run_gpu_program"]


def run_gpu_program(
    fn: Callable[..., Any],
    *args: Any,
    arch: str = "h200",
    grad_outputs: Sequence[Tensor] | None = None,
    precision_casts: bool = False,
    orders: Sequence[str] = ("forwards",),
    configurations: Sequence[int] | str = "largest",
    templates: Sequence[int] | str = (),
    contract: bool = False,
    approximate: bool = False,
    poison: int = 255,
) -> GpuRun:
    """Run the code that Inductor generates for ``fn(*args)`` and its backward on a GPU, on this CPU.

    The full program runs: the wrapper, and its Triton kernels in Triton's interpreter over their real grids. GEMMs are
    summed in float64 and rounded once. A reference runs each graph operator by operator. Use small sizes: a
    feed-forward block of 128 tokens takes seconds.

    Memory is filled with NaN before it is written. It is an error if a kernel accesses memory outside of its tensors,
    if two Triton programs of a launch write the same address, if one writes what another reads, or if the GPU's GEMM
    does not support an operand.

    ``fn`` is traced with ``fullgraph=True``; all earlier compiled graphs are dropped. Tensors that ``fn`` changes in
    place are changed once, as by one call. Gradients are returned and not accumulated.

    Random numbers are those that the GPU's kernels draw, from seeds that this CPU's generator draws
    (``torch.manual_seed``); the reference evaluates the graphs with the same numbers. Eager mode draws other numbers.

    Args:
        fn: A module or function, with FP8 layers or without.
        args: The arguments of ``fn``, on the CPU.
        arch: The GPU, a key of ``fp8compile.testing.gpu.gpus.GPUS``.
        grad_outputs: A gradient for each output that requires grad; None for normal numbers, the same each time.
        precision_casts: Whether to generate code with Inductor's ``emulate_precision_casts``. Each operator's result
            is then rounded to its dtype as in eager mode, so that outputs can be compared with `eager_run`.
        orders: Orders in which each launch's Triton programs run: "forwards", "backwards", "shuffled". Each is run and
            compared.
        configurations: Numbers of the configurations to run, among those that Inductor would time; "largest" for the
            one with the fewest programs, "all" for all. Each is run and compared.
        templates: Numbers of Inductor's Triton GEMM templates, used instead of the GPU's libraries, as with
            ``max_autotune_gemm``; "all" for each template that Inductor would time. Code is generated for each number.
            The results are compared within a bound, because a template adds in its own order.
        contract: Whether a float32 multiplication followed by an addition is one fused multiply-add, as ptxas may
            choose.
        approximate: Whether float32 divisions, exponentials and inverse roots have results that the approximate
            instructions may give.
        poison: The byte that fills memory before anything is written to it.

    Returns:
        Outputs, gradients, operands of each GEMM, and all differences from the reference.

    Raises:
        ValueError: An argument isn't one of those above, or the GPU's GEMM does not support its operands.
        IndexError: A kernel accesses memory outside of its tensors.
        RuntimeError: A kernel's result depends on the order of its programs, or Triton does not support an operation.
        NotImplementedError: The generated code does something that isn't known here.
        ModuleNotFoundError: Triton is not installed.
    """
    settings = _settings(arch, precision_casts, orders, configurations, templates, contract, approximate, poison)
    from fp8compile.testing.gpu.program.generate import GpuBackend
    from fp8compile.testing.gpu.program.nan_origin import has_nan
    from fp8compile.testing.gpu.program.result import Differences, GpuRun

    torch._dynamo.reset()
    try:
        with tempfile.TemporaryDirectory() as folder:
            backend = GpuBackend(settings, folder)
            with pretend_target(settings.gpu.target), pretend_triton(settings.gpu), pretend_flex_attention():
                outputs, gradients = step(backend.compile(fn), fn, args, grad_outputs)
            origin = next(filter(None, (graph.nan_origin for graph in backend.graphs)), None)
    finally:
        torch._dynamo.reset()
    shows = any(map(has_nan, (*outputs, *gradients.values()))) or any(graph.nans.shows for graph in backend.graphs)
    return GpuRun(
        outputs=outputs,
        gradients=gradients,
        graphs=tuple(graph.run() for graph in backend.graphs),
        differences=Differences(difference for graph in backend.graphs for difference in graph.differences),
        nan_origin=origin if shows else None,
    )


def _settings(
    arch: str, precision_casts: bool, orders: Sequence[str], configurations: Sequence[int] | str,
    templates: Sequence[int] | str, contract: bool, approximate: bool, poison: int,
) -> Any:  # fmt: skip
    from fp8compile.testing.gpu.program.arithmetic import Arithmetic
    from fp8compile.testing.gpu.program.interpreter import ORDERS
    from fp8compile.testing.gpu.program.settings import Settings

    if not orders or not set(orders) <= set(ORDERS):
        raise ValueError(
            f"run_gpu_program: `orders` is {orders!r}; it must be a tuple of one or more of "
            f"{', '.join(map(repr, ORDERS))}."
        )
    if isinstance(configurations, str) and configurations not in ("largest", "all"):
        raise ValueError(
            f"run_gpu_program: `configurations` is {configurations!r}; it must be 'largest', 'all' or a sequence of "
            "configuration indices, such as (0, 2)."
        )
    if isinstance(templates, str) and templates != "all":
        raise ValueError(
            f"run_gpu_program: `templates` is {templates!r}; it must be 'all' or a sequence of template indices, such "
            "as (0, 2)."
        )
    named = {"largest": None, "all": ()}
    gpu = gpu_called(arch)
    check_is_nvidia(gpu, "run_gpu_program")
    capability = gpu.target.capability
    arithmetic = Arithmetic(contract, approximate, capability == CASTS_BY_FLOAT16, capability)
    return Settings(
        gpu=gpu, precision_casts=precision_casts, arithmetic=arithmetic,
        poison=poison, orders=tuple(orders),
        configurations=named[configurations] if isinstance(configurations, str) else tuple(configurations),
        templates=None if isinstance(templates, str) else tuple(templates),
    )  # fmt: skip
