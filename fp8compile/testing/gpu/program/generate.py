"""Backend for torch.compile that runs a GPU's code on the CPU and compares it with a reference.

    fn --Dynamo, AOTAutograd, partitioner--> graphs --Inductor for the GPU--> wrapper, kernels --> `Program`
                                               |
                                               +--operator by operator--> `Reference`

PyTorch's own runtime handles saved tensors, mutated buffers and views, as on a GPU.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from fp8compile.target import Target, pretend_target
from fp8compile.testing.gpu.graphs import (
    GpuGraph,
    all_outputs,
    change_joint,
    check_has_no_region,
    partition,
    returned_outputs,
)
from fp8compile.testing.gpu.program.interpreter import Interpreter
from fp8compile.testing.gpu.program.nan_origin import NanOrigin, NanSearch, has_nan
from fp8compile.testing.gpu.program.own_kernels import place_of
from fp8compile.testing.gpu.program.random_numbers import RandomNumbers
from fp8compile.testing.gpu.program.reference import Reference
from fp8compile.testing.gpu.program.result import Difference, GraphRun, output_differences, product_differences
from fp8compile.testing.gpu.program.settings import RunConfig, Settings
from fp8compile.testing.gpu.program.wrapper import Program
from fp8compile.testing.gpu.schedule import Schedule, schedule

__all__ = ["GpuBackend"]


def _copy(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype).copy_(value.detach())


class _Compared:
    """A compiled graph that runs generated code and a reference at each call, and compares them.

    It has several `Program` objects if several templates for matrix products are to be compared.

    Attributes:
        differences: Differences of generated code from the reference, in all runs.
        nans: The search for the origin of a NaN, in all runs.
    """

    def __init__(self, name: str, traced: GpuGraph, settings: Settings, folder: str, numbers: RandomNumbers) -> None:
        started = time.perf_counter()
        self._name, self._graph, self._settings, self._numbers = name, traced.graph, settings, numbers
        self.nans: NanSearch = NanSearch(name)
        self._names = [node.name for node in traced.graph.graph.find_nodes(op="placeholder")]
        self._programs = [Program(each, settings, folder, self.nans) for each in self._schedules(traced)]
        self._generating, self._running = time.perf_counter() - started, 0.0
        self.differences: list[Difference] = []

    def _schedules(self, traced: GpuGraph) -> Iterator[Schedule]:
        from torch._inductor import config

        settings = self._settings
        with config.patch({"emulate_precision_casts": settings.precision_casts}):
            if settings.templates is not None:
                yield from (schedule(traced, settings.gpu, number) for number in settings.templates or (None,))
                return
            yield (first := schedule(traced, settings.gpu, 0))
            yield from (schedule(traced, settings.gpu, number) for number in range(1, first.templates))

    @property
    def schedule(self) -> Schedule:
        """The schedule of the graph with the last template."""
        return self._programs[-1].found

    def _ways(self) -> Iterator[tuple[Program, RunConfig, str]]:
        numbers, orders = self._settings.configurations, self._settings.orders
        for at, program in enumerate(self._programs):
            chosen: Sequence[int | None] = [None] if numbers is None else numbers or range(program.configurations)
            template = f", template {at}" if len(self._programs) > 1 else ""
            for order, number in itertools.product(orders, chosen):
                way = RunConfig(order, number)
                yield program, way, f"{self._name}{template}" + (f" ({way})" if len(orders) * len(chosen) > 1 else "")

    def __call__(self, args: list[Any]) -> list[Any]:
        started = time.perf_counter()
        arguments, given = list(args), [_copy(arg) for arg in args]
        args.clear()
        drawing = torch.get_rng_state()  # the reference and each way draw the same seeds
        results: list[Any] = []
        compared: tuple[Reference, list[Any], list[Any]] | None = None
        ways = list(self._ways())
        for at, (program, way, where) in enumerate(ways):
            used = arguments if at == len(ways) - 1 else [_copy(arg) for arg in given]
            if compared is None and not program.has_templates:  # first, for its errors name lines of the author's file
                compared = self._reference(program, given, drawing)
            torch.set_rng_state(drawing)
            self.nans.begin(self._names, used)
            results = program(list(used), way)
            self.nans.shows |= any(has_nan(one) > has_nan(other) for one, other in zip(used, given, strict=True))
            if compared is None or program.has_templates:  # it goes on from the results of templates
                compared = self._reference(program, given, drawing)
                self.differences += (replace(each, where=f"{where}, {each.where}") for each in compared[0].outside)
            reference, expected, changed = compared
            self.differences += product_differences(where, program.products.called, reference.products.called)
            self.differences += output_differences(f"{where}, output", results, expected)
            self.differences += output_differences(f"{where}, input", used, changed)
        self._running += time.perf_counter() - started
        return results

    def _reference(
        self, program: Program, given: Sequence[Any], drawing: Tensor
    ) -> tuple[Reference, list[Any], list[Any]]:
        """Run the reference of generated code on copies of its arguments.

        ``drawing`` is the state of the random generator from which the generated code draws.

        Returns:
            The reference, its results, and the copies, which the run may have changed in place.
        """
        settings, inputs = self._settings, [_copy(arg) for arg in given]
        reference = Reference(
            self._graph, settings.gpu, program.found, self._numbers, program.of_templates,
            rounds_each=settings.precision_casts,
        )  # fmt: skip
        alone = Interpreter(settings.arithmetic, elements=1)  # of kernels that the function's author wrote
        with torch.no_grad(), torch.random.fork_rng(devices=[]), pretend_target(Target("cpu")), alone.active():
            torch.set_rng_state(drawing)
            return reference, reference.run(*inputs), inputs  # our ops run their PyTorch code

    @property
    def nan_origin(self) -> NanOrigin | None:
        """Origin of the graph's first NaN; lines of handwritten kernels are located in the author's file."""
        found = self.nans.origin
        place = None if found is None else place_of(found.name, found.line)
        return found if found is None or place is None else replace(found, place=place)

    def run(self) -> GraphRun:
        """The report of the graph's last run."""
        program = self._programs[-1]
        return GraphRun(
            name=self._name, source=program.found.source, products=tuple(program.products.called),
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
        """Compile ``fn`` with ``fullgraph=True``; calls of the result run the GPU's code on the CPU."""
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
        change_joint(graph, inputs)
        return self._whole("forward", graph, inputs)

    def _whole(self, name: str, graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Compile a graph that saves nothing for a backward; ``name`` is "forward" or "backward"."""
        return self._compiled(name, GpuGraph(graph, inputs, all_outputs(graph)))

    def _forward(self, graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Compile a forward that saves tensors for a backward, and tell AOTAutograd the outputs' strides."""
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
