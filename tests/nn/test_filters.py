"""Filters of convert: functions, name patterns, and the default."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fp8compile as f8
from benchmarks.roofline import CASTS, PEAKS, smallest_side
from fp8compile.nn.convertible.filters import LEAST_GAINING
from fp8compile.target import Target, pretend_target

RECIPE = f8.recipes.rowwise()


def model():
    def block():
        return nn.ModuleDict({"attention": nn.Linear(32, 32), "mlp": nn.Linear(32, 64), "gate": nn.Linear(32, 8)})

    return nn.ModuleDict({"layers": nn.ModuleList([block(), block()]), "lm_head": nn.Linear(32, 100)})


ATTENTION, MLP, GATE = ({f"layers.{i}.{name}" for i in range(2)} for name in ("attention", "mlp", "gate"))
ALL = ATTENTION | MLP | GATE | {"lm_head"}


def converted(filter, converted_model=None):
    result = f8.convert(converted_model or model(), RECIPE, filter=filter)
    return {fqn for fqn, module in result.named_modules() if isinstance(module, f8.Linear)}


@pytest.mark.parametrize(
    ("filter", "expected"),
    [
        (None, ALL - GATE),
        ("*", ALL),
        ("layers.*", ALL - {"lm_head"}),
        ("*.mlp", MLP),
        ("layers.?.mlp", MLP),
        ("layers.[01].attention", ATTENTION),
        ("!lm_head", ALL - {"lm_head"}),
        (["!lm_head", "!*.gate"], ATTENTION | MLP),
        (["layers.*", "!*.gate"], ATTENTION | MLP),
        (["!*.gate", "layers.*"], ATTENTION | MLP),
        (("layers.0.*", "lm_head"), {"layers.0.attention", "layers.0.mlp", "layers.0.gate", "lm_head"}),
        ({"*.mlp"}, MLP),
        (iter(["*.mlp", "*.gate"]), MLP | GATE),
        (lambda module, fqn: module.out_features == 64, MLP),
        (lambda module, fqn: fqn.endswith("gate"), GATE),
        (lambda module, fqn: False, set()),
        (["*", "!*"], set()),
    ],
    ids=lambda value: None if isinstance(value, set) else str(value)[:24],
)
@pytest.mark.filterwarnings("ignore:convert. no linear layer was converted")
def test_filter_says_which_layers_are_converted(filter, expected):
    assert converted(filter) == expected


def test_a_name_is_matched_as_a_whole_and_by_case():
    for pattern in ("mlp", "LM_HEAD", "lm_hea"):
        with pytest.raises(ValueError, match="matches no linear layer"):
            converted(pattern)


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        ("lm_haed", "lm_head"),
        ("!lm_haed", "lm_head"),
        ("layers.*.mpl", "layers.*.mlp"),
        ("layer.0.mlp", "layers.0.mlp"),
        ("layers.0.atention", "layers.0.attention"),
        ("LM_HEAD", None),
        ("encoder.*", None),
    ],
)
def test_a_typo_in_a_pattern_is_asked_about(pattern, meant):
    with pytest.raises(ValueError, match="matches no linear layer") as caught:
        f8.convert(model(), RECIPE, filter=pattern)
    hint = str(caught.value).partition(" Did you mean ")[2]
    assert hint == (f"{meant!r}?" if meant else "")
    if meant:
        assert f8.convert(model(), RECIPE, filter=meant)


@pytest.mark.parametrize("filter", ["encoder.*", "!encoder.*", ["lm_head", "encoder.*"], ["*", "!encoder.*"]], ids=str)
def test_pattern_that_matches_nothing_raises_and_changes_nothing(filter):
    unchanged = model()
    pattern = next(p for p in ([filter] if isinstance(filter, str) else filter) if "encoder" in p)
    with pytest.raises(ValueError, match="matches no linear layer") as caught:
        f8.convert(unchanged, RECIPE, filter=filter)
    assert str(caught.value) == (
        f"convert: the pattern '{pattern}' matches no linear layer: layers.0.attention, layers.0.mlp, "
        "layers.0.gate, layers.1.attention, layers.1.mlp, ...."
    )
    assert not any(isinstance(module, f8.Linear) for module in unchanged.modules())


@pytest.mark.parametrize("filter", [3, [], (), [nn.Linear], ["lm_head", None], {"a": 1}.values()], ids=str)
def test_filter_of_another_kind_raises(filter):
    with pytest.raises(TypeError, match=r"it must be a function \(module, fqn\) -> bool, a name pattern"):
        f8.convert(model(), RECIPE, filter=filter)


def test_function_is_asked_once_a_layer_with_module_and_name():
    asked = []
    f8.convert(model(), RECIPE, filter=lambda module, fqn: asked.append((type(module), fqn)) or fqn == "lm_head")
    assert asked == [(nn.Linear, fqn) for fqn in sorted(ALL, key=[f for _, f in asked].index)]
    assert {fqn for _, fqn in asked} == ALL


def test_function_that_raises_changes_nothing():
    unchanged = model()

    def fails(module, fqn):
        if fqn == "lm_head":
            raise KeyError(fqn)
        return True

    with pytest.raises(KeyError):
        f8.convert(unchanged, RECIPE, filter=fails)
    assert not any(isinstance(module, f8.Linear) for module in unchanged.modules())


@pytest.mark.parametrize(
    ("dims", "expected"), [((16, 16), True), ((15, 4096), False), ((4096, 15), False), ((17, 31), True)]
)
@pytest.mark.filterwarnings("ignore:convert. no linear layer was converted")
def test_default_leaves_out_layers_below_sixteen(dims, expected):
    root = nn.Sequential(nn.Linear(*dims, device="meta"))
    assert converted(None, root) == ({"0"} if expected else set())
    assert converted("*", nn.Sequential(nn.Linear(*dims, device="meta"))) == {"0"}


def test_filter_can_add_layers_later_and_does_not_take_them_back():
    growing = model()
    assert converted("*.mlp", growing) == MLP
    assert converted("lm_head", growing) == MLP | {"lm_head"}
    assert torch.is_tensor(growing.lm_head.weight)


# ------------------------------------------------------------------------ layers that FP8 can't help on a GPU

HOPPER, THOR = Target("cuda", (9, 0)), Target("cuda", (11, 0))


def widths(*sizes):
    return nn.ModuleList(nn.Linear(k, n, bias=False, device="meta") for k, n in sizes)


def left_out(model):
    return [row.fqn for row in f8.conversion_report(model).rows if not row.converted]


def test_small_layers_stay_in_high_precision_on_a_gpu_that_was_judged():
    sizes = ((256, 256), (274, 274), (160, 952), (160, 954), (1024, 1024), (64, 65536))
    with pretend_target(HOPPER):
        model = f8.convert(widths(*sizes), RECIPE)
    assert left_out(model) == ["0", "2", "5"]  # 128, 136 and 63; from 137 on they gain
    (reason,) = {row.reason for row in f8.conversion_report(model).rows if row.fqn == "0"}
    assert reason == "small: K N / (K + N) is 128; on a GPU of compute capability 9.0, FP8 is faster from 137 on"


@pytest.mark.parametrize("target", [Target("cpu"), THOR], ids=["cpu", "a GPU that was not judged"])
def test_small_layers_are_converted_elsewhere(target):
    with pretend_target(target):
        assert left_out(f8.convert(widths((256, 256), (16, 16)), RECIPE)) == []


def test_a_filter_that_asks_for_small_layers_gets_them():
    with pretend_target(HOPPER):
        assert left_out(f8.convert(widths((256, 256), (16, 16)), RECIPE, filter="*")) == []


def test_the_bounds_are_those_of_the_roofline():
    bounds = {}
    for peaks in PEAKS.values():
        bound = int(smallest_side(peaks, CASTS["casts fused"]) / 2)
        bounds[peaks.capability] = min(bound, bounds.get(peaks.capability, bound))
    assert bounds == LEAST_GAINING
