"""Random numbers of a GPU's program: Philox as Triton and Inductor draw it, and what depends on them."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch
from torch import nn

from fp8compile.testing import run_gpu_program

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs Triton's interpreter"),
]
DRAWS_BY_FOURS = (2, 13) <= tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15)


@pytest.fixture
def functions():
    import drawing_functions

    return drawing_functions


@pytest.mark.parametrize(
    ("word", "words"),
    [
        (0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (0xFFFFFFFF, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ],
)
def test_philox_gives_the_words_that_its_authors_publish(word, words):
    """Source: Random123, kat_vectors, philox4x32 10."""
    from fp8compile.testing.gpu.program.random_numbers import philox

    counter = [np.array([word])] * 4
    assert tuple(int(each[0]) for each in philox(word << 32 | word, *counter)) == words


def test_the_references_numbers_are_tritons(functions, assert_bits_equal):
    """By tl.rand and tl.randn in a kernel of one's own, interpreted."""
    from fp8compile.testing.gpu.program.random_numbers import RandomNumbers, philox

    seed, count = 123456789123456789, 4096
    uniform, normal, words = run_gpu_program(functions.by_a_kernel, torch.zeros(count)).outputs
    for mode, found in (("rand", uniform), ("randn", normal)):
        expected = RandomNumbers().drawn("inductor_random", ([count], seed, mode), by_fours=False)
        assert_bits_equal(found, expected, mode)
    assert torch.equal(
        words.view(-1, 4), torch.from_numpy(np.stack(philox(seed, np.arange(count)), -1).view(np.int32))
    )
    assert abs(uniform.mean() - 0.5) < 0.02, "0.5, of 4096 numbers whose deviation is 0.29: 4 standard errors"


def test_a_block_with_dropout_has_the_bits_of_its_graphs(functions):
    torch.manual_seed(0)
    x = torch.randn(24, 32, requires_grad=True)
    run = run_gpu_program(functions.Block(), x, orders=("forwards", "shuffled"), configurations="all")
    assert not run.differences, str(run.differences)
    assert any("rand" in graph.source for graph in run.graphs)


def test_gradients_are_zero_where_dropout_dropped():
    x = torch.randn(64, 32, requires_grad=True)
    run = run_gpu_program(nn.Dropout(0.25), x)
    assert not run.differences, str(run.differences)
    dropped = run.outputs[0] == 0
    assert torch.equal(run.gradients["args[0]"] == 0, dropped)
    assert 0.18 < dropped.float().mean() < 0.32, "0.25, of 2048 elements: 7 standard errors"


def test_numbers_come_from_the_generators_seed_and_each_call_takes_new_ones(functions, assert_bits_equal):
    x = torch.zeros(1000)
    torch.manual_seed(1)
    first, second = (run_gpu_program(functions.drawn, x) for _ in range(2))
    torch.manual_seed(1)
    again = run_gpu_program(functions.drawn, x, orders=("forwards", "backwards"))
    assert not any(run.differences for run in (first, second, again))
    for one, other, same in zip(first.outputs, second.outputs, again.outputs, strict=True):
        assert_bits_equal(one, same, "the same seed")
        assert not torch.equal(one, other)
    uniform, normal, whole = first.outputs
    assert 0 <= uniform.min() <= uniform.max() < 1
    assert abs(normal.std() - 1) < 0.1, "1, of 1000 numbers: 4 standard errors"
    assert whole.unique().tolist() == list(range(-3, 17))


@pytest.mark.skipif(not DRAWS_BY_FOURS, reason="pytorch#198333 is of PyTorch 2.13 and 2.14")
def test_a_mask_that_the_backward_draws_otherwise_is_found(functions):
    """pytorch#198333: the forward draws four words for each counter, the backward's tiles one."""
    run = run_gpu_program(functions.checkpointed, torch.randn(2, 64, 32, requires_grad=True))
    assert [each.where for each in run.differences] == ["backward, output 0"]
    assert run.differences[0].count > 1000, "half of 4096 elements, for masks that have nothing in common"


@pytest.mark.skipif(torch.__version__ < "2.15", reason="earlier versions keep the seeds")
def test_a_generators_state_that_code_keeps_is_refused(functions):
    with pytest.raises(NotImplementedError, match="generated code calls run_and_save_rng_state"):
        run_gpu_program(functions.checkpointed, torch.randn(2, 64, 32, requires_grad=True))
