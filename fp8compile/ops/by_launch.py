"""by_launch: an op's implementation that launches its Triton kernel on a GPU."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fp8compile.target import target_of

if TYPE_CHECKING:
    from fp8compile.kernels.launch import Launch

__all__ = ["by_launch"]


def by_launch(
    steps: Callable[..., Any],
    *,
    fake: Callable[..., Any],
    launch: Callable[..., Launch | None],
    strided: tuple[int, ...] = (),
) -> Callable[..., Any]:
    """Return an op's implementation: a launch on a GPU, and ``steps`` on a CPU.

    Args:
        steps: The op in plain PyTorch. It runs on a GPU too if there is no launch.
        fake: Makes uninitialized results.
        launch: Takes the results as a tuple, then the op's arguments, and returns the launch, or None.
        strided: Positions of the tensors that the kernel reads by their strides; the others are made contiguous.
    """

    @functools.wraps(steps)
    def implementation(*args: Any) -> Any:
        if target_of(args[0].device).type == "cpu":
            return steps(*args)
        results = fake(*args)
        laid_out = (
            each.contiguous() if isinstance(each, Tensor) and at not in strided else each
            for at, each in enumerate(args)
        )
        found = launch(results if isinstance(results, tuple) else (results,), *laid_out)
        if found is None:
            return steps(*args)
        found()
        return results

    # annotations are texts, which mean something in the module of `steps`
    implementation.__signature__ = inspect.signature(steps, eval_str=True)  # type: ignore[attr-defined]
    return implementation
