"""Hand-written Triton kernels that compute their input: the pointwise code before them becomes a part of them.

    Inductor's kernel: y = silu(gate) * up --memory--> our kernel: codes of y      what any library's kernel gets
    our kernel, made a template: gate, up --> y, a tile at a time --> codes of y   what this file makes of it

Inductor does the same to its matrix products (prologue fusion), with templates that have one output and an input of
at most their prologue's bytes. A kernel of tiles is two functions under ``triton.jit``: one says where the elements of
a program's tile lie, the other is given their values. Between them its own kernel loads, and the template computes.
Values are rounded to the input's dtype, as in memory, so both have the same bits.

Inductor's templates are no public API. What is used of them is the same from 2.11 to 2.15: a subclass of the kernel
that prints one part of the template, one of the buffer that says what the kernel reads.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from fp8compile._compat.inductor import register_fallback, when_imported

__all__ = ["TileKernel", "TileLaunch", "register_tile_kernel"]

TILE = ("TILE", "TILE")  # the shape of a program's tile, by the names of its constants
ROW, COLUMN = "tmp_row", "tmp_column"  # Inductor gives any other name a meaning


@dataclass(frozen=True)
class TileKernel:
    """Two functions under ``triton.jit``, whose parameters are named as below or as ``places`` names its results.

    Attributes:
        module: The module that both are in.
        places: The name of the function that says which elements a program has.
        placed: What it returns, by name: first the rows, (TILE, 1) int64, the columns, (1, TILE) int64, and whether
            the tensor has such an element, (TILE, TILE).
        store: The name of the function that is given ``x``, (TILE, TILE) float32, 0 where there is no element. It
            returns where the tile of the first output lies, as two indices, and the tile, and where it is stored; all
            other outputs it stores itself.
        inputs: Names of pointers to the op's tensors but the first one.
        outputs: Names of pointers to the op's results but the first one.
        sizes: Names of numbers that are known when it is launched.
    """

    module: str
    places: str
    placed: tuple[str, ...]
    store: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    sizes: tuple[str, ...]


@dataclass(frozen=True)
class TileLaunch:
    """A launch of a kernel of tiles.

    Attributes:
        kernel: Which one.
        grid: Numbers of programs, three.
        sizes: Of ``TileKernel.sizes``; int or SymInt, as those of the grid.
        constants: What it is compiled for, TILE among them.
        warps: Of 32 threads each.
    """

    kernel: TileKernel
    grid: tuple[Any, ...]
    sizes: Mapping[str, Any]
    constants: Mapping[str, Any]
    warps: int


def register_tile_kernel(op: torch._ops.OpOverload, launch: Callable[..., TileLaunch | None]) -> None:
    """Let Inductor call ``op``, and on a GPU make the code before it a part of its kernel where nobody else reads it.

    Args:
        op: The operator. Its first argument is the matrix that it reads, its results are one or several tensors.
        launch: How its kernel is launched for the operator's arguments, fake tensors among them; None where there is
            none. The other tensors have the strides that they have there.
    """
    register_fallback(op)

    def register() -> None:
        from torch._inductor import lowering

        call = lowering.lowerings[op]

        def lower(x: Any, *args: Any) -> Any:
            computed = _computed(x)
            found = launch(*_fake_arguments()) if computed is not None else None
            return call(x, *args) if found is None else _lower(found, computed, args)

        lowering.register_lowering(op, type_promotion_kind=None)(lower)

    when_imported("torch._inductor.lowering", register)


# ---------------------------------------------------------------------------------- what is computed


def _computed(x: Any) -> Any:
    """The pointwise code whose result a matrix is, if a GPU computes it for the node that is lowered alone."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    if x.get_device().type != "cuda" or len(x.get_size()) != 2:
        return None
    if len(V.graph.current_node.args[0].users) != 1:
        return None  # it is written for the others
    data = x.data.data if isinstance(x.data, ir.StorageBox) else None
    if isinstance(data, ir.ComputedBuffer) and not _reads_changed(data):
        data = data.data  # written because it is long; nobody reads it then, and Inductor drops it
    return data if type(data) is ir.Pointwise else None


def _reads_changed(buffer: Any) -> bool:
    from torch._inductor.virtualized import V

    return any(name in V.graph.mutated_buffers for name in buffer.get_read_names())


def _fake_arguments() -> list[Any]:
    from torch._inductor.virtualized import V

    return torch.fx.map_arg(list(V.graph.current_node.args), lambda node: node.meta["val"])


