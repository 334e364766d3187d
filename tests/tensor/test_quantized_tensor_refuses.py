"""QuantizedTensor: whatever would need its numbers raises a TypeError that names the op and the way out."""

from __future__ import annotations

import operator
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

import fp8compile as f8

NO_MEANING = (
    "{} is not supported for a QuantizedTensor, and tensors are never dequantized implicitly. Call .dequantize() "
    "first; for matrix multiplication use fp8compile.linear or fp8compile.scaled_mm."
)


def quantized(shape=(16, 32), block=(-1, -1), dtype=torch.bfloat16):
    return f8.quantize(torch.randn(shape).to(dtype), f8.CurrentScaling(block=block))


def error_text(call, *args):
    with pytest.raises(TypeError) as caught:
        call(*args)
    return str(caught.value)


# ---------------------------------------------------------------------------------- operators

BINARY = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "truediv": operator.truediv,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "pow": operator.pow,
    "matmul": operator.matmul,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "lshift": operator.lshift,
    "rshift": operator.rshift,
}
COMPARISONS = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
MIRRORED = {"eq": "eq", "ne": "ne", "lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}
OTHERS = {"a tensor": torch.ones(16, 32), "a number": 2, "itself": None}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("name", BINARY)
def test_arithmetic_operator_raises_on_either_side(name, other):
    q = quantized()
    value = q if OTHERS[other] is None else OTHERS[other]
    assert error_text(BINARY[name], q, value) == NO_MEANING.format(f"Tensor.__{name}__")
    reflected = f"__{name}__" if value is q else f"__r{name}__"
    assert error_text(BINARY[name], value, q) == NO_MEANING.format(f"Tensor.{reflected}")


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("name", COMPARISONS)
def test_comparison_raises_on_either_side(name, other):
    q = quantized()
    value = q if OTHERS[other] is None else OTHERS[other]
    assert error_text(COMPARISONS[name], q, value) == NO_MEANING.format(f"Tensor.__{name}__")
    mirrored = name if value is q else MIRRORED[name]
    assert error_text(COMPARISONS[name], value, q) == NO_MEANING.format(f"Tensor.__{mirrored}__")


@pytest.mark.parametrize("name", BINARY)
def test_in_place_operator_raises_on_either_side(name):
    in_place = getattr(operator, f"i{name.rstrip('_')}")
    assert error_text(in_place, quantized(), torch.ones(16, 32)) == NO_MEANING.format(f"Tensor.__i{name}__")
    plain = torch.ones(16, 32)
    assert "is not supported for a QuantizedTensor" in error_text(in_place, plain, quantized())
    assert torch.equal(plain, torch.ones(16, 32))


@pytest.mark.parametrize(
    ("name", "call"), [("neg", operator.neg), ("abs", abs), ("invert", operator.invert)], ids=["neg", "abs", "invert"]
)
def test_unary_operator_raises(name, call):
    assert error_text(call, quantized()) == NO_MEANING.format(f"Tensor.__{name}__")


def test_membership_raises_and_identity_still_hashes():
    q = quantized()
    assert error_text(lambda: q in [torch.ones(1)]) == NO_MEANING.format("Tensor.__eq__")
    assert {q: 1}[q] == 1


# ---------------------------------------------------------------------------------- functions

PLAIN = torch.ones(16, 32)
FUNCTIONS = {
    "aten.add.Tensor": lambda q: torch.add(PLAIN, q),
    "aten.mul.Tensor": lambda q: q.mul(2),
    "aten.mm.default": lambda q: torch.mm(PLAIN.t(), q),
    "aten.relu.default": torch.relu,
    "aten.sum.default": lambda q: q.sum(),
    "aten.mean.dim": lambda q: q.mean(0),
    "aten.cat.default": lambda q: torch.cat([PLAIN, q]),
    "aten.stack.default": lambda q: torch.stack([q, q]),
    "aten.equal.default": lambda q: torch.equal(q, q),
    "aten.isnan.default": torch.isnan,
    "aten.copy_.default": lambda q: PLAIN.copy_(q),
    "aten.copy_.default ": lambda q: q.copy_(PLAIN),
    "aten.add_.Tensor": lambda q: q.add_(1),
    "aten.fill_.Scalar": lambda q: q.fill_(1.0),
    "aten.zero_.default": lambda q: q.zero_(),
    "aten.index.Tensor": lambda q: q[torch.tensor([0, 1])],
    "aten.unbind.int": list,
    "aten.expand.default": lambda q: q.expand(2, 16, 32),
    "aten.diagonal.default": lambda q: q.diagonal(),
    "aten.view.dtype": lambda q: q.view(torch.int16),
    "aten.empty_like.default": torch.empty_like,
    "aten._local_scalar_dense.default": lambda q: q[:1, :1].item(),
    "aten._local_scalar_dense.default ": lambda q: float(q[:1, :1]),
    "aten.embedding.default": lambda q: functional.embedding(torch.tensor([0]), q),
    "aten._softmax.default": lambda q: q.softmax(-1),
}


@pytest.mark.parametrize("op", FUNCTIONS)
def test_function_raises(op):
    assert error_text(FUNCTIONS[op], quantized()) == NO_MEANING.format(op.strip())


def test_function_linear_raises_for_either_operand():
    weight = quantized((8, 32))
    for call in (
        lambda: functional.linear(torch.ones(4, 32, dtype=torch.bfloat16), weight),
        lambda: functional.linear(weight, torch.ones(4, 32, dtype=torch.bfloat16)),
        lambda: functional.linear(weight, weight, torch.ones(8, dtype=torch.bfloat16)),
    ):
        text = error_text(call)
        assert "is not supported" in text
        assert "fp8compile.linear" in text


@pytest.mark.parametrize("to_numbers", [lambda q: q.numpy(), lambda q: q.tolist()], ids=["numpy", "tolist"])
def test_numbers_can_not_be_taken_out(to_numbers):
    with pytest.raises(RuntimeError, match="not supported for tensor subclasses"):
        to_numbers(quantized())


@pytest.mark.parametrize(
    "cast",
    [
        lambda q: q.float(),
        lambda q: q.half(),
        lambda q: q.double(),
        lambda q: q.to(torch.float32),
        lambda q: q.type(torch.float32),
        lambda q: q.to(PLAIN),
        lambda q: q.to("meta", torch.int32),
    ],
    ids=["float", "half", "double", "to", "type", "to other", "to meta"],
)
def test_cast_of_dtype_raises(cast):
    text = error_text(cast, quantized())
    assert text.startswith("a QuantizedTensor of torch.bfloat16 can't be cast to torch.")
    assert "Call .dequantize(torch." in text


def test_cast_to_its_own_dtype_is_the_tensor_itself():
    q = quantized()
    assert q.to(torch.bfloat16) is q
    assert q.bfloat16() is q


# ---------------------------------------------------------------------------------- views that keep no block

VIEWS = [
    (
        "view",
        lambda q: q.view(32, 16),
        (1, 16),
        (16, 32),
        "aten.view.default from (16, 32) to (32, 16) would move elements between blocks (1, 16). Keep the last dim "
        "unchanged, or call .dequantize() first.",
    ),
    (
        "unsqueeze of the last dim",
        lambda q: q.unsqueeze(-1),
        (1, -1),
        (16, 32),
        "aten.unsqueeze.default from (16, 32) to (16, 32, 1) would move elements between blocks (1, -1). Keep the "
        "last dim unchanged, or call .dequantize() first.",
    ),
    (
        "slice",
        lambda q: q[8:24],
        (16, 16),
        (32, 32),
        "aten.slice.Tensor [8:24:1] along dim 0 of 32 splits blocks of 16. Split at multiples of 16, or call "
        ".dequantize() first.",
    ),
    (
        "slice with a step",
        lambda q: q[:, ::16],
        (1, 16),
        (16, 32),
        "aten.slice.Tensor [0:32:16] along dim 1 of 32 splits blocks of 16. Split at multiples of 16, or call "
        ".dequantize() first.",
    ),
    (
        "split",
        lambda q: q.split([8, 24], -1),
        (1, 16),
        (16, 32),
        "aten.slice.Tensor [0:8:1] along dim 1 of 32 splits blocks of 16. Split at multiples of 16, or call "
        ".dequantize() first.",
    ),
    (
        "slice of flattened leading dims",
        lambda q: q[:1],
        (16, 16),
        (2, 16, 32),
        "a QuantizedTensor of shape (2, 16, 32) with block (16, 16) can't be split along dim 0, because its blocks "
        "span flattened leading dims. Flatten them with .reshape, or call .dequantize() first.",
    ),
    (
        "select of a column",
        lambda q: q[:, 3],
        (1, 16),
        (16, 32),
        "aten.select.int along dim 1 of a QuantizedTensor with block (1, 16) would not keep its blocks. Call "
        ".dequantize() first.",
    ),
    (
        "select within a block",
        lambda q: q[3],
        (16, 16),
        (16, 32),
        "aten.select.int along dim 0 of a QuantizedTensor with block (16, 16) would not keep its blocks. Call "
        ".dequantize() first.",
    ),
    (
        "transpose of three dims",
        lambda q: q.transpose(0, 2),
        (-1, -1),
        (2, 16, 32),
        "aten.transpose.int of a QuantizedTensor requires a matrix, but this one has shape (2, 16, 32) and blocks "
        "over its flattened leading dims. Flatten them with .reshape, or call .dequantize() first.",
    ),
    (
        "as_strided",
        lambda q: q.as_strided((4, 4), (1, 2)),
        (-1, -1),
        (16, 32),
        "aten.as_strided.default with size (4, 4) and stride (1, 2) of a QuantizedTensor with shape (16, 32) and "
        "stride (32, 1) is not a view that keeps its blocks. Call .dequantize() first.",
    ),
]


@pytest.mark.parametrize(("view", "block", "shape", "text"), [v[1:] for v in VIEWS], ids=[v[0] for v in VIEWS])
def test_view_that_keeps_no_block_raises(view, block, shape, text):
    assert error_text(view, quantized(shape, block)) == text


@pytest.mark.parametrize("backend", [None, "aot_eager"], ids=["eager", "compiled"])
def test_split_sizes_that_do_not_sum_to_the_dim_raise(backend):
    def split(x):
        return x.split([8, 4], 0)

    call = split if backend is None else torch.compile(split, fullgraph=True, backend=backend)
    with pytest.raises(RuntimeError, match="sizes"):
        call(torch.ones(16, 32))
    with pytest.raises(RuntimeError, match="sizes"):
        call(quantized())


def test_view_of_another_size_raises_as_for_a_plain_tensor():
    for view in (lambda x: x.view(3, 32), lambda x: x[99], lambda x: x.narrow(0, 8, 16), lambda x: x.t().view(512)):
        with pytest.raises((RuntimeError, IndexError)) as plain:
            view(torch.ones(16, 32))
        with pytest.raises(plain.type):
            view(quantized())


def test_pickle_with_a_group_raises():
    q = quantized()
    group = SimpleNamespace(group_name="1", size=lambda: 2, rank=lambda: 0)
    grouped = f8.QuantizedTensor(q.codes, q.scale, q.quantizer, q.dtype, group)
    assert error_text(pickle.dumps, grouped) == (
        "a QuantizedTensor with a process group can't be pickled, because a process group belongs to one process. "
        "Pickle .dequantize(), or its .codes and .scale."
    )
