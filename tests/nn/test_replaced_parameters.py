"""Parameters that FP8 ones replace: an optimizer or DDP that still has them raises instead of doing nothing."""

from __future__ import annotations

import copy
import re
from functools import partial

import pytest
import torch
from gloo_ranks import GROUPS, shared_ranks
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.fsdp import FullyShardedDataParallel

import fp8compile as f8
from fp8compile._compat import TORCH_VERSION

RECIPE = f8.recipes.rowwise()


def mlp():
    return nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32))


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def with_masters(model):
    return f8.MasterWeights(torch.optim.AdamW, model.parameters(), lr=1e-2)


def float8_states(model):
    return f8.optim.AdamW(model.parameters(), lr=1e-2)


def in_float8(model):
    return f8.convert(model, RECIPE, weight_lifetime="parameter")


def frozen(model):
    return f8.freeze_weights(f8.convert(model, RECIPE))


def gathered(model):
    return f8.parallel.fsdp_float8_all_gather(f8.convert(model, RECIPE))


needs_groups = pytest.mark.skipif(TORCH_VERSION < (2, 12), reason="groups of ranks in a subclass need PyTorch 2.12")
REPLACING = {"convert(weight_lifetime='parameter')": in_float8, "freeze_weights": frozen}
if TORCH_VERSION >= (2, 12):
    REPLACING["parallel.fsdp_float8_all_gather"] = gathered


@pytest.mark.parametrize("optimizer", [adamw, with_masters, float8_states], ids=lambda f: f.__name__)
@pytest.mark.parametrize("function", REPLACING)
def test_a_step_of_an_optimizer_that_is_older_than_the_parameters_raises(function, optimizer):
    model = mlp()
    older = optimizer(model)
    older.zero_grad()
    scheduler = torch.optim.lr_scheduler.ConstantLR(older)
    REPLACING[function](model)
    with pytest.raises(RuntimeError, match=re.escape(f"step: fp8compile.{function} replaced a parameter of shape (")):
        older.step()
    assert scheduler.get_last_lr()


def test_a_step_of_an_older_optimizer_raises_when_compiled():
    model = mlp()
    older = adamw(model)
    in_float8(model)
    with pytest.raises(RuntimeError, match="replaced a parameter of shape"):
        torch.compile(older.step, backend="eager")()


def test_a_copy_of_the_model_keeps_its_optimizer():
    """A model that was copied before the conversion is another one."""
    model = mlp()
    copied = copy.deepcopy(model)
    optimizer = adamw(copied)
    in_float8(model)
    before = copied[0].weight.detach().clone()
    copied(torch.randn(8, 32)).sum().backward()
    optimizer.step()
    assert not torch.equal(copied[0].weight, before)


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_gradient_hooks_that_would_be_lost_are_refused(hook):
    model = mlp()
    getattr(model[0].weight, hook)(lambda gradient: None)
    with pytest.raises(ValueError, match="the weight of 0 has gradient hooks, which an FP8 parameter would lose"):
        in_float8(model)
    assert type(model[0]) is nn.Linear


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm], ids=lambda f: f.__name__)
def test_weights_that_are_computed_are_no_fp8_parameters(norm):
    model = mlp()
    norm(model[0])
    f8.convert(model, RECIPE, filter="*", weight_lifetime="parameter")
    rows = {row.fqn: row for row in f8.conversion_report(model).rows}
    assert not rows["0"].converted
    assert "computed from other parameters in each forward" in rows["0"].reason
    assert rows["2"].converted
    with pytest.raises(ValueError, match="0 can't be converted: the weight is computed from other parameters"):
        f8.freeze_weights(f8.convert(normed(norm), RECIPE, filter="*"))


def normed(norm):
    model = mlp()
    norm(model[0])
    return model


def refused(function, model):
    """What ``function`` says to a model whose gradients DDP reduces; "" if it takes it."""
    before = dict(model.named_parameters())
    try:
        function(model)
    except ValueError as error:
        assert dict(model.named_parameters()) == before
        return str(error)
    return ""


def around(model, pair):
    return nn.parallel.DistributedDataParallel(model, process_group=pair)


def inside(model, pair):
    model.wrapper = [around(model, pair)]
    return model


def replicated(model, pair):
    replicate(model, process_group=pair)
    model(torch.ones(2, 32)).sum().backward()  # replicate wraps the parameters in the first forward
    return model


def head_alone(model, pair):
    model.wrapper = [around(nn.Linear(32, 32), pair)]
    model.append(model.wrapper[0])
    return model


def loaded(folder, model):
    return f8.load_quantized(getattr(model, "module", model), folder)  # the names there have no prefix of DDP


def said_to_data_parallel(wrap, folder):
    """What functions that replace parameters say to a model with data parallelism, on ranks."""
    made = []
    for function, prepare in (
        (in_float8, lambda model: model),
        (f8.parallel.fsdp_float8_all_gather, lambda model: f8.convert(model, RECIPE, filter="*")),
        (partial(loaded, folder), lambda model: f8.convert(model, RECIPE, filter="*")),
    ):
        made.append(refused(function, wrap(prepare(mlp()), GROUPS["pair"])))
    return made


@needs_groups
@pytest.mark.parametrize("wrap", [around, inside, replicated], ids=lambda f: f.__name__)
def test_a_model_inside_of_ddp_is_refused(wrap, tmp_path):
    f8.export.save_pretrained(f8.convert(mlp(), RECIPE, filter="*"), tmp_path / "saved", format="compressed-tensors")
    for texts in shared_ranks().run(said_to_data_parallel, wrap, tmp_path / "saved", within="pair"):
        for text, name in zip(texts, ("convert", "fsdp_float8_all_gather", "load_quantized"), strict=True):
            assert text.startswith(name)
            assert "the model or a part of it is already wrapped in DistributedDataParallel" in text


def converted_beside_ddp():
    model = head_alone(mlp(), GROUPS["pair"])
    f8.convert(model, RECIPE, filter="!3*", weight_lifetime="parameter")
    return sum(row.converted for row in f8.conversion_report(model).rows)


def test_layers_beside_ddp_are_converted():
    assert shared_ranks().run(converted_beside_ddp, within="pair") == [2, 2]


def inside_of_fsdp1(use_orig_params):
    """The reasons in the report, and what freeze_weights says."""
    model = FullyShardedDataParallel(
        mlp(), process_group=GROUPS["pair"], device_id=torch.device("cpu"), use_orig_params=use_orig_params
    )
    f8.convert(model, RECIPE, filter="*", weight_lifetime="parameter")
    reasons = {row.reason for row in f8.conversion_report(model).rows}
    f8.convert(model, RECIPE, filter="*")
    return reasons, refused(f8.freeze_weights, model)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_parameters_of_fsdp1_are_left_out(use_orig_params):
    for reasons, text in shared_ranks().run(inside_of_fsdp1, use_orig_params, within="pair"):
        assert [("or FSDP1)" in reason) for reason in reasons] == [True]
        assert "FSDP1" in text


@needs_groups
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_fsdp_gathers_a_weight_that_is_computed_in_param_dtype():
    model = f8.convert(normed(nn.utils.weight_norm), RECIPE, filter="*")
    f8.parallel.fsdp_float8_all_gather(model)
    rows = {row.fqn: row for row in f8.conversion_report(model).rows}
    assert "computed from other parameters" in rows["0"].gathered
    assert rows["2"].gathered.startswith("quantized data")