# ---------------------------------------------------------------------------------- the template


def _lower(launch: TileLaunch, computed: Any, args: tuple[Any, ...]) -> Any:
    from torch._inductor import ir, lowering
    from torch._inductor.virtualized import V

    device, kernel = computed.get_device(), launch.kernel
    results = V.graph.current_node.meta["val"]
    first, *others = results if isinstance(results, (tuple, list)) else (results,)
    inputs = [
        ir.ExternKernel.require_exact_strides(each, _exprs(fake.stride()))
        for each, fake in zip(args, _fake_arguments()[1:], strict=True)
        if isinstance(each, ir.TensorBox)
    ]
    outputs = [lowering.empty_strided(_exprs(each.shape), _exprs(each.stride()), dtype=each.dtype, device=device)
               for each in others]  # fmt: skip
    choice = _template(kernel).generate(
        input_nodes=tuple([*inputs, *outputs]),
        layout=ir.FixedLayout(device, first.dtype, _exprs(first.shape), _exprs(first.stride())),
        mutated_inputs=outputs,
        subgraphs=[
            ir.ComputedBuffer(
                name="computed", layout=ir.FlexibleLayout(device, computed.dtype, computed.ranges), data=computed
            )
        ],
        call_sizes=[*_exprs(launch.grid), *_exprs(launch.sizes[name] for name in kernel.sizes)],
        num_stages=1,
        num_warps=launch.warps,
        **launch.constants,
    )
    result = _buffer_class()(choice, computed)
    boxes = (ir.TensorBox.create(result), *outputs)
    return boxes if isinstance(results, (tuple, list)) else boxes[0]


def _exprs(sizes: Any) -> list[Any]:
    """Sizes as Inductor has them."""
    import sympy

    return [size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size) for size in sizes]


@cache
def _template(kernel: TileKernel) -> Any:
    from torch._inductor.select_algorithm import SymbolicGridFn, TritonTemplate

    def grid(x: Any, y: Any, z: Any, *rest: Any) -> tuple[Any, Any, Any]:
        return x, y, z

    class Template(TritonTemplate):
        kernel_type = _kernel_class(kernel)

    return Template(kernel.places.removesuffix("_places"), SymbolicGridFn(grid), _source(kernel))


def _source(kernel: TileKernel) -> str:
    """The template: sizes, places, values, and what is stored."""
    module = importlib.import_module(kernel.module)
    names = {kernel.placed[0]: ROW, kernel.placed[1]: COLUMN}

    def called(function: str) -> str:
        arguments = (names.get(name, name) for name in getattr(module, function).arg_names)
        return f"{function}({', '.join(arguments)})"

    placed = ", ".join(names.get(name, name) for name in kernel.placed)
    pointers = ", ".join(f'"{name}"' for name in (*kernel.inputs, *kernel.outputs))
    lines = [
        f"{{{{def_kernel({pointers})}}}}",
        *(f'    {name} = {{{{size_called("{name}")}}}}' for name in kernel.sizes),
        f"    {placed} = {called(kernel.places)}",
        f'    {{{{computed("{kernel.placed[2]}")}}}}',
        f"    tmp_i, tmp_j, stored, is_stored = {called(kernel.store)}",
        f'    {{{{store_output(("tmp_i", "tmp_j"), "stored", "is_stored", val_shape={TILE})}}}}',
    ]
    return "\n".join(lines) + "\n"


