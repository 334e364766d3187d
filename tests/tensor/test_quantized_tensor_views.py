"""QuantizedTensor: every view that keeps its blocks stands for that view of its values."""

from __future__ import annotations

import copy
import itertools
import pickle
import random

import pytest
import torch
from quantized_samples import QUANTIZERS, fake_group, spread_values
from torch_files import through_a_file

import fp8compile as f8

SHAPES = ((48,), (32, 48), (2, 16, 48), (2, 2, 8, 48))


# ---------------------------------------------------------------------------------- views, one by one


def always(quantizer, shape):
    return True


def cuts_no_row_block(quantizer, shape):
    """Whether leading dims can be cut at multiples of 16: not where blocks lie over several of them."""
    return len(shape) <= 2 or quantizer.block[0] in (1, -1)


def cuts_anywhere_along_dim_0(quantizer, shape):
    return quantizer.block[0 if len(shape) > 1 else 1] in (1, -1)


def cuts_dim_0_in_halves(quantizer, shape):
    return shape == (32, 48) or cuts_anywhere_along_dim_0(quantizer, shape)


def selects_along_dim_0(quantizer, shape):
    return len(shape) > 1 and quantizer.block[0] in (1, -1)


def is_matrix(quantizer, shape):
    return len(shape) == 2


def at_most_2d(quantizer, shape):
    return len(shape) <= 2


def keeps_last_dim(quantizer, shape):
    return len(shape) >= 2 or quantizer.block == (-1, -1)


# name: (view, whether a tensor of this quantizer and shape has it); where not, a TypeError
VIEWS = {
    "detach": (lambda x: x.detach(), always),
    "clone": (lambda x: x.clone(), always),
    "contiguous": (lambda x: x.contiguous(), always),
    "deepcopy": (copy.deepcopy, always),
    "copy": (copy.copy, always),
    "pickle": (lambda x: pickle.loads(pickle.dumps(x)), always),
    "torch.save": (through_a_file, always),
    "to cpu": (lambda x: x.to("cpu", copy=True), always),
    "t": (lambda x: x.t(), at_most_2d),
    "t twice": (lambda x: x.t().t(), at_most_2d),
    "t contiguous": (lambda x: x.t().contiguous(), at_most_2d),
    "transpose": (lambda x: x.transpose(-2, -1), is_matrix),
    "transpose same dim": (lambda x: x.transpose(1, -1), is_matrix),
    "permute": (lambda x: x.permute(*reversed(range(x.ndim))), at_most_2d),
    "permute in order": (lambda x: x.permute(*range(-x.ndim, 0)), always),
    "unsqueeze 0": (lambda x: x.unsqueeze(0), always),
    "view split": (lambda x: x.view(2, -1, *x.shape[1:]), keeps_last_dim),
    "view flat leading": (lambda x: x.view(-1, x.shape[-1]), always),
    "reshape of t": (lambda x: x.t().reshape(3, 16, x.shape[0]), is_matrix),
    "flatten leading": (lambda x: x.flatten(0, -2), lambda quantizer, shape: len(shape) > 1),
    "unflatten": (lambda x: x.unflatten(0, (2, 1, -1)), keeps_last_dim),
    "slice rows": (lambda x: x[x.shape[0] - 16 if x.shape[0] > 16 else 1 :], cuts_no_row_block),
    "slice columns": (lambda x: x[..., 16:32], always),
    "slice to the end": (lambda x: x[..., -16:], always),
    "slice all": (lambda x: x[:, :, :] if x.ndim > 2 else x[:], always),
    "slice nothing": (lambda x: x[..., 16:16], always),
    "slice every other": (lambda x: x[::2], cuts_anywhere_along_dim_0),
    "slice rows of batches": (lambda x: x.narrow(-2, 1, 3), selects_along_dim_0),
    "select": (lambda x: x[1], selects_along_dim_0),
    "select last": (lambda x: x[-1], selects_along_dim_0),
    "split": (lambda x: x.split(32, -1)[1], always),
    "split sizes": (lambda x: x.split([16, 0, 32], -1)[2], always),
    "chunk": (lambda x: x.chunk(3, -1)[1], always),
    "chunk rows": (lambda x: x.chunk(2)[1], cuts_dim_0_in_halves),
    "narrow": (lambda x: x.narrow(-1, 16, 32), always),
}


