"""A model that was marked for FSDP2's gathers and never sharded: the report and the first forward say so."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fp8compile as f8
from fp8compile._compat import TORCH_VERSION

pytestmark = pytest.mark.skipif(
    TORCH_VERSION < (2, 12), reason=f"a group as a part of a tensor needs PyTorch 2.12, this is {torch.__version__}"
)


def marked(recipe=None):
    model = nn.Sequential(nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 32))
    f8.convert(model, recipe or f8.recipes.rowwise(), filter=lambda *_: True)
    return f8.parallel.fsdp_float8_all_gather(model)


@pytest.fixture
def pretend_ranks():
    def start(size):
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


def said_by(function):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return [str(each.message) for each in caught if "fully_shard" in str(each.message)]


def test_the_report_claims_no_gather_before_fully_shard():
    model = marked()
    report = f8.conversion_report(model)
    assert "codes" not in str(report)
    assert "not sharded yet" in str(report)
    assert [row.sharded for row in report.rows] == [False, False]
    model[0]._is_fsdp_managed_module = True  # as fully_shard says it
    text = str(f8.conversion_report(model))
    assert "quantized data, separate for each pass" in text
    assert text.count("not sharded yet") == 1


def test_the_report_says_before_fully_shard_what_will_not_travel_as_codes():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    bf16_output = f8.Recipe(grad_output=f8.CurrentScaling(), weight_for_grad_input=f8.CurrentScaling())
    f8.convert(model, {"0": bf16_output, "1": f8.recipes.rowwise()}, filter=lambda *_: True)
    f8.parallel.fsdp_float8_all_gather(model)
    first, second, note = str(f8.conversion_report(model)).splitlines()[2:5]
    assert first.endswith("not sharded yet [1]")
    assert second.endswith("not sharded yet")
    assert note == "[1] then param_dtype: the recipe leaves output in high precision"


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_first_forward_on_several_ranks_warns_once(compiled, pretend_ranks):
    pretend_ranks(2)
    torch._dynamo.reset()
    model, x = marked(), torch.randn(4, 32)
    # no full graph: Dynamo has no proxy for a weight of this class, which only fully_shard is to see
    fn = torch.compile(model, backend="aot_eager") if compiled else model
    (text,) = said_by(lambda: fn(x))
    assert "fully_shard was not" in text
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert said_by(lambda: fn(x)) == []
    again = marked()
    assert len(said_by(lambda: again(x))) == 1  # each model that was marked


def test_who_has_nothing_to_gather_is_not_warned(pretend_ranks):
    x = torch.randn(4, 32)
    assert said_by(lambda: marked()(x)) == []  # no group at all
    pretend_ranks(1)
    assert said_by(lambda: marked()(x)) == []


def test_export_and_passes_of_shapes_are_silent(pretend_ranks):
    pretend_ranks(2)
    model, x = marked(), torch.randn(4, 32)
    assert said_by(lambda: torch.export.export(model, (x,))) == []
    with torch.device("meta"):
        shapes = marked()
    assert said_by(lambda: shapes(x.to("meta"))) == []
