"""run_gpu_program finds every fault that is planted in generated code, and none where there is none."""

from __future__ import annotations

import importlib.util
import re

import pytest
from planted_faults import FAULTS, found, found_in_library, inputs, layer

from fp8compile.testing import run_gpu_program

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs Triton's interpreter"),
]


def test_nothing_is_found_where_nothing_is_planted():
    run = run_gpu_program(layer, *inputs(backward=True))
    assert not run.differences, str(run.differences)
    assert len(run.products) == 3
    assert str(run.differences) == "no differences"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault):
    said = found(fault)
    assert re.search(fault.found_as, said), said


def test_a_fault_that_the_graph_has_too_is_found_by_eager_mode():
    assert found_in_library(is_planted=False) == ("no differences", "nothing")
    by_graph, by_eager = found_in_library()
    assert by_graph == "no differences"
    assert re.search("eager mode: .* elements differ", by_eager), by_eager
