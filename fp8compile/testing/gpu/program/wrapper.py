"""Loads the wrapper that Inductor generates for a GPU, and calls it on CPU tensors.

name in the wrapper      replaced by
async_compile.triton     `Kernel`, which interprets the kernel in one of its configurations
extern_kernels.NAME      `Products`, which computes the matrix product
empty_strided_cuda       memory that is filled with one byte, so that reads of it are noticed
torch.ops.*              emulated collectives; interpreted GPU kernels of this library's ops and of custom
                         operators; PyTorch's CPU kernels of aten operators, recorded; other operators raise
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fp8compile.target import pretend_target
from fp8compile.testing.gpu.gpus import Gpu, pretend_gpu
from fp8compile.testing.gpu.loaded import LoadedWrapper, StandIns
from fp8compile.testing.gpu.program.arithmetic import STORED_AS
from fp8compile.testing.gpu.program.interpreter import Interpreter
from fp8compile.testing.gpu.program.libraries import operator_called
from fp8compile.testing.gpu.program.memory import poisoned
from fp8compile.testing.gpu.program.messages import message
from fp8compile.testing.gpu.program.nan_origin import NanSearch
from fp8compile.testing.gpu.program.own_kernels import KNOWN, implementation_on_gpu
from fp8compile.testing.gpu.program.products import Products, is_product
from fp8compile.testing.gpu.program.settings import RunConfig, Settings
from fp8compile.testing.gpu.schedule import Schedule, ScheduledLaunch

__all__ = ["KernelLaunch", "Program"]

SILENT = {  # aten operators that compute nothing
    "zero_", "fill_",
    "empty", "empty_strided", "new_empty", "new_empty_strided", "empty_like", "detach", "alias", "view", "as_strided",
    "reshape", "t", "transpose", "permute", "select", "slice", "unsqueeze", "squeeze", "expand", "split",
    "_unsafe_view",
}  # fmt: skip


@dataclass(frozen=True)
class KernelLaunch:
    """The record of one launch of a generated kernel.

    Attributes:
        name: Name of the kernel.
        grid: Number of Triton programs along each dim.
        configuration: Block sizes that were used.
        configurations: Number of configurations that Inductor would time.
    """

    name: str
    grid: tuple[int, ...]
    configuration: Mapping[str, int]
    configurations: int


class _Kernels:
    """Replacement of Inductor's ``AsyncCompile`` in one generated file: makes `Kernel` objects."""

    def __init__(self, program: Program) -> None:
        self._program = program

    def triton(self, name: str, source: str, device_str: str = "cuda", **_: Any) -> Kernel:
        return Kernel(self._program, name, source)

    def wait(self, scope: Mapping[str, Any]) -> None:
        """Do nothing, because no kernel is compiled; generated code calls this with its namespace."""

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(
            f"run_gpu_program: generated code calls async_compile.{name}, which the simulation does not support. Test "
            "this model on a GPU."
        )


class Kernel:
    """A generated Triton kernel that is interpreted when the wrapper launches it."""

    def __init__(self, program: Program, name: str, source: str) -> None:
        path = Path(program.folder) / f"{name}_{len(list(Path(program.folder).iterdir()))}.py"
        path.write_text(re.sub(r"\s*triton_helpers\.set_driver_to_gpu\(\)", "", source))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None, f"{path} ends in .py"
        assert spec.loader is not None, f"{path} ends in .py"
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self._program, self._name, self._tuner = program, name, getattr(module, name)
        program.configurations = max(program.configurations, len(self._tuner.configs))

    def run(self, *args: Any, stream: Any, **kwargs: Any) -> None:
        """Run the kernel on CPU tensors, as the wrapper calls it; ``stream`` is ignored."""
        if kwargs:
            raise NotImplementedError(
                f"run_gpu_program: {self._name} is launched with the arguments {', '.join(kwargs)}, which the "
                "simulation does not support. Test this model on a GPU."
            )
        tuner, program = self._tuner, self._program
        declared = {name for name, kind in tuner.fn.fn.__annotations__.items() if "constexpr" in str(kind)}
        constants = {name: value for name, value in tuner.triton_meta["constants"].items() if name in declared}
        names = [name for name in tuner.fn.arg_names if name not in {**tuner.configs[0].kwargs, **constants}]
        names += tuner.inductor_meta.get("extra_launcher_args", ())  # a template's grid is known before it is launched
        given = dict(zip(names, args, strict=True))
        grids = self._grids(given)
        number = program.way.choose(grids)
        config, grid = tuner.configs[number], grids[number]
        blocks = {name: value for name, value in config.kwargs.items() if name in tuner.fn.arg_names}
        given = {name: value for name, value in given.items() if name in tuner.fn.arg_names} | constants
        kinds = tuner.triton_meta["signature"]
        given = {name: _as_kind(value, kinds.get(name, "")) for name, value in given.items()}
        # generated code passes -1 for a pointer that is None, because it is a constant of the compiled kernel
        given |= {name: None for name, value in tuner.triton_meta["constants"].items() if value is None}
        program.interpreter.launch(self._name, tuner.fn.fn, grid, given | blocks)
        program.keep(args)
        if (launch := program.current).kind == "gemm":
            program.products.launched(launch.op, given)
        program.launches.append(KernelLaunch(self._name, tuple(grid), blocks, len(tuner.configs)))

    def _grids(self, given: Mapping[str, Any]) -> list[tuple[int, ...]]:
        from torch._inductor.runtime.triton_heuristics import GridExpr

        meta = self._tuner.inductor_meta
        return [GridExpr.from_meta(meta, each).eval_slow({**given, **each.kwargs}) for each in self._tuner.configs]


