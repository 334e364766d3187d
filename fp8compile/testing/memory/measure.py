"""memory_report: predicts what a training step will hold in memory, from generated code."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fp8compile._compat import fsdp_modules, local_itself
from fp8compile.nn.check_model import check_model
from fp8compile.nn.parameter_uses.first_forward import suppress_warnings
from fp8compile.saved_tensors import SavedAsCodes, partitioner
from fp8compile.testing.explain.capture import record
from fp8compile.testing.explain.equal_blocks import EqualBlocks, equal_blocks, longest_list, shortened
from fp8compile.testing.explain.gpu_code import unconverted
from fp8compile.testing.explain.module_stack import Names
from fp8compile.testing.gpu.gpus import GPUS, Gpu, gpu_called
from fp8compile.testing.gpu.graphs import GpuGraph, gpu_graphs
from fp8compile.testing.gpu.lowering import constants_of, take_code
from fp8compile.testing.gpu.schedule import Schedule, schedule
from fp8compile.testing.graphs.kept_state import kept_state
from fp8compile.testing.graphs.report import is_compiled
from fp8compile.testing.graphs.without_values import without_values
from fp8compile.testing.memory.allocations import Run, Wrapper, run_wrappers
from fp8compile.testing.memory.cached import cached_codes, found_codes
from fp8compile.testing.memory.kept import KeptTensor, kept_tensors
from fp8compile.testing.memory.report import MemoryReport
from fp8compile.testing.memory.timeline import largest_of_blocks

__all__ = ["memory_beside_unconverted", "memory_of_call", "memory_report"]

log: logging.Logger = logging.getLogger(__name__)
CPU = "cpu"
Optimizer = Callable[[Any], Any] | None


@dataclass(frozen=True)
class _Found:
    """Allocations of one model's generated code, and the tensors that its forward saves."""

    run: Run
    kept: tuple[KeptTensor, ...]