def assert_stands_for(q, plain, assert_bits_equal, what):
    assert type(q) is f8.QuantizedTensor, what
    assert (q.shape, q.stride(), q.dtype) == (plain.shape, plain.stride(), plain.dtype), what
    assert q.codes.shape == q.quantizer.codes_shape(q.shape), what
    assert q.scale.shape == q.quantizer.scale_shape(q.shape), what
    assert_bits_equal(q.dequantize(), plain, what)


def plain_has(view, shape):
    try:
        view(torch.empty(shape))
    except (RuntimeError, IndexError):
        return False
    return True


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=str)
def test_view_of_codes_stands_for_view_of_values(quantizer, name, assert_bits_equal):
    view, supports = VIEWS[name]
    for shape in SHAPES:
        q = f8.quantize(spread_values(shape), quantizer)
        if supports(quantizer, shape):
            assert_stands_for(view(q), view(q.dequantize()), assert_bits_equal, f"{name} of {shape}")
        elif plain_has(view, shape):
            with pytest.raises(TypeError, match=r"dequantize\(\)"):
                view(q)


def test_group_and_dtype_stay_through_views():
    group = fake_group()
    q = f8.quantize(spread_values((32, 48), torch.float16), f8.CurrentScaling(block=(1, 16)))
    q = f8.QuantizedTensor(q.codes, q.scale, q.quantizer, q.dtype, group)
    for name in ("detach", "clone", "deepcopy", "t", "unsqueeze 0", "slice columns", "select", "split", "to cpu"):
        view = VIEWS[name][0](q)
        assert (view.group, view.dtype) == (group, torch.float16), name


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=str)
def test_to_meta_keeps_everything_but_numbers(quantizer):
    q = f8.quantize(spread_values((32, 48)), quantizer)
    meta = q.to("meta")
    assert {meta.device.type, meta.codes.device.type, meta.scale.device.type} == {"meta"}
    assert (meta.shape, meta.stride(), meta.dtype, meta.quantizer) == (q.shape, q.stride(), q.dtype, q.quantizer)
    assert meta.dequantize(torch.float32).shape == q.shape


def test_views_share_memory_and_copies_do_not():
    q = f8.quantize(spread_values((32, 48)), f8.CurrentScaling(block=(1, 16)))
    for name, shares in (("t", True), ("slice rows", True), ("detach", True), ("clone", False), ("deepcopy", False)):
        view = VIEWS[name][0](q)
        for part in ("codes", "scale"):
            own, theirs = (getattr(x, part).untyped_storage().data_ptr() for x in (q, view))
            assert (own == theirs) is shares, (name, part)


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=str)
def test_zero_dims_and_no_elements(quantizer, assert_bits_equal):
    scalar = f8.quantize(torch.tensor(3.0), quantizer)
    assert_stands_for(scalar.clone(), scalar.dequantize(), assert_bits_equal, "scalar")
    for shape in ((0,), (0, 48), (32, 0), (2, 0, 16)):
        empty = f8.quantize(torch.empty(shape), quantizer)
        flat = empty.reshape(-1, shape[-1]) if shape[-1] else empty
        assert_stands_for(flat, flat.dequantize(), assert_bits_equal, f"{shape}")


def test_tensorwise_may_be_viewed_in_any_shape(assert_bits_equal):
    for scale in ("fp32", "e8m0_rceil"):
        q = f8.quantize(spread_values((6, 10)), f8.CurrentScaling(scale=scale))
        for shape in ((60,), (10, 6), (2, 3, 5, 2), (60, 1), (1, 60)):
            assert_stands_for(q.view(shape), q.dequantize().view(shape), assert_bits_equal, f"{shape}")


# ---------------------------------------------------------------------------------- views, one after another


