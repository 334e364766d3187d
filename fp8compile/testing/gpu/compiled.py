"""Compiles Triton kernels to a GPU's PTX, or AMD's assembly, on a machine without that GPU."""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import math
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from fp8compile.testing.gpu.gpus import Gpu, pretend_gpu, triton_target

__all__ = ["CompiledKernel", "compiled_jit", "compiled_kernels", "halved", "unpipelined"]

KERNEL_SOURCE = re.compile(r"^(\w+) = async_compile\.triton\('\w+', '''\n(.*?)^'''", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class CompiledKernel:
    """A Triton kernel, compiled in one configuration of block sizes and warps.

    Attributes:
        name: Name of the kernel.
        config: Block sizes of the configuration.
        num_warps: Number of warps, of 32 threads each.
        arguments: Maps names of the PTX's parameters, in order, to Triton's types, such as "*bf16" or "i32".
        shared_bytes: Bytes of shared memory that each Triton program uses.
        ptx: Text of the PTX; for an AMD GPU, text of the assembly.
    """

    name: str
    config: dict[str, int]
    num_warps: int
    arguments: dict[str, str]
    shared_bytes: int
    ptx: str = field(repr=False)

    def __str__(self) -> str:
        blocks = ", ".join(f"{name} {size}" for name, size in self.config.items())
        return f"{self.name} ({blocks}, {self.num_warps} warps)"


def _loaded(name: str, source: str, folder: str) -> ModuleType:
    path = Path(folder) / f"{name}.py"
    path.write_text(re.sub(r"\s*triton_helpers\.set_driver_to_gpu\(\)", "", source))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, f"{path} ends in .py"
    assert spec.loader is not None, f"{path} ends in .py"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _worker() -> AbstractContextManager[Any]:
    """Context in which Triton's driver raises if it is asked for the GPU, as in Inductor's compile processes.

    Such a process is forked, and CUDA can't be initialized in a forked process.
    """
    import triton

    error = RuntimeError(
        "The kernel asks CUDA for its GPU while it is compiled. Inductor compiles in forked processes, where this "
        "fails. Read the GPU from the compiler's options, or from a constant argument."
    )
    return mock.patch.object(triton.runtime.driver.active, "get_current_target", side_effect=error)


def _compiled(
    fn: Any,
    kinds: dict[str, str],
    constants: dict[str, Any],
    attributes: dict[tuple[int, ...], Any],
    options: dict[str, int],
    gpu: Gpu,
) -> tuple[dict[str, str], int, str]:
    """Compile a ``triton.jit`` function; ``options`` has numbers of warps and stages.

    Returns:
        Types of the PTX's parameters by name, bytes of shared memory, and the PTX (for AMD, the assembly).
    """
    import triton
    from triton.compiler import ASTSource

    signature = {name: "constexpr" if name in constants else kinds[name] for name in fn.arg_names}
    source = ASTSource(
        fn=fn,
        signature=signature,
        constexprs={(fn.arg_names.index(name),): value for name, value in constants.items()},
        attrs=attributes,
    )
    with _worker():
        found = triton.compile(source, target=triton_target(gpu), options=options)
    parameters = {name: kind for name, kind in signature.items() if kind != "constexpr"}
    return parameters, found.metadata.shared, found.asm["amdgcn" if gpu.is_amd else "ptx"]


def _generated(
    name: str, source: str, folder: str, gpu: Gpu, change: Callable[[Any, Any], bool] | None
) -> Iterator[CompiledKernel]:
    """Compile a generated kernel in each of its configurations.

    ``change`` edits a configuration before it is compiled, or returns False; ``folder`` is for temporary files.
    """
    module = _loaded(name, source, folder)
    tuner = next(value for value in vars(module).values() if type(value).__name__.endswith("Autotuner"))
    meta, fn = tuner.triton_meta, tuner.fn
    for config in tuner.configs:
        if change is not None and not change(tuner, config):
            continue
        constants = {name: value for name, value in config.kwargs.items() if name in fn.arg_names}
        for key, value in meta.get("constants", {}).items():
            constants[key if isinstance(key, str) else fn.arg_names[key]] = value
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        arguments, shared, ptx = _compiled(fn, meta["signature"], constants, meta["configs"][0], options, gpu)
        yield CompiledKernel(
            name=name, config=dict(config.kwargs), num_warps=config.num_warps, arguments=arguments,
            shared_bytes=shared, ptx=ptx,
        )  # fmt: skip


def unpipelined(tuner: Any, config: Any) -> bool:
    """Change a configuration in place as Inductor does if none fits into the GPU's shared memory.

    Source: ``CachingAutotuner.compile_by_disabling_pipelining`` in PyTorch 2.13 and 2.15.

    Args:
        tuner: Inductor's tuner of the kernel.
        config: One of its configurations.

    Returns:
        True: Inductor tries the changed configuration.
    """
    config.num_stages = 1
    if "NUM_STAGES" in config.kwargs:
        config.kwargs["NUM_STAGES"] = 1
    return True


def halved(tuner: Any, config: Any) -> bool:
    """Halve a reduction's block in place, as Inductor does on the GPU for a kernel with many registers.

    Inductor halves the block if the GPU's registers can't hold all Triton programs at a time. Then Inductor times both
    sizes, but drops a size that alone spills registers. This function assumes that a thread needs all 255 registers.

    Source: ``CachingAutotuner._iter_rblock_scale_candidates`` in PyTorch 2.13.

    Args:
        tuner: Inductor's tuner of the kernel.
        config: One of its configurations.

    Returns:
        Whether Inductor tries the halved block; if not, the configuration is unchanged.
    """
    device, blocks = tuner.device_props, {name: size for name, size in config.kwargs.items() if name.startswith("R")}
    programs = -(-tuner.size_hints["x"] // config.kwargs.get("XBLOCK", 1)) if blocks else 0
    at_a_time = max(device.regs_per_multiprocessor // (255 * device.warp_size_or_default * config.num_warps), 1)
    is_loop = tuner.heuristic_type.name == "REDUCTION" and not tuner.inductor_meta.get("persistent_reduction")
    if not is_loop or math.prod(blocks.values()) <= 64 or programs <= at_a_time * device.multi_processor_count:
        return False
    config.kwargs[max(blocks, key=blocks.__getitem__)] //= 2
    return True


def compiled_kernels(
    source: str, gpu: Gpu, *, most: int | None = None, change: Callable[[Any, Any], bool] | None = None
) -> Iterator[CompiledKernel]:
    """Compile the Triton kernels of generated code for a GPU, and yield them; nothing is launched.

    Args:
        source: The code that Inductor generated, as in `GpuCode.source`.
        gpu: The GPU.
        most: How many configurations of each kernel to compile, starting with the first; None for all.
        change: Called with Inductor's tuner and each configuration before it is compiled, such as `unpipelined`. It
            changes the configuration and returns True, or returns False to skip it.

    Raises:
        ModuleNotFoundError: Triton is not installed.
    """
    with tempfile.TemporaryDirectory() as folder, pretend_gpu(gpu):
        for name, text in KERNEL_SOURCE.findall(source):
            yield from itertools.islice(_generated(name, text, folder, gpu, change), most)


def compiled_jit(
    fn: Any,
    kinds: dict[str, str],
    constants: dict[str, Any],
    *,
    num_warps: int,
    gpu: Gpu,
    num_stages: int = 3,
    aligned: Iterable[str] | None = None,
) -> CompiledKernel:
    """Compile a ``triton.jit`` function for a GPU; nothing is launched.

    Args:
        fn: The function.
        kinds: Triton's type of each argument that is no constant, such as "*bf16" and "i32".
        constants: Values of ``tl.constexpr`` arguments. Arguments that are in neither mapping keep their defaults.
        num_warps: Number of warps, of 32 threads each.
        gpu: The GPU.
        num_stages: Number of stages of a pipelined loop; Triton's default is 3.
        aligned: Names of pointers and sizes that the compiler may assume to be multiples of 16; None for all.

    Raises:
        ModuleNotFoundError: Triton is not installed.
    """
    names = kinds if aligned is None else aligned
    attributes: dict[tuple[int, ...], Any] = {(fn.arg_names.index(each),): [["tt.divisibility", 16]] for each in names}
    signature = inspect.signature(fn.fn).parameters.values()
    defaults = {each.name: each.default for each in signature if each.default is not each.empty}
    left_out = {name: value for name, value in defaults.items() if name not in {**kinds, **constants}}
    with pretend_gpu(gpu):
        options = {"num_warps": num_warps, "num_stages": num_stages}
        arguments, shared, ptx = _compiled(fn, kinds, {**constants, **left_out}, attributes, options, gpu)
    sizes = {name: value for name, value in constants.items() if type(value) is int}
    return CompiledKernel(
        name=fn.__name__, config=sizes, num_warps=num_warps, arguments=arguments, shared_bytes=shared, ptx=ptx
    )
