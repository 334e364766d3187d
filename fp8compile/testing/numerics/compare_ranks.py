"""compare_ranks: finds the first GEMM and operand that differ between ranks and one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor, nn

from fp8compile.layout.quantized import Plain
from fp8compile.nn.convertible.convertible_layers import is_converted
from fp8compile.ops.layer import output_and_gradients as layer_products
from fp8compile.ops.layer.operands import GRAD_WEIGHT, Operands
from fp8compile.ops.layer.output_and_gradients import multiply_parts
from fp8compile.ops.layer.sharded_gemm import Product
from fp8compile.quantizers import Gemm
from fp8compile.testing.bits import difference
from fp8compile.testing.numerics.decibels import sqnr
from fp8compile.testing.numerics.model_calls import Loss, check_eager, loss_of, run_aside
from fp8compile.testing.numerics.module_calls import first_tensor
from fp8compile.testing.numerics.rank_findings import RankComparison, RankFinding, merged
from fp8compile.testing.numerics.whole_products import differences, is_shared, whole

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["compare_ranks"]

# A sum over ranks rounds its terms, so codes of what follows move to their neighbours: noise of FP8's own size, 25 to
# 29 dB, or 15 dB in four bits. Less is no rounding.
ROUNDING = 10.0

Key = tuple[str, str, int]  # layer, product, number of its call


class _Watch:
    """Records or compares the operands of each GEMM of a model's FP8 layers while the model runs.

    With ``reference`` None, operands are recorded; else they are compared with the operands in it.
    """

    def __init__(self, model: nn.Module, reference: dict[Key, tuple[Tensor, Tensor]] | None) -> None:
        self._model, self._reference = model, reference
        self._inside: list[str] = []
        self._in_backward = "unknown"
        self._counts: dict[tuple[str, str], int] = {}
        self.values: dict[Key, tuple[Tensor, Tensor]] = {}
        self.findings: list[RankFinding] = []
        self.products = 0

    @contextmanager
    def looking(self) -> Iterator[None]:
        from fp8compile.parallel import dtensor_layer

        handles = []
        for name, module in self._model.named_modules():
            if is_converted(module):
                handles.append(module.register_forward_pre_hook(self._enter(name)))
                handles.append(module.register_forward_hook(self._leave(name)))
        with ExitStack() as stack:
            for owner in (layer_products, dtensor_layer):
                stack.enter_context(mock.patch.object(owner, "multiply_parts", self._multiply))
            try:
                yield
            finally:
                for handle in handles:
                    handle.remove()

    def _enter(self, name: str) -> Callable[..., None]:
        return lambda *_: self._inside.append(name)

    def _leave(self, name: str) -> Callable[..., None]:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._inside.pop()
            result = first_tensor(output)
            if result is not None and result.requires_grad:
                result.register_hook(lambda _: setattr(self, "_in_backward", name))

        return leave

    def _key(self, gemm: Gemm) -> Key:
        layer = self._inside[-1] if self._inside else self._in_backward
        number = self._counts.get((layer, gemm.name), 0)
        self._counts[layer, gemm.name] = number + 1
        return layer, gemm.name, number

    def _multiply(self, gemm: Gemm, a: Plain, b: Plain, operands: Operands, bias: Plain | None = None) -> Product:
        product, key = multiply_parts(gemm, a, b, operands, bias), self._key(gemm)
        if self._reference is None:
            self.values[key] = a.local.detach().clone(), b.local.detach().clone()
            return product
        self._arrived(key, gemm, a, b, operands)
        if is_shared(a, b, operands):
            for operand, what, words in differences(gemm, a, b, operands, bias, product, multiply_parts):
                self._found(key, operand, what, words)
        self.products += 1
        return product

    def _found(self, key: Key, operand: str, what: str, words: str) -> None:
        self.findings.append(
            RankFinding(order=self.products, layer=key[0], op=key[1], operand=operand, what=what, detail=words)
        )

    def _arrived(self, key: Key, gemm: Gemm, a: Plain, b: Plain, operands: Operands) -> None:
        assert self._reference is not None
        wholes = whole(a, gemm.a, operands).local, whole(b, gemm.b, operands).local
        if key not in self._reference:
            self._found(key, gemm.a, "values", "a single process computes no such GEMM")
            return
        for role, mine, expected in zip((gemm.a, gemm.b), wholes, self._reference[key], strict=True):
            if mine.shape != expected.shape and mine.numel() == expected.numel():
                mine = mine.view(expected.shape)  # tokens are flattened where no rank cuts them
            is_weight = role == gemm.b and gemm is not GRAD_WEIGHT
            if mine.shape != expected.shape and (not is_weight or mine.ndim == 3):
                continue  # a part of the batch on each rank, or some of the experts
            words = difference(mine, expected)
            if words is None:
                continue
            ratio = sqnr(mine, expected) if mine.shape == expected.shape else -ROUNDING
            if is_weight or not ratio >= ROUNDING:
                shown = "" if is_weight else f", {ratio:.1f} dB"
                self._found(key, role, "values", f"{words}{shown}")


def _run(built: Any, loss: Loss | None, watch: _Watch) -> None:
    model, args, *rest = built
    args = (args,) if isinstance(args, Tensor) else tuple(args)
    kwargs = rest[0] if rest else {}
    with run_aside(model, (args, kwargs), seed=0), watch.looking():
        loss_of("compare_ranks", model(*args, **kwargs), loss).backward()


def _built(build: Callable[[Any], Any], mesh: Any) -> Any:
    built = build(mesh)
    if not isinstance(built, tuple) or len(built) not in (2, 3):
        raise TypeError(
            f"compare_ranks: build({'mesh' if mesh is not None else None}) returned a {type(built).__name__}; it "
            "must return (model, args) or (model, args, kwargs)."
        )
    check_eager("compare_ranks", built[0])
    return built


def _gathered_from(mesh: DeviceMesh, own: tuple[int, list[RankFinding]]) -> list[tuple[int, list[RankFinding]]]:
    every: list[Any] = [own]
    for index in range(mesh.ndim):
        group = mesh.get_group(index)
        lists: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(lists, every, group)
        every = [each for part in lists for each in part]
    return sorted(every, key=lambda each: each[0])


def compare_ranks(build: Callable[[Any], Any], mesh: DeviceMesh, *, loss: Loss | None = None) -> RankComparison:
    """Find the first GEMM and operand of an FP8 layer where ranks differ from a single process.

    All ranks of the mesh must call this. Each rank first runs ``build(None)``, the model in a single process, and then
    ``build(mesh)``, the same model distributed over the ranks. At each GEMM of a layer, forward and backward, ranks
    gather their shards and compare:

    - the values of operands with those in a single process: weights bitwise, other operands up to rounding;
    - scales and quantized values with a quantization of the gathered operand: bitwise;
    - the result with a GEMM of the gathered operands: up to the rounding of sums.

    A scale computed from only one rank's shard, a missing reduction or a wrong weight is therefore reported with its
    layer, GEMM and operand, but rounding differences are not. With data parallelism, a rank's part of the batch is not
    compared with the full batch. Rows dispatched to experts, operands that are already quantized, and the state that
    delayed scaling writes for later steps are not compared either.

    Args:
        build: A function of the mesh, or of None for a single process, that returns (model, args) or (model, args,
            kwargs) with the same parameters and data on each call. The model is converted and not compiled.
        mesh: The mesh.
        loss: Function of the output that returns the scalar to differentiate, as in `advise`.

    Returns:
        The findings of all ranks, the same on each.

    Raises:
        TypeError: ``build`` returns something else, or the model is compiled or does not return a loss.
        ValueError: The model on one process has no FP8 layer.
    """
    built = _built(build, None)
    alone = _Watch(built[0], None)
    _run(built, loss, alone)
    if not alone.values:
        raise ValueError("compare_ranks: build(None) returned a model without FP8 layers. Convert it in build.")
    built = _built(build, mesh)
    watch = _Watch(built[0], alone.values)
    _run(built, loss, watch)
    rank = dist.get_rank()
    return RankComparison(
        ranks=mesh.size(), products=watch.products, findings=merged(_gathered_from(mesh, (rank, watch.findings)))
    )
