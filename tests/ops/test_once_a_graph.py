"""Equal calls of one graph are one call, and unequal ones are not: what the layer's backward has of its forward."""

from __future__ import annotations

import pytest
import torch
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import pad

from fp8compile import inductor

CALLS = []


@inductor.once_a_graph
def doubled(x, by):
    CALLS.append(x)
    return x * by


def calls(fn):
    """How often the function is really called while another one is traced."""
    CALLS.clear()
    graph = make_fx(fn, tracing_mode="fake")(torch.arange(12.0).view(3, 4), torch.ones(4, 3))
    found = len(CALLS)
    assert torch.equal(
        graph(torch.arange(12.0).view(3, 4), torch.ones(4, 3)), fn(torch.arange(12.0).view(3, 4), torch.ones(4, 3))
    )
    return found


@pytest.mark.parametrize(
    ("fn", "times"),
    [
        (lambda x, y: doubled(x, 2) + doubled(x, 2), 1),
        (lambda x, y: doubled(x.t(), 2) + doubled(x.t(), 2), 1),
        (lambda x, y: doubled(x.view(2, 6)[0], 2) + doubled(x.view(2, 6)[0], 2), 1),
        (lambda x, y: doubled(x.view(2, 6)[0], 2) + doubled(x.view(2, 6)[1], 2), 2),
        (lambda x, y: doubled(pad(x, [1, 0]), 2) + doubled(pad(x, [1, 0]), 2), 1),
        (lambda x, y: doubled(pad(x, [1, 0]), 2) + doubled(pad(x, [0, 1]), 2), 2),
        (lambda x, y: doubled(x.t(), 2) + doubled(x.reshape(4, 3), 2), 2),
        (lambda x, y: doubled(x, 2) + doubled(x, 3), 2),
        (lambda x, y: doubled(x.t(), 2) + doubled(y, 2), 2),
        (lambda x, y: doubled(x, 2) + doubled(x + 0, 2), 2),
    ],
    ids=[
        "equal",
        "views",
        "parts",
        "other parts",
        "padded",
        "other padding",
        "other views",
        "other numbers",
        "other tensors",
        "other values",
    ],
)
def test_equal_calls_on_one_value_are_one(fn, times):
    assert calls(fn) == times


def test_what_the_partitioner_treats_unlike_is_not_shared():
    def fn(x, y):
        first = doubled(x, 2)
        with inductor.left_in_backward():
            second = doubled(x, 2)
        return first + second

    assert calls(fn) == 2


def test_a_backward_has_the_forwards():
    def fn(x, y):
        first = doubled(x, 2)
        with traceback.preserve_node_meta():
            traceback.current_meta["partitioner_tag"] = "is_backward"  # what AOTAutograd says while it traces one
            return first + doubled(x, 2)

    assert calls(fn) == 1


def test_a_value_that_was_written_to_is_another():
    def fn(x, y):
        first = doubled(x, 2)
        x = x.clone()
        x.add_(1)
        return first + doubled(x, 2)

    assert calls(fn) == 2
    compiled = torch.compile(fn, backend="aot_eager", fullgraph=True)
    x, y = torch.arange(12.0).view(3, 4), torch.ones(4, 3)
    assert torch.equal(compiled(x, y), fn(x, y))


def test_sizes_that_are_symbols_tell_calls_apart():
    def fn(x, y):
        return doubled(x, x.shape[0]) + doubled(x, x.shape[0]) + doubled(x, x.shape[1])

    CALLS.clear()
    make_fx(fn, tracing_mode="symbolic")(torch.ones(3, 4), torch.ones(4, 3))
    assert len(CALLS) == 2


def test_eager_mode_calls_each_time():
    CALLS.clear()
    x = torch.ones(2)
    doubled(x, 2), doubled(x, 2)
    assert len(CALLS) == 2