def random_view(rng, shape):
    """A view that a plain tensor of this shape has; it may cut blocks."""
    dim = rng.randrange(-len(shape), len(shape))
    start, length = rng.choice((0, 8, 16, 16)), rng.choice((8, 16, 32, 48))
    even = [d for d, size in enumerate(shape[:-1]) if size % 2 == 0 and size]
    choices = [
        lambda x: x.unsqueeze(0),
        lambda x: x.clone(),
        lambda x: x.contiguous(),
        lambda x: x.detach(),
        lambda x: x.reshape(-1, shape[-1]),
        lambda x: x[(slice(None),) * (dim % len(shape)) + (slice(start, start + length),)],
        lambda x: x.chunk(2, dim)[-1],
        lambda x: x.split(16, dim)[0],
    ]
    if len(shape) >= 2:
        choices += [lambda x: x.transpose(-1, -2)] * 2 + [lambda x: x.select(0, -1)]
    if even:
        choices.append(lambda x: x.unflatten(even[0], (2, -1)))
    return rng.choice(choices)


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=str)
def test_random_sequences_of_views(quantizer, assert_bits_equal):
    taken = 0
    for seed, shape in itertools.product(range(25), ((64, 48), (48,), (2, 32, 48), (3, 2, 16, 32))):
        rng = random.Random(f"{seed}{shape}")
        q = f8.quantize(spread_values(shape), quantizer)
        plain = q.dequantize()
        for _ in range(8):
            if not plain.numel():
                break
            view = random_view(rng, plain.shape)
            try:
                q_view = view(q)
            except TypeError as error:
                if "dequantize()" not in str(error):
                    raise
                continue
            q, plain, taken = q_view, view(plain), taken + 1
            assert_stands_for(q, plain, assert_bits_equal, f"seed {seed}, {shape}")
    assert taken > 300, "most views of most sequences are refused: this test shows nothing"


# ---------------------------------------------------------------------------------- codes that share bytes

WHOLE_BYTES = {
    "view": ((1, 32, 64), lambda q: q.view(32, 64)),
    "view with a size left open": ((2, 16, 64), lambda q: q.view(-1, 64)),
    "reshape": ((2, 16, 64), lambda q: q.reshape(4, 8, 64)),
    "flatten": ((2, 16, 64), lambda q: q.flatten(0, 1)),
    "unflatten": ((32, 64), lambda q: q.unflatten(0, (2, 16))),
    "unsqueeze": ((32, 64), lambda q: q.unsqueeze(0)),
    "one row": ((64,), lambda q: q.view(1, 64)),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", WHOLE_BYTES)
def test_a_view_that_keeps_rows_keeps_the_bytes_that_codes_of_a_row_share(name, compiled):
    shape, view = WHOLE_BYTES[name]
    x = torch.randn(shape, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    quantizer = f8.TwoLevelScaling()

    def viewed(x):
        return view(f8.quantize(x, quantizer)).dequantize()

    torch._dynamo.reset()
    found = (torch.compile(viewed, fullgraph=True, backend="aot_eager") if compiled else viewed)(x)
    assert torch.equal(found, view(f8.quantize(x, quantizer).dequantize()))
    q = f8.quantize(x, quantizer)
    assert view(q).codes.untyped_storage().data_ptr() == q.codes.untyped_storage().data_ptr()


def test_a_packed_view_that_leaves_a_compiled_graph_is_that_view():
    x = torch.randn(2, 16, 64, dtype=torch.bfloat16)
    q = f8.quantize(x, f8.TwoLevelScaling())
    torch._dynamo.reset()
    view = torch.compile(lambda q: q.view(32, 64), fullgraph=True, backend="aot_eager")(q)
    assert tuple(view.shape) == (32, 64)
    assert torch.equal(view.dequantize(), q.dequantize().view(32, 64))


@pytest.mark.parametrize(
    "view", [lambda q: q.view(64, 32), lambda q: q.unsqueeze(-1), lambda q: q.t().unsqueeze(0)], ids=[0, 1, 2]
)
def test_a_view_that_would_cut_bytes_raises(view):
    with pytest.raises(TypeError, match=r"stores several values per byte.*\.dequantize\(\) first"):
        view(f8.quantize(torch.randn(32, 64), f8.TwoLevelScaling()))


def test_a_packed_view_of_another_size_says_what_pytorch_says_of_values():
    with pytest.raises(RuntimeError, match=r"\[16, 64\].*is invalid for input of size 2048"):
        f8.quantize(torch.randn(32, 64), f8.TwoLevelScaling()).view(16, 64)
