"""Contracts of an operator, one function each; an op that fulfills all works like a built-in op.

Each contract runs on the op's own samples, so it checks only the cases that samples cover.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from functools import partial, wraps
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_map_only

from fp8compile._compat import is_unbacked
from fp8compile.ops.registry import OPS, Op
from fp8compile.quantizers.constant import Constant
from fp8compile.testing.bits import difference, results, sum_difference
from fp8compile.testing.contracts.contract import BrokenContract, check_contracts, compiled_afresh, looked_at, shown
from fp8compile.testing.contracts.derivative_contracts import (
    backward_is_the_derivative,
    backward_is_there_or_raises,
    differentiable,
    gradients_of,
)
from fp8compile.testing.contracts.fresh_process import fresh_texts
from fp8compile.testing.contracts.op_samples import (
    all_samples,
    filled,
    samples_on,
    some_samples,
    tensors_of,
    without_nan,
)
from fp8compile.testing.contracts.run_on_shards import check_shards, splits_of
from fp8compile.testing.graphs.recording import BACKENDS

__all__ = ["check_op"]

SAME_ARITHMETIC = (
    "make decompose compute what impl computes, on fp8compile.library.rounded(x) for each floating point argument "
    "(Inductor omits the rounding of a fused bfloat16 value)"
)


def _call_all(call: Callable[..., Any], samples: list[tuple[Any, ...]]) -> list[tuple[Tensor, ...]]:
    return [results(call(*args)) for args in samples]


def _compare(
    got: list[tuple[Any, ...]],
    expected: list[tuple[Any, ...]],
    samples: list[tuple[Any, ...]],
    what: str,
    mend: str,
    differ: Callable[[Tensor, Tensor], str | None] = difference,
) -> None:
    for args, left, right in zip(samples, got, expected, strict=True):
        if len(left) != len(right):
            raise BrokenContract(
                expected=f"{what}: {len(right)} results for ({shown(args)})", found=str(len(left)), mend=mend
            )
        for index, (a, b) in enumerate(zip(left, right, strict=True)):
            if (differs := differ(a, b)) is not None:
                raise BrokenContract(
                    expected=f"{what}, for ({shown(args)})", found=f"result {index}: {differs}", mend=mend
                )


# ---------------------------------------------------------------------------------- eager


def samples_cover_it(op: Op, device: torch.device) -> None:
    """The op has samples; at least one tensor is empty, and at least one is not contiguous."""
    samples = samples_on(op, device)
    tensors = [tensor for args in samples for tensor in tensors_of(args)]
    for what, holds in {
        "a tensor": bool(tensors),
        "an empty tensor": any(not tensor.numel() for tensor in tensors),
        "a tensor that is not contiguous": any(not tensor.is_contiguous() for tensor in tensors),
    }.items():
        if not holds:
            raise BrokenContract(
                expected=f"{what} among the samples",
                found=f"none in {len(samples)} samples",
                mend="return one from samples: shapes with a size 0, one of .t(), each dtype and option",
            )


def results_are_new(op: Op, device: torch.device) -> None:
    """Results share no memory with arguments, and arguments stay unchanged."""
    for args in looked_at(samples_on(op, device)):
        before = [tensor.clone() for tensor in tensors_of(args)]
        given = {tensor.untyped_storage().data_ptr() for tensor in tensors_of(args) if tensor.numel()}
        for index, result in enumerate(results(op.overload(*args))):
            if result.numel() and result.untyped_storage().data_ptr() in given:
                raise BrokenContract(
                    expected=f"new tensors for ({shown(args)})",
                    found=f"result {index} shares memory with an argument",
                    mend="return .clone() or a new result: compilers assume that the results of an op are new tensors",
                )
        for tensor, old in zip(tensors_of(args), before, strict=True):
            if (differs := difference(tensor, old)) is not None:
                raise BrokenContract(
                    expected=f"unchanged arguments ({shown(args)})",
                    found=differs,
                    mend="do not call in-place methods (ending in _) on an argument",
                )


def fake_is_like_the_result(op: Op, device: torch.device) -> None:
    """On fake tensors the op returns the shapes, dtypes, strides and devices of the real results."""
    for args in looked_at(samples_on(op, device)):
        real = results(op.overload(*args))
        mode = FakeTensorMode(shape_env=ShapeEnv())
        with mode:
            given = tree_map_only(Tensor, partial(mode.from_tensor, static_shapes=True), args)
            fakes = results(op.overload(*given))
        mend = "make fake return new_empty tensors like the results of impl" + (
            "; it was derived from impl (fake=None), so write one" if op.fake is op.impl else ""
        )
        if len(fakes) != len(real):
            raise BrokenContract(expected=f"{len(real)} results of fake", found=str(len(fakes)), mend=mend)
        for index, (fake, result) in enumerate(zip(fakes, real, strict=True)):
            for aspect in ("shape", "dtype", "device", "strides"):
                expected, found = _aspect(result, aspect, fake), _aspect(fake, aspect, fake)
                if expected != found:
                    raise BrokenContract(
                        expected=f"fake gives result {index} {aspect} {expected}, for ({shown(args)})",
                        found=str(found),
                        mend=mend,
                    )


def _aspect(tensor: Tensor, aspect: str, fake: Tensor) -> Any:
    """Return a tensor's "shape", "dtype", "device" or "strides", without sizes that depend on data.

    Such sizes are symbolic in the op's fake result ``fake``.
    """
    known = [not is_unbacked(size) for size in fake.shape]
    if aspect == "shape" and len(known) == tensor.ndim:
        return tuple(size if is_known else "data" for size, is_known in zip(tensor.shape, known, strict=True))
    if aspect != "strides":
        return getattr(tensor, aspect)
    # the stride of a dim of size 1, and strides of an empty tensor, mean nothing
    dims = zip(tensor.stride(), fake.shape, known, strict=True)
    return tuple(s for s, size, is_known in dims if is_known and size > 1 and (not all(known) or fake.numel()))


def decompose_is_the_kernel(op: Op, device: torch.device) -> None:
    """In eager mode, ``op.decompose`` is bitwise equal to ``op.impl``, unless it returns NotImplemented."""
    if op.decompose is not None:
        samples = samples_on(op, device)
        samples += filled(op, samples)
        with torch.no_grad():
            samples = [args for args in samples if op.decompose(*args) is not NotImplemented]
            got, expected = _call_all(op.decompose, samples), _call_all(op.overload, samples)
        _compare(got, expected, samples, "decompose returns the bits of impl in eager mode", SAME_ARITHMETIC)


def passes_opcheck(op: Op, device: torch.device) -> None:
    """PyTorch's own checks of operators (opcheck) pass."""
    checks: list[tuple[tuple[Any, ...], tuple[str, ...]]] = [
        (args, ("test_schema", "test_autograd_registration", "test_faketensor")) for args in samples_on(op, device)
    ]
    # this check compares a NaN with itself and finds them unequal
    checks += [(without_nan(args), ("test_aot_dispatch_dynamic",)) for args in some_samples(op, device)]
    for args, names in checks:
        try:
            torch.library.opcheck(op.overload, args, test_utils=names)
        except Exception as error:
            raise BrokenContract(
                expected=f"torch.library.opcheck passes for ({shown(args)})",
                found=f"{type(error).__name__}: {error}",
                mend="see PyTorch's message: a mutation, a fake that differs, or a derivative that is traced "
                "differently",
            ) from error


