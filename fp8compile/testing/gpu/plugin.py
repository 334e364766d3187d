"""The pytest fixture ``gpu_program``: runs a GPU's generated code on the CPU, and fails on differences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import pytest

from fp8compile.testing.gpu.program.run import run_gpu_program

if TYPE_CHECKING:
    from fp8compile.testing.gpu.program.result import GpuRun

__all__ = ["program_runner"]


def program_runner(item: pytest.Item, arch: str, options: Mapping[str, Any]) -> Callable[..., GpuRun]:
    """Make the fixture's value: a function that runs generated code, and fails the test on a difference.

    Args:
        item: The test; the GPU and the numbers of launches and differences are added to its report.
        arch: The GPU.
        options: Options of `run_gpu_program`, from the marker.
    """

    def run(fn: Callable[..., Any], *args: Any, **others: Any) -> GpuRun:
        """Run ``fn(*args)`` by `run_gpu_program`, and fail the test on a difference.

        ``others`` are options that override those of the test's marker.
        """
        __tracebackhide__ = True
        found = run_gpu_program(fn, *args, arch=arch, **{**options, **others})
        launches = sum(len(graph.launches) for graph in found.graphs)
        item.user_properties.extend(
            (f"gpu_program_{name}", value)
            for name, value in (("arch", arch), ("launches", launches), ("differences", len(found.differences)))
        )
        if found.differences:
            said = "\n".join(map(str, filter(None, (found.differences, found.nan_origin))))
            pytest.fail(f"the program of {arch} differs from its graphs:\n{said}", pytrace=False)
        return found

    return run
