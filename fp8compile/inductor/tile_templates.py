"""Inductor templates made from a `TileKernel`'s source, in which the kernel computes its own input.

Inductor's templates are not a public API; the parts used here are the same from PyTorch 2.11 to 2.15. This module
imports Inductor, so `fp8compile.inductor.prologue_fusion` imports it only when Inductor lowers an op.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import sympy
import torch
from torch._inductor import dependencies, ir, lowering
from torch._inductor.loop_body import LoopBody
from torch._inductor.ops_handler import WrapperHandler
from torch._inductor.select_algorithm import SymbolicGridFn, TritonTemplate, TritonTemplateKernel
from torch._inductor.utils import sympy_index_symbol, triton_type
from torch._inductor.virtualized import V, ops
from torch.utils._ordered_set import OrderedSet

from fp8compile._compat import statically_true
from fp8compile.inductor.tile_kernels import COUNTS, TileKernel, TileLaunch

__all__ = ["lower_computing"]

VALUES = re.compile(r"( +)x = values\(x_ptr, (\w+), (\w+), (\w+), stride_m, stride_k\)\n")
EACH = re.compile(r"^    # each matrix\n", re.MULTILINE)
WRITE = re.compile(r"( +)write\((\w+), (\w+), (\w+), (\w+), (\w+), \w+\)\n")
COUNTING = re.compile(rf"( +)if {COUNTS} is not None:\n(?:\1 +.*\n)+")
ROW, COLUMN = "tmp_row", "tmp_column"  # Inductor interprets the first letters of names; "tmp" is free to use


def lower_computing(launch: Callable[..., TileLaunch | None], x: Any, *args: Any) -> Any:
    """Lower an op to a kernel that also computes the op's matrix ``x``; None if Inductor should call the op.

    ``x`` may be a list of matrices of one shape. ``launch`` is the argument of `register_tile_kernel`.
    """
    fakes: Any = torch.fx.map_arg(list(V.graph.current_node.args), lambda node: node.meta["val"])
    fake_x, xs = (fakes[0][0], x) if isinstance(x, (list, tuple)) else (fakes[0], [x])
    if not statically_true(fake_x.numel() > 0):
        return None
    computed = [_computed(*each) for each in zip(xs, V.graph.current_node.all_input_nodes, strict=False)]
    found = launch(*fakes) if all(each is not None for each in computed) else None
    if found is None:
        return None
    is_stored = not found.kernel.writes or len(V.graph.current_node.all_input_nodes[0].users) > 1
    if is_stored and not isinstance(xs[0].data, ir.StorageBox):
        return None  # other readers would have to read what is stored through the view
    return _lower(found, list(xs), fake_x, computed, args)


# ---------------------------------------------------------------------------------- the code of the input


def _computed(x: Any, made: torch.fx.Node) -> Any:
    """Return the pointwise IR of ``x``, the result of node ``made``.

    None if it is no matrix on a GPU, has other IR, or is read by a node before the current one.
    """
    if x.get_device().type != "cuda" or len(x.get_size()) != 2:
        return None
    node = V.graph.current_node
    if any(user < node for user in made.users):
        return None
    return _code(x)


def _code(x: Any) -> Any:
    """Return the pointwise IR of a tensor, or of the tensor that it views; None for other IR."""
    view: Any = x.data if isinstance(x, ir.TensorBox) else x
    if isinstance(view, ir.StorageBox):
        data = view.data
        if isinstance(data, ir.ComputedBuffer) and not _is_changed(data):
            data = data.data  # Inductor stores long code; once the kernel computes it, nobody reads it: it is dropped
        return data if type(data) is ir.Pointwise else None
    if type(view) not in (ir.View, ir.DtypeView) or (of := _code(view.data)) is None:
        return None
    if type(view) is ir.View:
        reindex = view.make_reindexer()
        return _pointwise(view, lambda index: of.inner_fn(reindex(index)))
    return _pointwise(view, lambda index: ops.to_dtype_bitcast(of.inner_fn(index), view.get_dtype(), of.dtype))


def _pointwise(like: Any, inner: Callable[..., Any]) -> Any:
    return ir.Pointwise(device=like.get_device(), dtype=like.get_dtype(), inner_fn=inner, ranges=like.get_size())


def _is_changed(buffer: Any) -> bool:
    """Whether a buffer, or an input of its pointwise code, was written to after the code was made."""
    return any(name in V.graph.mutated_buffers for name in (buffer.get_name(), *buffer.get_read_names()))


# ---------------------------------------------------------------------------------- the template


def _lower(launch: TileLaunch, xs: list[Any], fake_x: torch.Tensor, computed: list[Any], args: tuple[Any, ...]) -> Any:
    device, kernel, node = computed[0].get_device(), launch.kernel, V.graph.current_node
    results = node.meta["val"] if isinstance(node.meta["val"], (tuple, list)) else (node.meta["val"],)
    first, *others = results if kernel.writes else (fake_x.contiguous(), *results)
    writes_beside = kernel.writes and len(node.all_input_nodes[0].users) > 1
    inputs = [ir.ExternKernel.require_contiguous(each) for each in args if isinstance(each, ir.TensorBox)]
    template = _template(kernel, writes_beside, tuple(each.left_out for each in launch.matrices))
    outputs = [
        _allocated(each, device, zero=name in kernel.added_to)
        for name, each in zip(template.outputs, others, strict=True)
    ]
    values = [_allocated(fake_x.contiguous(), device)] if writes_beside else []
    codes = [
        ir.ComputedBuffer(name="computed", layout=ir.FlexibleLayout(device, each.dtype, each.ranges), data=each)
        for each in computed
    ]
    for name in (name for code in codes for name in code.get_read_names()):
        buffer = V.graph.name_to_buffer.get(name)  # None for graph inputs, which have layouts already
        if buffer is not None:
            buffer.decide_layout()  # needed now, because the template is printed now
    of_matrices = {
        f"{name}_{number}": value
        for number, each in enumerate(launch.matrices)
        for name, value in each.constants.items()
    }
    choice = template.generate(
        input_nodes=(*inputs, *outputs, *values),
        layout=ir.FixedLayout(device, first.dtype, _exprs(first.shape), _exprs(first.stride())),
        mutated_inputs=[*outputs, *values],
        subgraphs=codes,
        call_sizes=[*_exprs(launch.grid), *_exprs(launch.sizes[name] for name in kernel.sizes)],
        num_stages=1,
        num_warps=launch.warps,
        **launch.constants,
        **of_matrices,
    )
    result: Any = ir.TensorBox.create(_Computing(choice, computed))
    for written in values:
        written.data.data.data._post_init_setattr("origin_node", node.args[0])
    for written in values if kernel.writes else [result]:
        xs[0].data.data = written.data.data  # later readers of x read this buffer
    found = (result, *outputs) if kernel.writes else tuple(outputs)
    return type(node.meta["val"])(found) if isinstance(node.meta["val"], (tuple, list)) else found[0]


def _allocated(like: torch.Tensor, device: torch.device, *, zero: bool = False) -> Any:
    place = {"dtype": like.dtype, "device": device}
    if not zero:
        return lowering.empty_strided(_exprs(like.shape), _exprs(like.stride()), **place)
    zeros = lowering.full(_exprs(like.shape), 0, **place)
    zeros.realize()
    return zeros


def _exprs(sizes: Any) -> list[Any]:
    return [size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size) for size in sizes]


@cache
def _template(kernel: TileKernel, writes_values: bool, matrices: tuple[tuple[str, ...], ...]) -> Any:
    """Make the template of a kernel; ``matrices`` has the output pointers that each matrix lacks (``left_out``)."""

    def grid(x: Any, y: Any, z: Any, *rest: Any) -> tuple[Any, Any, Any]:
        return x, y, z

    class Template(TritonTemplate):
        kernel_type = type("Kernel", (_Kernel,), {"described": kernel, "writes_values": writes_values})
        outputs = _outputs(kernel, matrices)

    name = kernel.function.__name__ + "_counted" * (COUNTS in kernel.outputs) + "_and_values" * writes_values
    if matrices:
        kinds = ("columns" if left_out else "both" for left_out in matrices)
        name = "_".join((name, "of", *kinds))
    return Template(name, SymbolicGridFn(grid), _source(kernel, writes_values, matrices))


def _first_output(kernel: TileKernel) -> str:
    return WRITE.search(inspect.getsource(kernel.function.fn)).group(2)  # type: ignore[union-attr]


def _outputs(kernel: TileKernel, matrices: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
    if not matrices:
        return kernel.outputs
    every = (_first_output(kernel), *kernel.outputs)
    return tuple(
        f"{name}_{number}"
        for number, left_out in enumerate(matrices)
        for name in every[number == 0 :]
        if name not in left_out
    )


def _source(kernel: TileKernel, writes_values: bool, matrices: tuple[tuple[str, ...], ...]) -> str:
    """Return the template's source: the kernel's source, with the lines of `values` and `write` replaced.

    Lines behind the comment "each matrix" are repeated for each matrix. Each repetition loads its inputs again,
    because registers can't hold a tile of each matrix at once.
    """
    body = _body(kernel)
    pointers = (*kernel.inputs, *_outputs(kernel, matrices), *(["values_ptr"] if writes_values else []))
    named = ", ".join(f'"{name}"' for name in pointers)
    sizes = "".join(f'    {name} = {{{{size_called("{name}")}}}}\n' for name in kernel.sizes)
    if matrices:
        at = EACH.search(body).start()  # type: ignore[union-attr]
        own = (_first_output(kernel), *kernel.outputs, *kernel.of_matrix)
        parts = [
            re.sub(rf"\b({'|'.join(own)})\b", rf"\1_{number}", _filled(body[at:], kernel, number))
            for number in range(len(matrices))
        ]
        body = body[:at] + "\n".join(parts)
    else:
        body = _filled(body, kernel)
    return f"{{{{def_kernel({named})}}}}\n{sizes}{body}\n"


def _filled(body: str, kernel: TileKernel, number: int = 0) -> str:
    """Replace the call of `values` in a kernel's lines by template code that computes matrix ``number``.

    The line of `write` becomes a ``store_output`` for matrix 0, and is unchanged for other matrices.
    """

    def stored(indent: str, i: str, j: str, values: str, is_stored: str) -> str:
        store = f'store_output(("tmp_i", "tmp_j"), "{values}", "{is_stored}", {len(indent)}, {kernel.tile})'
        return f"{indent}tmp_i, tmp_j = {i}, {j}\n{indent}{{{{{store}}}}}\n"

    def computed(line: re.Match[str]) -> str:
        indent, m, k, is_inside = line.groups()
        call = f'computed({number}, "{is_inside}", {len(indent)})'
        made = f"{indent}{ROW}, {COLUMN} = {m}, {k}\n{indent}{{{{{call}}}}}\n"
        return made if kernel.writes else made + stored(indent, m, k, "x", is_inside)

    def written(line: re.Match[str]) -> str:
        indent, _, *others = line.groups()
        return stored(indent, *others) if number == 0 else line.group()

    body, values_found = VALUES.subn(computed, body)
    body, writes_found = WRITE.subn(written, body)
    counts = values_found, writes_found
    assert counts == (1, int(kernel.writes)), f"{kernel.function}: {values_found} values, {writes_found} writes"
    return body


def _body(kernel: TileKernel) -> str:
    """Return the text of a kernel's body, without the code that counts if the kernel has no output for counts."""
    source = inspect.cleandoc("\n" + inspect.getsource(kernel.function.fn))
    _, body = re.split(r"\):.*\n(?=    )", source, maxsplit=1)
    return body if COUNTS in kernel.outputs else COUNTING.sub("", f"{body}\n").rstrip("\n")