@dataclass(frozen=True, kw_only=True)
class _Call:
    """A call of a model or function, and the GPU for which code is generated; None for a CPU."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    gpu: Gpu | None
    saved: SavedAsCodes | None

    @property
    def model(self) -> nn.Module:
        """The model; a module without parameters if ``fn`` is a function."""
        return self.fn if isinstance(self.fn, nn.Module) else nn.Module()

    def generated(self) -> _Found:
        """Generate the code of forward and backward, simulate its allocations, and list the saved tensors."""
        from torch._inductor import config

        fn, kwargs = self.fn, self.kwargs
        options = {} if self.saved is None else {"custom_partitioner_fn": partitioner(self.saved)}
        with config.patch(options):
            graphs = gpu_graphs((lambda *args: fn(*args, **kwargs)) if kwargs else fn, self.args, self.gpu)
        if len(graphs) < 2:
            raise ValueError(
                "memory_report: this call has no backward, so nothing is saved for it. A parameter or an argument "
                "must require a gradient, and the call must not run under torch.no_grad()."
            )
        if len(graphs) > 2:
            raise NotImplementedError(
                f"memory_report: the call was compiled to {len(graphs) // 2} graphs with a backward, but only one is "
                "supported. Remove the graph breaks, or pass a smaller part of the model."
            )
        forward, backward = graphs
        wrappers = [self._wrapper(graph) for graph in graphs]
        run = run_wrappers(graphs, wrappers, self._owners(forward), CPU if self.gpu is None else "cuda")
        on_gpu = wrappers[1] if isinstance(wrappers[1], Schedule) else None
        kept = kept_tensors(forward, backward, on_gpu, Names.of(self.model))
        return _Found(run, tuple(kept))

    def _wrapper(self, graph: GpuGraph) -> Wrapper:
        if self.gpu is not None:
            return schedule(graph, self.gpu)
        found: list[Any] = []
        take_code(
            graph,
            torch.device(CPU),
            lambda lowering, source: found.append(SimpleNamespace(source=source, constants=constants_of(lowering))),
        )
        wrapper: Wrapper = found[0]
        return wrapper

    def _owners(self, forward: GpuGraph) -> list[str]:
        names = {id(tensor): "parameters" for tensor in (*self.model.parameters(), *self.model.buffers())}
        codes = (part for each in found_codes(self.model).values() for part in (each, *each.parts()))
        names |= {id(tensor): "weight_codes" for tensor in codes}
        found = [names.get(id(each), "inputs") for each in forward.called_with for _ in _parts(each)]
        assert len(found) == len(forward.inputs), "AOTAutograd passes tensors on, and the parts of subclasses"
        return found


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, Tensor) and is_traceable_wrapper_subclass(value):
        names, _ = value.__tensor_flatten__()
        for name in names:
            yield from _parts(getattr(value, name))
    else:
        yield value


def _bytes(tensors: Iterable[Tensor]) -> int:
    parts = [part for tensor in dict.fromkeys(tensors) for part in _parts(tensor) if isinstance(part, Tensor)]
    return sum({id(part): part.untyped_storage().nbytes() for part in parts}.values())


def _trained(model: nn.Module) -> list[Tensor]:
    return [local_itself(parameter) for parameter in model.parameters() if parameter.requires_grad]


def _on_meta(tensor: Any) -> Any:
    if not isinstance(tensor, Tensor):  # a DeviceMesh or process group of a subclass
        return tensor
    if not is_traceable_wrapper_subclass(tensor):
        return torch.empty_like(tensor, device="meta")
    names, context = tensor.__tensor_flatten__()
    inner = {name: _on_meta(getattr(tensor, name)) for name in names}
    cls: Any = type(tensor)
    return cls.__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())


def _optimizer_bytes(parameters: Sequence[Tensor], optimizer: Optimizer) -> int:
    if optimizer is None or not parameters:
        return 0
    copies = [_on_meta(each.detach()).requires_grad_() for each in parameters]
    made = optimizer(copies)
    for copy in copies:
        copy.grad = torch.empty(copy.shape, dtype=copy.dtype, device="meta")
    made.step()
    state = [leaf for leaf in pytree.tree_leaves(dict(made.state)) if isinstance(leaf, Tensor)]
    return sum(leaf.untyped_storage().nbytes() for leaf in state if leaf.is_meta)


def _kept_in_all(blocks: EqualBlocks, three: Sequence[KeptTensor]) -> Iterator[KeptTensor]:
    for tensor in three:
        place = blocks.place(tensor.module)
        if place is None:
            yield tensor
            continue
        number, inside = place
        numbers = {0: range(1), 1: range(1, blocks.count - 1)}.get(number, range(blocks.count - 1, blocks.count))
        for each in numbers:
            readers = tuple(_moved_name(blocks, name, each - number) for name in tensor.read_in)
            saved = tensor.saved
            if saved is not None:
                saved = replace(saved, module=_moved_name(blocks, saved.module, each - number))
            yield replace(tensor, module=blocks.layer(each, inside), read_in=readers, saved=saved)


def _moved_name(blocks: EqualBlocks, name: str, by: int) -> str:
    place = blocks.place(name)
    return name if place is None else blocks.layer(place[0] + by, place[1])


def _counted(call: _Call, blocks: EqualBlocks) -> MemoryReport | None:
    """Report on a model, extrapolated from 2, 3 and 4 of its equal blocks; None if that is not provably exact."""
    found = []
    for count in (2, 3, 4):
        with shortened(call.model, blocks, count):
            log.info("%d of %d equal blocks of %s", count, blocks.count, blocks.name or "the model")
            found.append(call.generated())
    forward = largest_of_blocks([each.run.forward for each in found], blocks.count)
    backward = largest_of_blocks([each.run.backward for each in found], blocks.count)
    _, three, four = (each.kept for each in found)
    of_four = _kept_in_all(replace(blocks, count=4), three)
    if forward is None or backward is None or sorted(map(repr, of_four)) != sorted(map(repr, four)):
        log.info("generating code for each block, because it depends on how many there are")
        return None
    kept = tuple(_kept_in_all(blocks, three))
    return _report(call, forward=forward, backward=backward, kept=kept, counted=str(blocks))


def _report(call: _Call, **found: Any) -> MemoryReport:
    model = call.model
    trained = _trained(model)
    return MemoryReport(
        device="CPU" if call.gpu is None else call.gpu.name,
        parameters=_bytes((*model.parameters(), *model.buffers())),
        gradients=sum(each.numel() * each.element_size() for each in dict.fromkeys(trained)),
        optimizer=0,
        weight_codes=cached_codes(model),
        **found,
    )


def memory_of_call(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    arch: str = "h200",
    optimizer: Optimizer = torch.optim.AdamW,
    saved: SavedAsCodes | None = None,
) -> MemoryReport:
    """Report as `memory_report` does, for a call of ``fn`` with these positional and keyword arguments."""
    if not isinstance(fn, nn.Module) and not callable(fn):
        check_model("memory_report", fn)
    if is_compiled(fn):
        raise TypeError("memory_report: the model is already compiled. Pass the model before torch.compile.")
    if isinstance(fn, nn.Module) and (sharded := fsdp_modules(fn)):
        raise NotImplementedError(
            f"memory_report: fully_shard was called for {', '.join(sharded)}, which communicates outside of graphs. "
            "Call memory_report before fully_shard, which divides parameters, gradients and optimizer states by "
            "the number of ranks."
        )
    gpu = None if arch == CPU else _gpu(arch)
    if saved is not None and not isinstance(saved, SavedAsCodes):
        raise TypeError(f"memory_report: `saved` is {saved!r}; it must be a fp8compile.SavedAsCodes, or None.")
    call = _Call(fn=fn, args=args, kwargs=kwargs, gpu=gpu, saved=saved)
    model = call.model
    state = _optimizer_bytes(_trained(model), optimizer)
    try:
        with (
            kept_state(fn, (args, kwargs)),
            suppress_warnings(),
            without_values(model, args, kwargs) as (given, named),
        ):
            found = _measured(replace(call, args=given, kwargs=named))
    finally:
        torch._dynamo.reset()
    return replace(found, optimizer=state)


def _measured(call: _Call) -> MemoryReport:
    given = call.model, call.args, call.kwargs
    blocks = None if longest_list(call.model) is None else equal_blocks(*given, record(*given))
    if blocks is not None and (counted := _counted(call, blocks)) is not None:
        return counted
    found = call.generated()
    return _report(call, forward=found.run.forward.largest(), backward=found.run.backward.largest(), kept=found.kept)


def _gpu(arch: str) -> Gpu:
    try:
        return gpu_called(arch)
    except ValueError as error:
        names = ", ".join((*GPUS, CPU))
        raise ValueError(
            f"memory_report: `arch` is {arch!r}; it must be one of {names}, or a name such as sm_90."
        ) from error


def memory_beside_unconverted(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, arch: str = "h200"
) -> dict[str, MemoryReport]:
    """Memory reports by title: "this model" and, if the model has FP8 layers, "without FP8".

    ``arch`` is the GPU, a key of ``fp8compile.testing.gpu.gpus.GPUS``; "cpu" for a CPU.
    """
    found = {"this model": memory_of_call(model, args, kwargs, arch=arch)}
    if (plain := unconverted(model)) is not None:
        log.info("the same model without FP8")
        found["without FP8"] = memory_of_call(plain, args, kwargs, arch=arch)
    return found


def memory_report(
    model: Callable[..., Any],
    *args: Any,
    arch: str = "h200",
    optimizer: Optimizer = torch.optim.AdamW,
    saved: SavedAsCodes | None = None,
) -> MemoryReport:
    """Predict the memory of a training step of ``model(*args)``, and what its forward saves.

    The model is traced with ``fullgraph=True``, Inductor generates the code for a GPU, and the code's allocations are
    simulated without memory and without kernels. Nothing is computed, so the model may be on the meta device, and a
    GPU is not needed. All earlier compiled graphs are dropped (``torch._dynamo.reset``). If a model has ten or more
    identical blocks, such as a transformer's layers, code is generated for 2, 3 and 4 of them. The report for all
    blocks is extrapolated from these, if graphs and code prove that the blocks are identical.

    Args:
        model: A module, not compiled, or a function that takes its parameters and buffers as arguments.
        args: Arguments of the call. Gradients of arguments that require grad are counted.
        arch: The GPU, a key of ``fp8compile.testing.gpu.gpus.GPUS``; "cpu" for the code of this machine's CPU, for
            which bytes moved are unknown.
        optimizer: Creates the optimizer from a list of parameters, such as a class of ``torch.optim``. The optimizer's
            state is counted in the dtype of the parameters. None for no optimizer.
        saved: Which saved tensors are quantized, as for ``fp8compile.compile(model, saved=...)``.

    Returns:
        The report.

    Raises:
        ValueError: There is no such GPU, or the call has no backward.
        TypeError: ``model`` can't be called, or is compiled; or ``saved`` is not an `fp8compile.SavedAsCodes`.
        NotImplementedError: Blocks of the model are compiled as regions (`fp8compile.compile`), `fully_shard` was
            called, or the call has more than one backward.
        ModuleNotFoundError: Triton is not installed, and ``arch`` is a GPU.
    """
    return memory_of_call(model, args, {}, arch=arch, optimizer=optimizer, saved=saved)