# ---------------------------------------------------------------------------------- compiled


def compiled_gives_the_bits_of_eager(op: Op, device: torch.device) -> None:
    """The op compiles without a graph break, by AOTAutograd and by Inductor, bitwise equal to eager mode."""
    samples = some_samples(op, device)
    for backend in BACKENDS:
        got = compiled_afresh(_call_all, backend=backend, dynamic=False)(op.overload, samples)
        _compare(got, _call_all(op.overload, samples), samples, f"the bits of impl, with {backend}", SAME_ARITHMETIC)


def compiled_backward_gives_the_bits_of_eager(op: Op, device: torch.device) -> None:
    """Compiled gradients are bitwise equal to eager mode, up to sums that Inductor reorders."""
    if op.backward is None:
        return
    samples = [args for args in some_samples(op, device) if all(tensor.numel() for tensor in tensors_of(args))][:3]
    for backend in BACKENDS:
        for args in looked_at(samples):
            given, leaves = differentiable(op, args)
            got = gradients_of(op, compiled_afresh(op.overload, backend=backend, dynamic=False), given, leaves)
            expected = gradients_of(op, op.overload, given, leaves)
            differ = sum_difference if backend == "inductor" else difference
            _compare(
                [got], [expected], [args], f"the gradients of eager mode, with {backend}", SAME_ARITHMETIC, differ
            )


def equal_arguments_run_the_same_graph(op: Op, device: torch.device) -> None:
    """Calls with equal constants (quantizers, recipes) and the same tensors compile one graph."""
    from torch._dynamo.utils import counters

    compiled = compiled_afresh(op.overload, backend="aot_eager", dynamic=False)
    for args in some_samples(op, device)[:3]:
        counts = []
        for _ in range(3):
            compiled(*(copy.deepcopy(arg) if isinstance(arg, Constant) else arg for arg in args))
            counts.append(counters["stats"]["unique_graphs"])
        if any(after != before for before, after in pairwise(counts)):
            raise BrokenContract(
                expected=f"one graph for ({shown(args)}), called three times",
                found=f"{counts[-1] - counts[0]} more",
                mend="run check_quantizer on the constants among its arguments: two equal ones compare as different",
            )


def _package(module: str) -> str:
    return module.partition(".")[0]


