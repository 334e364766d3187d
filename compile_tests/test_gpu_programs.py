"""Programs for a GPU, run: bit for bit the graph, and with every rounding kept bit for bit eager mode."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from foreign_functions import FOREIGN, has_package
from gpu_program_cases import CASES, check
from processes import fake_rank

from fp8compile.testing import run_gpu_program

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs Triton's interpreter"),
]
# A quick case is run in one of two ways: with every rounding kept, beside eager mode, or as users get it, which shows
# what rounding Inductor drops. The slow tests run it, and all others, in both.
AS_USERS_GET_IT = {
    *("stochastic rounding, tensorwise", "float32, rowwise", "dynamic tokens, rowwise_bf16_wgrad"),
    *("experts, empty ones, NaN behind, mxfp8", "one rank of two, FSDP in the graph, rowwise"),
    "attention, bias, frozen weight, rowwise",
}


def parameters(*, in_ranks):
    """The number of a case, and whether it is run as users get it."""
    for number, case in enumerate(CASES):
        for as_users in (False, True) if case.in_ranks is in_ranks else ():
            is_slow = not case.is_quick or as_users is not (str(case) in AS_USERS_GET_IT)
            name = f"{case}, as users get it" if as_users else str(case)
            yield pytest.param(number, as_users, id=name, marks=[pytest.mark.slow] * is_slow)


@pytest.fixture(scope="module")
def elsewhere():
    """Runs a function in a process with a group that isn't there: PyTorch keeps meshes beyond their group."""
    with fake_rank(0, 2) as pool:
        yield lambda function, *args: pool.submit(function, *args).result()


def check_number(number, as_users):
    return check(CASES[number], as_users_get_it=as_users, with_casts=not as_users)


@pytest.mark.parametrize(("number", "as_users"), parameters(in_ranks=False))
def test_a_program_is_its_graph_and_with_every_rounding_kept_eager_mode(number, as_users):
    assert_same(check_number(number, as_users))


@pytest.mark.parametrize(("number", "as_users"), parameters(in_ranks=True))
def test_one_ranks_part_is_its_graph_and_with_every_rounding_kept_eager_mode(number, as_users, elsewhere):
    assert_same(elsewhere(check_number, number, as_users))


def test_what_runs_as_users_get_it_is_a_quick_case():
    assert {str(case) for case in CASES if case.is_quick} > AS_USERS_GET_IT


@pytest.mark.parametrize(
    "case", [pytest.param(each, marks=[pytest.mark.slow] * str(each).startswith("timm")) for each in FOREIGN], ids=str
)
@pytest.mark.filterwarnings("ignore")  # of the packages, when they are imported
def test_functions_that_nobody_here_wrote_are_their_graphs(case):
    if not has_package(case):
        pytest.skip("its package is not installed: pip install --no-deps liger-kernel timm attn_gym")
    row = check(case)
    assert row.kernels > 0
    assert not row.from_graph, "\n".join(row.from_graph)
    assert not row.from_eager, row.from_eager


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


def twice(x):
    """A value that is stored in bfloat16 by one kernel, and used before its rounding there, after it by another."""
    y = x.bfloat16() + 0.1
    return y, y.exp().sum(1), y.exp().sum(0)


def test_a_value_is_rounded_where_a_kernel_reads_it_and_not_where_it_makes_it():
    run = run_gpu_program(twice, torch.randn(40, 64).requires_grad_())
    assert not run.differences, str(run.differences)


def both(x, a, b):
    return x @ a + x @ b


def test_a_sum_that_inductor_takes_into_a_product_is_rounded_once_in_the_reference_too():
    run = run_gpu_program(both, *(torch.randn(32, 32, dtype=torch.bfloat16) for _ in range(3)))
    assert not run.differences, str(run.differences)
    assert [product.name for product in run.products] == ["mm", "addmm"]


def padded_scores(q, k):
    return (q @ k.mT).softmax(-1) @ q


def test_the_backward_gets_saved_tensors_with_the_strides_that_inductor_gave_them():
    q, k = (torch.randn(2, 4, 17, 16, dtype=torch.bfloat16).requires_grad_() for _ in range(2))
    run = run_gpu_program(padded_scores, q, k)  # 4 x 17 x 17 elements are padded to 1216
    assert "1216" in run.graphs[0].source
    assert not run.differences, str(run.differences)
    assert all(output.is_contiguous() for output in run.outputs)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"arch": "c64"}, "`arch` is 'c64'; it must be one of h200, b200"),
        ({"orders": ("sideways",)}, "`orders` is .*; it must be a tuple of one or more of 'forwards', 'backwards', "),
        ({"orders": ()}, "`orders` is .*; it must be a tuple of one or more of 'forwards', 'backwards', 'shuffled'"),
        ({"configurations": "some"}, "`configurations` is 'some'; it must be 'largest', 'all' or a sequence of "),
    ],
    ids=str,
)
def test_options_that_are_not_known_raise(options, complaint):
    with pytest.raises(ValueError, match=complaint):
        run_gpu_program(softmax, *two_matrices(), **options)
