"""The pytest fixtures ``gpu_program``, which runs a GPU's code on the CPU, and ``gpu_kernels``, which counts it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import pytest

from fp8compile.testing.gpu.kernels import GpuCode, gpu_kernels
from fp8compile.testing.gpu.program.run import run_gpu_program
from fp8compile.testing.graphs.plugin import CODE

if TYPE_CHECKING:
    from fp8compile.testing.gpu.program.result import GpuRun

__all__ = ["program_runner", "recorded_gpu_kernels"]


def recorded_gpu_kernels(item: pytest.Item) -> Callable[..., list[GpuCode]]:
    """Make a `gpu_kernels` for a test; the code that it generates is also counted for the test's baseline."""
    counts = item.stash[CODE] = Counter()

    def run(*args: Any, **options: Any) -> list[GpuCode]:
        codes = gpu_kernels(*args, **options)
        for code in codes:
            counts.update(launches=len(code.launches), gemms=len(code.gemms), gpu_bytes=code.bytes)
        return codes

    return run


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