def cache_key_follows_its_source(op: Op, device: torch.device) -> None:
    """After an edit to the op's source, the compile cache has another key.

    The key is made from the graph, in which a quantizer or recipe is a text with a hash of source code.
    """
    if op.decompose is None and op.backward is None:
        return  # compiled code contains only a call of the op, and none of its code
    constants = [arg for args in all_samples(op) for arg in args if isinstance(arg, Constant)]
    module = sys.modules.get(op.impl.__module__)
    if not constants or module is None or not getattr(module, "__file__", None) or module.__name__ == "__main__":
        raise BrokenContract(
            expected="samples with a quantizer or recipe, and an implementation that another process can import",
            found=f"{len(constants)} constants, module {op.impl.__module__!r}",
            mend="define impl in a module of a package, and give it a quantizer or a recipe",
        )
    # prefer a constant of another package, whose text does not depend on the op's package anyway
    constant = min(constants, key=lambda c: _package(type(c).__module__) == _package(module.__name__))
    as_it_is, _, edited = fresh_texts(constant, module)
    if as_it_is.error is not None or edited.error is not None or as_it_is.text == edited.text:
        raise BrokenContract(
            expected=f"a different text of {constant!r} in a graph after {module.__file__} was edited",
            found=as_it_is.error or edited.error or "the same text, so a compile cache would run the old code",
            mend="register the op in the package that contains what impl calls",
        )


# ---------------------------------------------------------------------------------- sharded


def sharded_gives_the_bits_of_whole(op: Op, device: torch.device) -> None:
    """Shards, cut by the op's sharding rule, give the whole result: bitwise, or up to reordered sums."""
    if op.sharding is None:
        return
    ran = 0
    for args in looked_at(samples_on(op, device)):
        found = check_shards(op, args)
        if found.wrong is not None:
            raise BrokenContract(
                expected="the concatenated results of the op on shards equal the op on the full tensor",
                found=found.wrong,
                mend="remove this Split, or fix its cuts (unit: the elements that share a block) and outputs",
            )
        ran += found.ran
    if not ran:
        first = all_samples(op)[0]
        raise BrokenContract(
            expected="a Split for at least one of the samples",
            found=f"none in {len(all_samples(op))} samples; for the first the rule returns {splits_of(op, first)}",
            mend="pass sharding=None if the op can't be sharded, or samples that can",
        )


CONTRACTS = (
    samples_cover_it,
    results_are_new,
    fake_is_like_the_result,
    decompose_is_the_kernel,
    passes_opcheck,
    backward_is_there_or_raises,
    backward_is_the_derivative,
    compiled_gives_the_bits_of_eager,
    compiled_backward_gives_the_bits_of_eager,
    equal_arguments_run_the_same_graph,
    cache_key_follows_its_source,
    sharded_gives_the_bits_of_whole,
)


def _registered(op: object) -> Op:
    if isinstance(op, Op):
        return op
    name = op if isinstance(op, str) else getattr(op, "_schema", None) and op._schema.name  # type: ignore[attr-defined]
    if name in OPS:
        return OPS[name]
    raise TypeError(
        f"check_op: `op` is {op!r}; it must be the result of fp8compile.library.register_op, or a name. Registered "
        f"are {', '.join(sorted(OPS))}."
    )


def _with_reference(contract: Callable[..., Any], reference: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(contract)
    def with_reference(op: Op, device: torch.device) -> None:
        contract(op, device, reference)

    return with_reference


def check_op(
    op: Op | torch._ops.OpOverload | str,
    *,
    gradient: Callable[..., Any] | None = None,
    device: torch.device | str = "cpu",
    skip: Sequence[str] = (),
) -> dict[str, str]:
    """Check, on an operator's own samples, that it works wherever a built-in operator does.

    Prints each contract that holds. This takes about ten seconds, because it compiles and starts processes. All
    previously compiled graphs are dropped.

    The op's derivative is compared with autograd's derivative of ``impl`` or of ``decompose``, to half of the digits.
    If autograd can differentiate neither function, the derivative is compared with finite differences of ``impl`` in
    float64. An op that quantizes is not smooth, so it needs ``gradient``; else only its gradients' shapes and dtypes
    are checked, and the result says so.

    Args:
        op: The op that ``register_op`` returned, or its name.
        gradient: A differentiable function of impl's arguments whose derivative ``backward`` should give; None for
            impl itself. For a straight-through rounding, pass the function without the rounding.
        device: Device to run on; samples are moved to it.
        skip: Names of contracts to leave out, as the report prints them: a list or tuple.

    Returns:
        For each contract that was not checked, by name, the reason.

    Raises:
        TypeError: The op is not registered, its samples are not tuples of arguments, or ``skip`` is a single string.
        ValueError: ``skip`` contains an unknown contract.
        AssertionError: The op breaks one or more contracts. The text says for each what was expected, what was found
            and how to fix it.
    """
    registered = _registered(op)
    all_samples(registered)  # all contracts run on them
    contracts = list(CONTRACTS)
    if gradient is not None:
        contracts[CONTRACTS.index(backward_is_the_derivative)] = _with_reference(backward_is_the_derivative, gradient)
    return check_contracts(registered.name, contracts, (registered, torch.device(device)), skip=skip)
