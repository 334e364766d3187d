"""program: exports a model as a graph of PyTorch's own operators, for the device that serves it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fp8compile import ops
from fp8compile.nn.check_model import check_model
from fp8compile.nn.convertible.convertible_layers import is_converted
from fp8compile.target import pretend_target, target_called

if TYPE_CHECKING:
    from torch.export import ExportedProgram

__all__ = ["program"]


def program(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    target: str | None = None,
    dynamic_shapes: Any = None,
) -> ExportedProgram:
    """Export a model's forward as a program that runs without this package, bit-identical to the model.

    The program is the result of ``torch.export.export``, with this package's operators decomposed into PyTorch
    operators. You can save it with ``torch.export.save``, load it in any process with PyTorch, and compile it with
    ``torch._inductor.aoti_compile_and_package``. GEMM kernels are selected at export time, for the device that serves.
    Call `fp8compile.freeze_weights` first, so that the program contains FP8 weights and does not quantize them in each
    call.

    Args:
        model: A converted model. It is exported in its current mode, so call ``eval()`` first.
        args: Example positional arguments of the model's forward.
        kwargs: Example keyword arguments.
        target: The device that will run the program: ``"cpu"``, or a GPU such as ``"h100"``, ``"b200"`` or
            ``"rtx4090"``. None for the device of the tensors. If you export for a GPU on a CPU, move the program with
            ``torch.export.passes.move_to_device_pass``.
        dynamic_shapes: Dynamic sizes, as for ``torch.export.export``.

    Returns:
        The program.

    Raises:
        TypeError: The model is not a module.
        ValueError: The model is not converted, or ``target`` is unknown.
        RuntimeError: An operator can't be decomposed, such as communication of expert parallelism, or PyTorch has no
            GEMM for a recipe on the target.
    """
    check_model("program", model)
    if not any(is_converted(module) for module in model.modules()):
        raise ValueError("program: the model has no FP8 layers. Call fp8compile.convert first.")
    place = nullcontext() if target is None else pretend_target(target_called(target))
    with torch.no_grad(), place:
        exported = torch.export.export(
            model, args, None if kwargs is None else dict(kwargs), dynamic_shapes=dynamic_shapes, strict=False
        )
        return exported.run_decompositions(ops.decompositions())