def _imports(kernel: TileKernel) -> str:
    """Return import statements for the functions that a kernel's source calls, as text of the template."""
    function, body = kernel.function.fn, _body(kernel)
    known = [name for name in function.__code__.co_names if name in function.__globals__ and name != "tl"]
    names = [name for name in known if re.search(rf"\b{name}\b", body)]
    return f"from {function.__module__} import {', '.join(names)}\n"


class _Kernel(TritonTemplateKernel):
    """Kernel of a template, which can call `size_called` and `computed` to print sizes and the input's code."""

    described: TileKernel
    writes_values: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.extra_template_env_fns += [self.size_called, self.computed]

    @classmethod
    def gen_common_triton_imports(cls) -> str:  # type: ignore[override]  # PyTorch's is cached
        return f"{super().gen_common_triton_imports()}\n{_imports(cls.described)}"

    def size_called(self, name: str) -> str:
        return self.kexpr(self.rename_indexing(self.call_sizes[3 + self.described.sizes.index(name)]))

    def computed(self, number: int, is_inside: str, indent: int) -> str:
        """Return the lines of code that compute the elements of matrix ``number``."""
        subgraphs: Any = self.subgraphs
        buffer = subgraphs[number]
        with self.create_subgraph_body(f"computed_{number}"):
            handler = _Loads(self, is_inside)
            with V.set_ops_handler(handler):
                _loop_body(buffer.data)([sympy_index_symbol(ROW), sympy_index_symbol(COLUMN)])
            self.codegen_body()
            self.body.writeline(f"x = ({handler.stored}){_rounding(buffer.data.dtype)}")
            self.body.writeline(f"x = tl.where({is_inside}, x, 0.0)")
            if self.writes_values:
                width = self.kexpr(self.rename_indexing(buffer.data.ranges[1]))
                self.body.writeline(f"tl.store(values_ptr + {ROW} * {width} + {COLUMN}, x, {is_inside})")
            text = self.body.getvalue()
            self.cse.invalidate(OrderedSet())
        return text.strip().replace("\n", "\n" + " " * indent)


