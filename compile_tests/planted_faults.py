"""Faults in generated code, planted one by one: what a tool that runs it must find, and how it does."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from unittest import mock

import torch

import fp8compile as f8
from fp8compile._compat import ADDCDIV_IS_EXACT
from fp8compile.testing import eager_run, run_gpu_program
from fp8compile.testing.bits import difference
from fp8compile.testing.gpu.program import generate

__all__ = ["FAULTS", "Fault", "found", "found_in_library", "inputs", "layer"]

M, K, N = 50, 64, 96
BARRIER = (
    r"(tmp\d+) = (tmp\d+)\.to\(tl\.bfloat16\)\.to\(tl\.int16, bitcast=True\)((?:.*\n)*?)"
    r"(.*) = tmp\d+\.to\(tl\.bfloat16, bitcast=True\)\.to\(tl\.float32\)"
)
SCALAR = r"(reinterpret_tensor\(\w+, \(\), \(\), 0\))"
SCALES = rf"extern_kernels\._scaled_mm\((\w+), (.+?), {SCALAR}, {SCALAR},"


@dataclass(frozen=True)
class Fault:
    """A change of generated code.

    Attributes:
        name: What is wrong then.
        pattern: What is replaced, in each of the sources where it is found.
        new: By what.
        found_as: Words of the error or of the differences that show it.
        graph: Which source is changed, "forward" or "backward".
        options: For `run_gpu_program`.
        count: How many places are changed; 0: all.
    """

    name: str
    pattern: str
    new: str
    found_as: str
    graph: str = "forward"
    options: dict = field(default_factory=dict)
    count: int = 0


# where Inductor writes the transposed codes of a matrix of 64 x 96
ACROSS = (r"96\*\(\(r0_0 % 64\)\) \+ \(r0_0 // 64\)", "r0_0")
if torch.__version__.startswith("2.11"):  # in a kernel of two dims
    ACROSS = (r"x1 \+ 96\*y0", "y0 + 64*x1")
# Triton divides float32 tiles by ``/`` approximately
APPROXIMATELY = (r"triton\.language\.div_rn\((\w+), (\w+)\)", r"(\1 / \2)")
if not ADDCDIV_IS_EXACT:  # divides in float64
    APPROXIMATELY = (r"tl\.float64", "tl.float32")
FAULTS = (
    Fault("a store without its mask", r"(tl\.store\(out_ptr\d \+ \(tl\.broadcast_to\(r0_0.*), r0_mask\)", r"\1, None)",
          "IndexError: .*store .* outside of the kernel's tensors"),
    Fault("a load one element too far", r"tl\.load\(in_ptr0 \+ \(r0_0\)", "tl.load(in_ptr0 + (r0_0 + 1)",
          "IndexError: .*load .* outside of the kernel's tensors"),
    Fault("the scales of two operands exchanged", SCALES, r"extern_kernels._scaled_mm(\1, \2, \4, \3,",
          "forward, product 0 _scaled_mm.*, left scale"),
    Fault("a buffer never written", r"\n +triton_\w+\.run\(.*\)", "", "nan instead of", count=1),
    Fault("the rounding barrier removed", BARRIER,
          r"\1 = \2.to(tl.bfloat16).to(tl.int16, bitcast=True)\3\4 = \2.to(tl.float32)",
          "forward, product 0 _scaled_mm.*, left operand"),
    Fault("codes along the wrong dim", *ACROSS,
          r"forward, output \d: ", options={"backward": True}),
    Fault("an amax that skips a block, the second half", r"r0_mask = r0_index < r0_numel",
          "r0_mask = r0_index < r0_numel // 2",
          "forward, product 0 _scaled_mm.*, left (operand|scale)", count=1),
    Fault("a scale from 447 instead of 448", r"448\.0, tl\.float(32|64)", r"447.0, tl.float\1",
          "forward, product 0 _scaled_mm.*, left scale", count=1),
    Fault("a race: two programs write one address", r"xoffset = tl\.program_id\(0\) \* XBLOCK",
          "xoffset = tl.program_id(0) * (XBLOCK // 2)", "RuntimeError: .*written by two programs",
          graph="backward", options={"backward": True}),
    Fault("scales by approximate division in float32", *APPROXIMATELY,
          "forward, product 0 _scaled_mm.*, (left|right) operand", options={"approximate": True}),
    Fault("a right operand in rows", r"\(\(64, 96\), \(1, 64\), torch\.float8_e4m3fn\)",
          "((64, 96), (96, 1), torch.float8_e4m3fn)",
          "ValueError: .*column-major right operand"),
    Fault("a product written to the wrong dtype", r"out_dtype=torch\.bfloat16", "out_dtype=torch.float32",
          "ValueError: .*it must have the shape and dtype of the result"),
    Fault("a product left out", r"\n +extern_kernels\._scaled_mm\(.*\)", "", "none instead of a call of it"),
    Fault("an operator that isn't known", r"extern_kernels\._scaled_mm\(", "extern_kernels._unknown_mm(",
          "NotImplementedError: .*extern_kernels._unknown_mm"),
    Fault("a function that isn't known", r"libdevice\.exp\(", "libdevice.j0(", "NotImplementedError: .*libdevice.j0"),
)  # fmt: skip


def layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """An activation and a product in FP8."""
    return f8.linear(torch.nn.functional.silu(x), weight, recipe=f8.recipes.tensorwise())


def inputs(*, backward: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Values whose largest come last."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, K, generator=generator).bfloat16() for rows in (M, N))
    x[-1, -1], weight[-1, -1] = 7, 5
    return x.requires_grad_(backward), weight.requires_grad_(backward)


def planted(fault: Fault) -> AbstractContextManager:
    """While this lasts, generated code has the fault; AssertionError where there is no place for it."""
    real: Callable = generate.schedule
    graphs = iter(("forward", "backward"))

    def schedule(*args: object) -> object:
        found, graph = real(*args), next(graphs)
        if graph != fault.graph:
            return found
        source, places = re.subn(fault.pattern, fault.new, found.source, count=fault.count)
        assert places, f"{fault.name}: no such code to change in the {graph}"
        return replace(found, source=source)

    return mock.patch.object(generate, "schedule", schedule)


def found(fault: Fault) -> str:
    """What running the layer with the fault says; "nothing" where it isn't found."""
    options = dict(fault.options)
    args = inputs(backward=options.pop("backward", False))
    with planted(fault):
        try:
            run = run_gpu_program(layer, *args, **options)
        except Exception as error:
            return f"{type(error).__name__}: {error}".partition("\n")[0]
    return str(run.differences) if run.differences else "nothing"


def _in_rows(scale: torch.Tensor) -> torch.Tensor:
    """As many scales as the tiles have, one row after the other."""
    rows, blocks = scale.shape
    return torch.nn.functional.pad(scale, (0, -blocks % 4, 0, -rows % 128)).reshape(-1).view(torch.float8_e8m0fnu)


def found_in_library(*, is_planted: bool = True) -> tuple[str, str]:
    """What a comparison with the graph says of MX scales in rows, not in tiles, and what one with eager mode does."""
    x, weight = inputs()

    def mx_layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return f8.linear(x, weight, recipe=f8.recipes.mxfp8())

    fault = mock.patch("fp8compile.ops.gemms.mx.swizzled", _in_rows) if is_planted else nullcontext()
    with fault:
        run = run_gpu_program(mx_layer, x, weight, arch="b200", precision_casts=True)
    apart = difference(run.outputs[0], eager_run(mx_layer, x, weight).outputs[0])
    return str(run.differences), f"eager mode: {apart}" if apart else "nothing"