@cache
def _kernel_class(described: TileKernel) -> type:
    from torch._inductor.select_algorithm import TritonTemplateKernel
    from torch._inductor.utils import sympy_index_symbol
    from torch._inductor.virtualized import V

    class Kernel(TritonTemplateKernel):
        """Prints the code that is computed."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.extra_template_env_fns += [self.size_called, self.computed]

        @classmethod
        def gen_common_triton_imports(cls) -> str:
            names = f"{described.places}, {described.store}"
            return f"{super().gen_common_triton_imports()}\nfrom {described.module} import {names}\n"

        def size_called(self, name: str) -> str:
            """A size, as text."""
            return self.kexpr(self.rename_indexing(self.call_sizes[3 + described.sizes.index(name)]))

        def computed(self, is_inside: str) -> str:
            """Lines that make ``x``."""
            (buffer,) = self.subgraphs
            with self.create_subgraph_body("computed"):
                handler = _handler_class()(self, is_inside)
                with V.set_ops_handler(handler):
                    _loop_body(buffer.data)([sympy_index_symbol(ROW), sympy_index_symbol(COLUMN)])
                self.codegen_body()
                self.body.writeline(f"x = ({handler.stored}){_rounding(buffer.data.dtype)}")
                self.body.writeline(f"x = tl.where({is_inside}, x, 0.0)")
                text = self.body.getvalue()
                self.cse.invalidate(set())
            return text.strip().replace("\n", "\n    ")

    return Kernel


def _rounding(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    return ".to(tl.float32)" if dtype == torch.float32 else f".to(tl.{name}).to(tl.float32)"


def _loop_body(computed: Any) -> Any:
    """The code as Inductor prints loops: a graph of operators."""
    from torch._inductor.loop_body import LoopBody
    from torch._inductor.utils import sympy_index_symbol
    from torch._inductor.virtualized import ops

    places = [sympy_index_symbol(f"p{dim}") for dim in range(len(computed.ranges))]

    def body(index: Any) -> None:
        ops.store("computed", places[0], computed.inner_fn(index))

    return LoopBody(body, (places,), dict(zip(places, computed.ranges, strict=True)), places, [])


@cache
def _handler_class() -> type:
    from torch._inductor.ops_handler import WrapperHandler
    from torch._inductor.utils import sympy_index_symbol, triton_type
    from torch._inductor.virtualized import V

    class Handler(WrapperHandler):
        """Loads a tile, where there is one; arithmetic is Inductor's."""

        def __init__(self, kernel: Any, is_inside: str) -> None:
            super().__init__(V.ops)
            self.kernel, self.is_inside, self.stored = kernel, is_inside, None

        def _made(self, line: str, dtype: torch.dtype, shape: tuple[str, ...]) -> Any:
            return self.kernel.cse.generate(self.kernel.compute, line, dtype=dtype, shape=shape)

        def _index(self, index: Any) -> str:
            return self.kernel.kexpr(self.kernel.rename_indexing(index))

        def load(self, name: str, index: Any) -> Any:
            pointer, dtype = self.kernel.args.input(name), V.graph.get_dtype(name)
            is_one = not any(symbol.name.startswith("tmp") for symbol in index.free_symbols)
            if is_one:
                line = f"tl.load({pointer} + ({self._index(index)}))"
            else:
                masks = [self.is_inside, *([str(self.kernel._load_mask)] if self.kernel._load_mask else [])]
                line = f"tl.load({pointer} + ({self._index(index)}), {' & '.join(masks)}, other=0)"
            if dtype in (torch.float16, torch.bfloat16):
                line, dtype = f"{line}.to(tl.float32)", torch.float32
            elif dtype == torch.bool:
                line = f"{line}.to(tl.int1)"
            return self._made(line, dtype, () if is_one else TILE)

        def index_expr(self, expr: Any, dtype: torch.dtype) -> Any:
            tile = f"tl.broadcast_to({self._index(expr)}, [{', '.join(TILE)}])"
            return self._made(f"{tile}.to({triton_type(dtype)})", dtype, TILE)

        def indirect_indexing(self, index: Any, size: Any, check: bool = True, wrap_neg: bool = True) -> Any:
            """Places from memory are as the model's own kernel would use them, wrapped where they count from the end."""
            if wrap_neg:
                index = self._made(
                    f"tl.where({index} < 0, {index} + {self._index(size)}, {index})", index.dtype, index.shape
                )
            return sympy_index_symbol(str(index))

        def check_bounds(self, *args: Any) -> None:
            """A place outside of a tensor is the model's own fault, as in any kernel without assertions."""

        def store(self, name: str, index: Any, value: Any, mode: Any = None) -> None:
            self.stored = value

    return Handler


@cache
def _buffer_class() -> type:
    from torch._inductor import dependencies, ir

    class Buffer(ir.TritonTemplateBuffer):
        """The result: it knows which elements of which buffers its code reads."""

        def __init__(self, choice: Any, computed: Any) -> None:
            super().__init__(choice.layout, choice.input_nodes, choice.make_kernel_render, choice.mutated_inputs)
            self.computed = computed
            self.allow_epilogue_fusion = self.allow_prologue_fusion = False

        def extract_read_writes(self, normalize: bool = False) -> Any:
            found = super().extract_read_writes(normalize)
            code = dependencies.extract_read_writes(
                lambda index, _: self.computed.inner_fn(index), self.computed.ranges, (), normalize=normalize
            )
            names = {read.name for read in code.reads}
            found.reads = type(found.reads)(read for read in found.reads if read.name not in names) | code.reads
            return found

    return Buffer
