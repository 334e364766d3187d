"""Explains what one rank of a simulated mesh runs: GEMMs, messages, saved bytes and least times.

    build(mesh) --traced as the first rank of a fake group--> forward, backward --> GEMMs, messages, saved bytes

Nothing is computed, so the model can have its real size. Parameters that are created and sharded on the meta device
only need the memory of one rank's shard.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fp8compile import ops
from fp8compile._compat import forget_meshes, fsdp_modules, local_itself
from fp8compile.nn.convertible.convertible_layers import is_converted, weight_names
from fp8compile.nn.parameter_uses.first_forward import suppress_warnings
from fp8compile.quantizers import GEMMS
from fp8compile.testing.explain.gemm_share import LOOKS_LIKE_PRODUCT, flop_formulas
from fp8compile.testing.explain.gpu_code import missing_gemm
from fp8compile.testing.explain.mesh_layers import CODE_DTYPES, layers_astray
from fp8compile.testing.explain.messages import Message, messages, seconds
from fp8compile.testing.explain.roofline import PEAKS, Peaks
from fp8compile.testing.gpu.gpus import GPUS
from fp8compile.testing.gpu.graphs import GpuGraph, gpu_graphs, kept_bytes
from fp8compile.testing.graphs.recording import node_value, op_name

__all__ = ["MeshExplanation", "Product", "explain_mesh", "pretended_mesh"]

FOUR_BITS = frozenset(op.name() for op in ops.FOUR_BIT_PRODUCTS)
NAMED = 3  # number of layers that a problem names


@dataclass(frozen=True, kw_only=True)
class Product:
    """A GEMM of one rank.

    Attributes:
        op: Name of the operator.
        fp8: Whether the GEMM multiplies codes.
        code_bits: Bits of each code.
        by_mx: Whether a GEMM for MX codes (a power-of-two scale per 32) multiplies the codes.
        flops: Number of floating-point operations.
        bytes: Bytes of the operands and the result.
        backward: Whether the GEMM is in the backward.
    """

    op: str
    fp8: bool
    flops: int
    bytes: int
    backward: bool
    code_bits: int = 8
    by_mx: bool = False

    def seconds(self, peaks: Peaks) -> float:
        """Least time in seconds that a GPU with these peaks needs for the GEMM."""
        peak = peaks.of_codes(self.code_bits, is_mx=self.by_mx) if self.fp8 else peaks.bf16
        return max(self.flops / peak, self.bytes / peaks.bandwidth)


@dataclass(frozen=True, kw_only=True)
class MeshExplanation:
    """What one rank of a mesh multiplies, sends and saves in a forward and a backward.

    Attributes:
        gpu: Name of the GPU that the graphs were traced for.
        mesh: Size of each mesh dim by its name.
        graphs: Number of graphs, forward and backward.
        products: The GEMMs.
        expected_fp8: Number of FP8 GEMMs that the recipes of converted layers ask for, if each layer is called once.
        astray: Converted layers whose FP8 GEMMs are not all in the graphs, a line each.
        messages: The messages between ranks.
        kept_bytes: Bytes that the forward saves for the backward, except the forward's arguments and results.
        parameter_bytes: Bytes of this rank's shard of the parameters.
        product_seconds: Least time of the GEMMs, one after another.
        message_seconds: Least time of the messages, one after another, without overlap.
        no_gemm: A layer that the GPU has no GEMM for, with the reason; empty if there is none.
    """

    gpu: str
    mesh: Mapping[str, int]
    graphs: int
    products: tuple[Product, ...]
    expected_fp8: int
    astray: tuple[str, ...]
    messages: tuple[Message, ...]
    kept_bytes: int
    parameter_bytes: int
    product_seconds: float
    message_seconds: float
    no_gemm: str

    @property
    def fp8_products(self) -> int:
        """Number of GEMMs that multiply codes."""
        return sum(each.fp8 for each in self.products)

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends to other ranks."""
        return sum(each.bytes for each in self.messages)

    @property
    def sent(self) -> dict[tuple[str, str, int], tuple[int, int]]:
        """Number of messages and sum of their bytes, by (operator, dtype, number of ranks)."""
        counts: Counter[tuple[str, str, int]] = Counter()
        sums: Counter[tuple[str, str, int]] = Counter()
        for each in self.messages:
            key = each.op, each.dtype, each.ranks
            counts[key] += 1
            sums[key] += each.bytes
        return {key: (counts[key], sums[key]) for key in counts}

    @property
    def problem(self) -> str:
        """Reason why the model does not run as its recipes say; empty if it does."""
        if self.no_gemm:
            return f"{self.gpu} has no GEMM for {self.no_gemm}"
        if not self.fp8_products:
            return "no GEMM runs in FP8"
        more = len(self.astray) - NAMED
        return "; ".join(self.astray[:NAMED]) + (f"; and {more} more layers" if more > 0 else "")


