"""A backend of torch.compile that generates a GPU's code, runs it on the CPU and compares it with a reference.

    fn --Dynamo, AOTAutograd, partitioner--> graphs --Inductor for the GPU--> wrapper, kernels --> `Program`
                                               |
                                               +--operator by operator--> `Reference`

PyTorch's own runtime handles saved tensors, mutated buffers and views, as on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from fp8compile.target import Target, pretend_target
from fp8compile.testing.gpu.gpus import Gpu
from fp8compile.testing.gpu.graphs import (
    GpuGraph,
    all_outputs,
    change_joint,
    check_has_no_region,
    partition,
    returned_outputs,
)
from fp8compile.testing.gpu.program.arithmetic import Arithmetic
from fp8compile.testing.gpu.program.interpreter import Interpreter
from fp8compile.testing.gpu.program.random_numbers import RandomNumbers
from fp8compile.testing.gpu.program.reference import Reference
from fp8compile.testing.gpu.program.result import Difference, GraphRun, output_differences, product_differences
from fp8compile.testing.gpu.program.wrapper import Program, Way
from fp8compile.testing.gpu.schedule import schedule

__all__ = ["GpuBackend", "Settings"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How programs are generated and run; see `run_gpu_program`."""

    gpu: Gpu
    precision_casts: bool
    arithmetic: Arithmetic
    poison: int
    orders: tuple[str, ...]
    configurations: tuple[int, ...] | None  # None: the largest blocks; empty: all


def _copy(value: Any) -> Any:
    """A copy of a tensor with the same strides; any other value is returned unchanged."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype).copy_(value.detach())


def _ways(settings: Settings, most: int) -> list[Way]:
    numbers = settings.configurations
    chosen: Sequence[int | None] = [None] if numbers is None else numbers or range(most)
    return [Way(order, number) for order in settings.orders for number in chosen]


class _Compared:
    """A compiled graph, which runs its program and its reference at each call and compares them.

    Attributes:
        schedule: The graph as Inductor would run it.
        differences: Differences of the program from the reference, in all runs.
    """

    def __init__(self, name: str, traced: GpuGraph, settings: Settings, folder: str, numbers: RandomNumbers) -> None:
        from torch._inductor import config

        started = time.perf_counter()
        self._name, self._graph, self._settings, self._numbers = name, traced.graph, settings, numbers
        with config.patch({"emulate_precision_casts": settings.precision_casts}):
            self.schedule = found = schedule(traced, settings.gpu)
        self._program = Program(
            found, settings.gpu, Interpreter(settings.arithmetic), poison=settings.poison, folder=folder
        )
        self._generating, self._running = time.perf_counter() - started, 0.0
        self.differences: list[Difference] = []

    def __call__(self, args: list[Any]) -> list[Any]:
        started = time.perf_counter()
        arguments, given = list(args), [_copy(arg) for arg in args]
        args.clear()
        drawing = torch.get_rng_state()  # the reference and each way draw the same seeds
        results: list[Any] = []
        reference: Reference | None = None
        expected: list[Any] = []
        changed: list[Any] = []
        ways = _ways(self._settings, self._program.configurations)
        for way in ways:
            used = arguments if way is ways[-1] else [_copy(arg) for arg in given]
            torch.set_rng_state(drawing)
            results = self._program(list(used), way)
            where = f"{self._name} ({way})" if len(ways) > 1 else self._name
            if reference is None or self._program.of_templates:  # it goes on from the results of templates
                changed = [_copy(arg) for arg in given]
                with torch.random.fork_rng(devices=[]):
                    torch.set_rng_state(drawing)
                    reference = self._reference()
                    expected = self._run_reference(reference, changed)
                self.differences += (replace(each, where=f"{where}, {each.where}") for each in reference.outside)
            self.differences += product_differences(where, self._program.products.called, reference.products.called)
            self.differences += output_differences(f"{where}, output", results, expected)
            self.differences += output_differences(f"{where}, input", used, changed)
        self._running += time.perf_counter() - started
        return results

    def _reference(self) -> Reference:
        """The graph, to be run operator by operator; it goes on from what the program's templates wrote."""
        settings, written = self._settings, self._program.of_templates
        rounds_each = settings.precision_casts
        return Reference(self._graph, settings.gpu, self.schedule, self._numbers, written, rounds_each=rounds_each)

    def _run_reference(self, reference: Reference, given: list[Any]) -> list[Any]:
        """Run the reference, which may change its inputs in place."""
        alone = Interpreter(self._settings.arithmetic, elements=1)  # of kernels that the function's author wrote
        with torch.no_grad(), pretend_target(Target("cpu")), alone.active():  # our ops run their PyTorch code
            return reference.run(*given)

    def run(self) -> GraphRun:
        """The report of the graph's last run."""
        program = self._program
        return GraphRun(
            name=self._name, source=self.schedule.source, products=tuple(program.products.called),
            launches=tuple(program.launches), library_calls=tuple(dict.fromkeys(program.library_calls)),
            seconds=(self._generating, self._running),
        )  # fmt: skip


class GpuBackend:
    """Compiles functions to code for a GPU, which runs on the CPU.

    Attributes:
        graphs: The compiled graphs in the order of compilation.
    """

    def __init__(self, settings: Settings, folder: str) -> None:
        self._settings, self._folder, self._numbers = settings, folder, RandomNumbers()
        self.graphs: list[_Compared] = []

    def compile(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Compile a function with ``fullgraph=True``; a call of the result runs the GPU's code on the CPU."""
        from torch._dynamo.backends.common import aot_autograd
        from torch._inductor import compile_fx

        backend = aot_autograd(
            inference_compiler=self._inference,
            fw_compiler=self._forward,
            bw_compiler=partial(self._whole, "backward"),
            decompositions=compile_fx.select_decomp_table(),
            partition_fn=partition,
        )
        return torch.compile(fn, fullgraph=True, backend=backend)

    def _inference(self, graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Compile a forward that no backward follows."""
        change_joint(graph, inputs)
        return self._whole("forward", graph, inputs)

    def _whole(self, name: str, graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Compile a graph that saves nothing for a backward."""
        return self._compiled(name, GpuGraph(graph, inputs, all_outputs(graph)))

    def _forward(self, graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Compile a graph that saves tensors for a backward; the backward gets the strides that Inductor chose."""
        call = self._compiled("forward", GpuGraph(graph, inputs, returned_outputs()))
        strides: Any = torch._guards.TracingContext.get().output_strides  # a list while a graph is compiled
        strides.extend(self.graphs[-1].schedule.output_strides)
        return call

    def _compiled(self, name: str, traced: GpuGraph) -> Callable[..., Any]:
        check_has_no_region(traced.graph)
        gpu = self._settings.gpu
        with pretend_target(gpu.target):
            compared = _Compared(name, traced, self._settings, self._folder, self._numbers)
        self.graphs.append(compared)

        def call(args: list[Any]) -> list[Any]:
            return compared(args)

        call._boxed_call = True  # type: ignore[attr-defined]  # PyTorch's mark
        return call
