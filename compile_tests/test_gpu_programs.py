"""The programs that a GPU would run, run: bit for bit the graph, and with every rounding kept bit for bit eager mode.

`python compile_tests/gpu_programs_table.py` writes docs/results/gpu-programs.md from the same cases.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from gpu_program_cases import CASES, check, start_fake_group

from fp8compile.testing import run_gpu_program

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs Triton's interpreter"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset:UserWarning"),  # Triton 3.9, once a process
]
PARAMETERS = [
    pytest.param(number, id=str(case), marks=[] if case.is_quick else [pytest.mark.slow])
    for number, case in enumerate(CASES)
]


@pytest.fixture(scope="module")
def elsewhere():
    """Runs a function in a process with a group that isn't there: PyTorch keeps meshes beyond their group."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=start_fake_group) as pool:
        yield lambda function, *args: pool.submit(function, *args).result()


def check_number(number):
    return check(CASES[number])


@pytest.mark.parametrize("number", [each for each in PARAMETERS if not CASES[each.values[0]].in_ranks])
def test_a_program_is_its_graph_and_with_every_rounding_kept_eager_mode(number):
    assert_same(check(CASES[number]))


@pytest.mark.parametrize("number", [each for each in PARAMETERS if CASES[each.values[0]].in_ranks])
def test_one_ranks_part_is_its_graph_and_with_every_rounding_kept_eager_mode(number, elsewhere):
    assert_same(elsewhere(check_number, number))


def assert_same(row):
    assert row.products > 0
    assert not row.from_graph, "\n".join(row.from_graph)
    assert not row.from_eager, row.from_eager


# ---------------------------------------------------------------------------------- the tool


def softmax(x, weight):
    return torch.softmax((x @ weight).float(), -1)


def two_matrices():
    return (torch.randn(*size).requires_grad_() for size in ((24, 32), (32, 40)))


def test_all_orders_configurations_and_another_poison_give_the_same():
    options = {"orders": ("forwards", "backwards", "shuffled"), "configurations": "all", "poison": 60}
    run = run_gpu_program(softmax, *two_matrices(), **options)
    assert not run.differences, str(run.differences)
    assert any(launch.configurations > 1 for graph in run.graphs for launch in graph.launches)


def test_what_an_approximate_exponential_changes_is_shown():
    run = run_gpu_program(softmax, *two_matrices(), approximate=True)
    difference = next(iter(run.differences))
    assert difference.where == "forward, output 0"
    assert difference.element is not None
    assert 0 < difference.count <= difference.total == 24 * 40


def test_gradients_are_those_of_the_outputs_that_are_given():
    x, weight = two_matrices()
    grads = (torch.zeros(24, 40),)
    run = run_gpu_program(softmax, x, weight, grad_outputs=grads)
    assert all(not gradient.any() for gradient in run.gradients.values())
    assert x.grad is None


def test_random_numbers_have_no_reference():
    with pytest.raises(NotImplementedError, match="draws random numbers, and no reference of PyTorch draws the same"):
        run_gpu_program(torch.nn.functional.dropout, torch.ones(64).requires_grad_())


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"arch": "c64"}, "arch is 'c64'; it is one of h200, b200"),
        ({"orders": ("sideways",)}, "orders are .*; they are of forwards, backwards, shuffled"),
        ({"orders": ()}, "orders are .*; they are of forwards, backwards, shuffled"),
        ({"configurations": "some"}, "configurations is 'some'; it is 'largest', 'all' or numbers"),
    ],
    ids=str,
)
def test_options_that_are_not_known_raise(options, complaint):
    with pytest.raises(ValueError, match=complaint):
        run_gpu_program(softmax, *two_matrices(), **options)