@contextmanager
def pretended_mesh(sizes: Mapping[str, int]) -> Iterator[DeviceMesh]:
    """Context that yields a CPU mesh on a fake process group; the other ranks do not exist.

    Args:
        sizes: Size of each mesh dim by its name, the outermost first.

    Raises:
        RuntimeError: This process is in a process group already.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "a mesh is simulated in one process, but a process group is already initialized in this process. Call "
            "torch.distributed.destroy_process_group() first, or use a new process."
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dims = tuple(sizes.values())
    dist.init_process_group("fake", rank=0, world_size=torch.Size(dims).numel(), store=FakeStore())
    try:
        yield init_device_mesh("cpu", dims, mesh_dim_names=tuple(sizes))
    finally:
        forget_meshes()
        dist.destroy_process_group()


def _bytes(value: Any) -> int:
    found: list[Tensor] = []
    fx.node.map_aggregate(value, lambda each: found.append(each) if isinstance(each, Tensor) else None)
    return sum(tensor.numel() * tensor.element_size() for tensor in found)


def _products(graph: GpuGraph, *, backward: bool) -> Iterator[Product]:
    formulas = flop_formulas()
    for node in graph.graph.graph.nodes:
        if node.op != "call_function":
            continue
        name = op_name(node.target)
        if name not in formulas:
            if LOOKS_LIKE_PRODUCT.search(name):
                raise ValueError(
                    f"{name} looks like a matrix product, but its FLOPs are unknown. Register a formula with "
                    "torch.utils.flop_counter.register_flop_formula."
                )
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), node_value)
        tensors = [each for each in args if isinstance(each, Tensor)]
        operands = tensors[:2]
        yield Product(
            op=name,
            fp8=all(each.dtype in CODE_DTYPES for each in operands),
            flops=int(formulas[name](*args, **kwargs, out_val=node_value(node))),
            bytes=_bytes(args) + _bytes(node_value(node)),
            backward=backward,
            code_bits=4 if name in FOUR_BITS else 8,
            by_mx=any(each.dtype == torch.float8_e8m0fnu for each in tensors[2:]),
        )


def _expected(model: nn.Module) -> int:
    found = 0
    for layer in model.modules():
        if is_converted(layer):
            found += len(weight_names(layer)) * sum(layer.recipe.quantizers(gemm) is not None for gemm in GEMMS)
    return found


def _check_has_no_hooks(model: nn.Module) -> None:
    """Raise a ValueError if FSDP2 shards the model, because FSDP2's hooks communicate outside of the graphs."""
    if sharded := fsdp_modules(model):
        raise ValueError(
            f"explain_mesh: fully_shard was called on {sharded[0]}, but FSDP2 communicates in hooks, which are not "
            "part of a graph. Shard with fp8compile.parallel.graph_fsdp, whose collectives are in the graph, or "
            "omit fully_shard. fp8compile.testing.sends lists what FSDP2 sends."
        )


def _local_bytes(model: nn.Module) -> int:
    return sum(local.numel() * local.element_size() for local in map(local_itself, model.parameters()))


@suppress_warnings()
def explain_mesh(
    build: Callable[[DeviceMesh], tuple[nn.Module, tuple[Any, ...]]], sizes: Mapping[str, int], *, gpu: str = "h200"
) -> MeshExplanation:
    """Trace a model as one rank of a mesh, and report what that rank multiplies, sends and saves.

    Args:
        build: Function of the mesh that returns the model, distributed over the mesh, and this rank's inputs. If
            inputs require grad, their gradients are traced too.
        sizes: Number of ranks of each mesh dim by its name, the outermost first.
        gpu: The GPU that the graphs are traced for and whose peaks give least times, a key of `PEAKS`.

    Returns:
        The counts. Least times are bounds by published peaks, not measurements.

    Raises:
        ValueError: There is no such GPU, a size is data-dependent, an operator isn't known, or FSDP2 shards the model.
        RuntimeError: This process is in a process group already.
    """
    if gpu not in PEAKS:
        raise ValueError(f"explain_mesh: `gpu` is {gpu!r}; it must be one of {', '.join(PEAKS)}.")
    peaks = PEAKS[gpu]
    with pretended_mesh(sizes) as mesh:
        model, args = build(mesh)
        _check_has_no_hooks(model)
        graphs = gpu_graphs(model, args, GPUS[gpu])
        products = [each for place, graph in enumerate(graphs) for each in _products(graph, backward=place > 0)]
        sent = [each for place, graph in enumerate(graphs) for each in messages(graph, backward=place > 0)]
        return MeshExplanation(
            gpu=peaks.name,
            mesh=dict(sizes),
            graphs=len(graphs),
            products=tuple(products),
            expected_fp8=_expected(model),
            astray=layers_astray(model, graphs),
            messages=tuple(sent),
            kept_bytes=kept_bytes(graphs[0]),
            parameter_bytes=_local_bytes(model),
            product_seconds=sum(each.seconds(peaks) for each in products),
            message_seconds=seconds(sent, peaks),
            no_gemm=missing_gemm(model, GPUS[gpu]),
        )