def _as_kind(value: Any, kind: str) -> Any:
    """View a tensor in the dtype of Triton's type ``kind``, such as "*fp8e4nv"; other values are unchanged."""
    dtype, _ = STORED_AS.get(kind.removeprefix("*"), (None, None))
    return value.view(dtype) if isinstance(value, Tensor) and dtype not in (None, value.dtype) else value


class _Dispatch(TorchDispatchMode):
    """Dispatch mode that computes the operators called by generated code, by the table at the head of this file."""

    supports_higher_order_operators = True  # else PyTorch raises, in words of its own

    def __init__(self, program: Program) -> None:
        super().__init__()
        self._program = program

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if isinstance(op, torch._ops.HigherOrderOperator):
            raise NotImplementedError(
                f"run_gpu_program: generated code calls {op}, which is not supported. PyTorch 2.15 calls "
                "run_and_save_rng_state if a checkpointed region draws random numbers. Omit dropout in checkpointed "
                "regions."
            )
        namespace, _, name = op._schema.name.partition("::")
        if namespace == "_c10d_functional":
            return message(op, *args, **(kwargs or {}))
        if is_product(op):
            return self._program.products.multiply(name, *args, **(kwargs or {}))
        if own := operator_called(op._schema.name) or implementation_on_gpu(op):
            with self:  # memory that the kernel asks for is poisoned too
                return own(*args, **(kwargs or {}))
        if namespace not in KNOWN:
            raise NotImplementedError(
                f"run_gpu_program: generated code calls {op}, whose GPU kernel is unknown to the simulation. Test "
                "this model on a GPU."
            )
        result = op(*args, **(kwargs or {}))
        if name.startswith(("empty", "new_empty")):
            return poisoned(result.size(), result.stride(), result.dtype, self._program.poison)
        if name not in SILENT:
            self._program.library_calls.append(str(op))
            with _disable_current_modes():
                given = {f"argument {at}": each for at, each in enumerate(pytree.tree_leaves(args))}
                self._program.nans.computed(op, given, pytree.tree_leaves(result))
        return result


class Program:
    """A generated wrapper, loaded to run on the CPU.

    Attributes:
        found: The graph as Inductor would run it, with the wrapper's source.
        products: Computes the matrix products, and records the calls of the last run.
        launches: Launches of the last run.
        of_templates: Results of templates in the last run, by buffer name.
        library_calls: Operators of the last run that PyTorch's CPU kernels computed.
        nans: The search for the origin of a NaN, in all runs of the graph.
        configurations: The largest number of configurations that Inductor would time for a kernel of the program.
        way: The order and the configuration in which the last run ran kernels.
        poison: The byte that fills memory when the wrapper allocates it.
    """

    def __init__(self, found: Schedule, settings: Settings, folder: str, nans: NanSearch) -> None:
        self.found: Schedule = found
        self.gpu: Gpu = settings.gpu
        self.nans: NanSearch = nans
        self.interpreter: Interpreter = Interpreter(settings.arithmetic, nans=nans)
        self.poison: int = settings.poison
        self.folder: str = folder
        self.products: Products = Products(settings.gpu, nans)
        self.of_templates: dict[str, Tensor] = {}
        self._generated = [each for each in found.launches if each.arguments]  # calls of operators have none here
        self.launches: list[KernelLaunch] = []
        self.library_calls: list[str] = []
        self.configurations = 1
        self.way: RunConfig = RunConfig("forwards", None)
        stand_ins = StandIns(_Kernels(self), self.products, self._empty)
        with pretend_gpu(self.gpu):
            self._call = LoadedWrapper(found.source, found.constants, stand_ins)

    def __call__(self, args: list[Any], way: RunConfig) -> list[Any]:
        """Run the generated code in one way (order and configuration); clears the list ``args``."""
        self.way, self.launches, self.library_calls, self.of_templates = way, [], [], {}
        self.products.called = []
        target = pretend_target(self.gpu.target)
        running = self.interpreter.active(way.order, way.configuration or 0)
        with running, target, _Dispatch(self):
            return self._call(args)

    @property
    def has_templates(self) -> bool:
        """Whether a kernel of the program is one of Inductor's templates."""
        return any(launch.is_template for launch in self._generated)

    @property
    def current(self) -> ScheduledLaunch:
        """The launch of a Triton kernel that runs now."""
        return self._generated[len(self.launches)]

    def keep(self, args: Sequence[Any]) -> None:
        """Copy a template's results after its launch, to compare them with bounds later.

        Args:
            args: The arguments of the launch; templates write to some of them.
        """
        for name, arg in zip(self.current.arguments, args, strict=False):
            if name in self.found.of_templates:
                with _disable_current_modes():
                    self.of_templates[name] = arg.clone()

    def _empty(self, size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        with _disable_current_modes():
            return poisoned(size, stride, dtype, self.poison)