def _rounding(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    return ".to(tl.float32)" if dtype == torch.float32 else f".to(tl.{name}).to(tl.float32)"


def _loop_body(computed: Any) -> Any:
    """Wrap pointwise IR in a `LoopBody`, the graph of operators from which Inductor prints loops."""
    places = [sympy_index_symbol(f"p{dim}") for dim in range(len(computed.ranges))]

    def body(index: Any) -> None:
        ops.store("computed", places[0], computed.inner_fn(index))

    return LoopBody(body, (places,), dict(zip(places, computed.ranges, strict=True)), places, [])


class _Loads(WrapperHandler):
    """Ops handler that prints loads as loads of tiles with the kernel's mask; Inductor's handler prints the rest."""

    def __init__(self, kernel: _Kernel, is_inside: str) -> None:
        super().__init__(V.ops)
        self.kernel, self.is_inside, self.tile, self.stored = kernel, is_inside, kernel.described.tile, None

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
        return self._made(line, dtype, () if is_one else self.tile)

    def index_expr(self, expr: Any, dtype: torch.dtype) -> Any:
        tile = f"tl.broadcast_to({self._index(expr)}, [{', '.join(self.tile)}])"
        return self._made(f"{tile}.to({triton_type(dtype)})", dtype, self.tile)

    def indirect_indexing(self, index: Any, size: Any, check: bool = True, wrap_neg: bool = True) -> Any:
        """Turn a loaded index into a SymPy symbol; with ``wrap_neg``, first add ``size`` to negative indices."""
        if wrap_neg:
            index = self._made(
                f"tl.where({index} < 0, {index} + {self._index(size)}, {index})", index.dtype, index.shape
            )
        return sympy_index_symbol(str(index))

    def check_bounds(self, *args: Any) -> None:
        """Emit no check: like other kernels without assertions, this kernel trusts the model's indices."""

    def store(self, name: str, index: Any, value: Any, mode: Any = None) -> None:
        self.stored = value


class _Computing(ir.TritonTemplateBuffer):
    """Buffer of the template's result, which also reports the buffers that the fused code reads."""

    def __init__(self, choice: Any, computed: list[Any]) -> None:
        super().__init__(choice.layout, choice.input_nodes, choice.make_kernel_render, choice.mutated_inputs)
        self.computed = computed
        self.allow_epilogue_fusion = self.allow_prologue_fusion = False

    def extract_read_writes(self, normalize: bool = False) -> Any:
        found = super().extract_read_writes(normalize)
        for each in self.computed:
            code = dependencies.extract_read_writes(
                lambda index, _, each=each: each.inner_fn(index), each.ranges, (), normalize=normalize
            )
            names = {read.name for read in code.reads}
            found.reads = type(found.reads)(read for read in found.reads if read.name not in names) | code.reads
        return found
