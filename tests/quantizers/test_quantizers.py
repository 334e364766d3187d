"""Quantizers as values: equal, hashable, picklable, printable, constants of graphs; and what they refuse to be."""

from __future__ import annotations

import copy
import importlib.util
import os
import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError, dataclass, replace
from pathlib import Path

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

import fp8compile as f8
from benchmarks.import_graph import imports_of
from fp8compile import CurrentScaling, Quantizer
from fp8compile.quantizers.constant import SALTED, source_salt

VALUES = [
    CurrentScaling(),
    CurrentScaling(format="e5m2", block=(1, -1), scale="pow2", eps=1e-12),
    CurrentScaling(block=(128, 128), scale="e8m0_floor"),
    CurrentScaling(eps=1),
]


@dataclass(frozen=True, repr=False)
class Headroom(Quantizer):
    """A quantizer of another library: leaves room above the amax."""

    factor: float = 2.0

    def multiplier(self, amax: Tensor) -> Tensor:
        return torch.where(amax > 0, self.element_format().max / self.factor / amax, 1.0)


every_value = pytest.mark.parametrize("value", [*VALUES, Headroom(), Headroom(factor=3.0, block=(1, -1))], ids=repr)

# ---------------------------------------------------------------------------------- values


@every_value
def test_a_value_survives_pickle_copy_and_replace(value):
    for other in (pickle.loads(pickle.dumps(value)), copy.copy(value), copy.deepcopy(value), replace(value)):
        assert other == value
        assert hash(other) == hash(value)
        assert type(other) is type(value)


@every_value
def test_repr_evaluates_back(value):
    assert eval(repr(value)) == value


@every_value
def test_fx_repr_evaluates_back_from_the_types_it_names(value):
    text, names = value.__fx_repr__()
    assert all(isinstance(cls, type) for cls in names.values())  # a module among them breaks the FX cache
    assert eval(text, dict(names)) == value


@pytest.mark.parametrize("field", ["format", "block", "scale", "eps"])
def test_each_field_decides_equality(field):
    other = {"format": "e5m2", "block": (1, -1), "scale": "pow2", "eps": 1e-3}[field]
    value = CurrentScaling()
    changed = replace(value, **{field: other})
    assert changed != value
    assert len({value, changed, CurrentScaling()}) == 2
    assert getattr(value, field) != other  # the original is as it was
    assert changed.__fx_repr__()[0] != value.__fx_repr__()[0]


def test_values_of_different_classes_are_different():
    assert Headroom() != Quantizer.__new__(CurrentScaling)
    assert Headroom(factor=2.0) != CurrentScaling()


@pytest.mark.parametrize("name", ["format", "block", "scale", "eps", "new_attribute"])
def test_assignment_raises(name):
    value = CurrentScaling()
    with pytest.raises(FrozenInstanceError):
        setattr(value, name, 1)
    with pytest.raises(FrozenInstanceError):
        delattr(value, name)


@every_value
def test_transposed_twice_is_the_same(value):
    assert value.transposed().block == value.block[::-1]
    assert value.transposed().transposed() == value


def test_fx_repr_is_the_same_in_every_fresh_process():
    # a hash that changed from process to process would make every compile cache miss; this process is no measure,
    # for tests may have registered ops in it, whose source is part of the hash
    value = f8.recipes.rowwise(eps=1e-12)
    program = (
        "import pickle, sys, fp8compile\n"
        "value = pickle.loads(sys.stdin.buffer.read())\n"
        "text, names = value.__fx_repr__()\n"
        "assert eval(text, names) == value\n"
        "print(text)"
    )
    command = [sys.executable, "-W", "ignore", "-c", program]
    texts = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(command, input=pickle.dumps(value), env=environment, capture_output=True, check=True)
        texts.add(done.stdout.decode().strip())
    (text,) = texts
    assert "eps=1e-12" in text


# ---------------------------------------------------------------------------------- construction errors


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"format": "e3m4"}, "format 'e3m4' is not known; it must be one of 'e4m3', 'e5m2', 'e2m1'"),
        ({"format": "e2m1"}, "CurrentScaling: `format` is 'e2m1'; it must be 'e4m3' or 'e5m2'"),
        ({"block": (0, 1)}, r"CurrentScaling: `block` is \(0, 1\); it must be a tuple \(rows, columns\) of ints"),
        ({"block": (1, -2)}, r"CurrentScaling: `block` is \(1, -2\)"),
        ({"block": (1,)}, r"CurrentScaling: `block` is \(1,\)"),
        ({"block": 128}, "CurrentScaling: `block` is 128"),
        ({"block": (1.0, -1)}, r"CurrentScaling: `block` is \(1.0, -1\)"),
        ({"block": (True, -1)}, r"CurrentScaling: `block` is \(True, -1\)"),
        ({"scale": "log"}, "`scale` is 'log'; it must be one of 'fp32', 'pow2', 'e8m0_rceil', 'e8m0_floor'"),
        ({"eps": 1e39}, r"CurrentScaling: `eps` is 1e\+39; it must be a number from 0 to the largest float32"),
        ({"eps": -1e-9}, "CurrentScaling: `eps` is -1e-09; it must be a number from 0 to the largest float32"),
        ({"eps": True}, "CurrentScaling: `eps` is True; it must be a number from 0 to the largest float32"),
        ({"eps": "0"}, "CurrentScaling: `eps` is '0'; it must be a number from 0 to the largest float32"),
        ({"eps": torch.inf}, "CurrentScaling: field eps is inf; it must be finite"),
        ({"eps": torch.nan}, "CurrentScaling: field eps is nan; it must be finite"),
    ],
)
def test_wrong_values_are_refused_when_made(arguments, text):
    with pytest.raises(ValueError, match=text):
        CurrentScaling(**arguments)


@pytest.mark.parametrize("field", ["format", "block", "scale", "eps"])
@pytest.mark.parametrize("bad", [torch.ones(2), [1, 128], torch.float8_e4m3fn, {"a": 1}, {1}, object()])
def test_no_field_takes_what_is_no_constant(field, bad):
    with pytest.raises(
        TypeError, match=f"CurrentScaling: field {field} holds a {type(bad).__name__}, but a constant of"
    ):
        CurrentScaling(**{field: bad})


@pytest.mark.parametrize("bad", [torch.ones(2), [2.0], torch.bfloat16, (1.0, torch.ones(1)), torch.inf])
def test_no_field_of_a_subclass_takes_what_is_no_constant(bad):
    error = (ValueError, "factor is inf") if bad is torch.inf else (TypeError, "Headroom: field factor holds a ")
    with pytest.raises(error[0], match=error[1]):
        Headroom(factor=bad)


def test_a_quantizer_without_a_scale_rule_says_so():
    with pytest.raises(TypeError, match=r"(?s)Ruleless has no scale rule\. Define.*def multiplier\(self, amax"):

        @dataclass(frozen=True, repr=False)
        class Ruleless(Quantizer):
            pass


# ---------------------------------------------------------------------------------- quantizers of others


def _quantize(x: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor]:
    quantized = f8.quantize(x, quantizer)
    return quantized.codes, quantized.scale


def test_a_foreign_quantizer_works_eager_and_compiled(assert_bits_equal):
    # amaxes are powers of two: 448 / 2 / amax is exact, however a backend divides
    x = torch.randn(8, 32).clamp(-3, 3).bfloat16()
    x[:, 0] = 4.0
    quantizer = Headroom(block=(1, -1))
    compiled = torch.compile(_quantize, fullgraph=True)(x, quantizer)
    codes, scale = _quantize(x, quantizer)
    assert_bits_equal(scale, torch.full((8, 1), 4.0 / 224))
    assert_bits_equal(codes, ((x.float() * 56).to(torch.float8_e4m3fn)).view(torch.uint8))
    assert_bits_equal(compiled[0], codes)
    assert_bits_equal(compiled[1], scale)


SOURCE = """
from __future__ import annotations
from dataclasses import dataclass
import torch
from fp8compile import Quantizer

@dataclass(frozen=True, repr=False)
class Foreign(Quantizer):
    def multiplier(self, amax):
        return torch.full_like(amax, {number})
"""


def _foreign(folder, module: str, number: float) -> type[Quantizer]:
    """The class Foreign from a new module of this name."""
    file = folder / f"{module}_{number}.py"
    file.write_text(SOURCE.format(number=number))
    spec = importlib.util.spec_from_file_location(module, file)
    made = importlib.util.module_from_spec(spec)
    sys.modules[module] = made
    spec.loader.exec_module(made)
    return made.Foreign


@pytest.fixture
def modules():
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("foreign"):
            del sys.modules[name]


def test_salt_has_the_source_of_all_that_ops_are_compiled_from():
    traced_by_dynamo = {"parallel"}  # most of it, with what it imports of nn
    imports, salted = imports_of(Path(f8.__file__).parent), {name.removesuffix(".py") for name in SALTED}
    folder_of = {module: [*module.split("."), ""][1] for module in imports}
    compiled = {module for module, folder in folder_of.items() if folder in salted - traced_by_dynamo}
    compiled -= {"fp8compile.monitor.monitor"}  # it attaches the ops of its folder to modules
    read = {folder_of[other] for module in compiled for other in imports[module]}
    assert len(compiled) > 100
    assert read - {""} - salted == set(), "their sources are in no key of a compile cache"


def test_salt_changes_with_a_foreign_class_source_only(tmp_path, modules):
    salts = []
    for folder, number in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        (tmp_path / folder).mkdir()
        salts.append(source_salt(_foreign(tmp_path / folder, "foreign_a", number)))
    assert salts[0] == salts[1] != salts[2]
    assert source_salt(CurrentScaling) == source_salt(f8.Recipe) not in salts  # ours: the package's sources alone


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_classes_of_one_name_do_not_collide_in_one_graph(tmp_path, modules, backend):
    first, second = _foreign(tmp_path, "foreign_b", 1.0)(), _foreign(tmp_path, "foreign_c", 2.0)()
    assert type(first).__qualname__ == type(second).__qualname__
    assert first != second

    @torch.compile(fullgraph=True, backend=backend)
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return f8.quantize(x, first).scale, f8.quantize(x, second).scale

    scales = both(torch.ones(4))
    assert [scale.item() for scale in scales] == [1.0, 0.5]


def test_a_class_defined_again_takes_the_place_of_the_old(tmp_path, modules):
    # the cell of a notebook, run a second time with another rule
    for number in (1.0, 2.0, 4.0):
        quantizer = _foreign(tmp_path, "foreign_d", number)()
        torch._dynamo.reset()
        _, scale = torch.compile(_quantize, fullgraph=True)(torch.ones(4), quantizer)
        assert scale.item() == 1 / number


def test_a_class_without_source_shares_its_salt_with_no_other():
    """What it calls can't be found again, so its graphs may not meet those of another process."""
    salts = []
    for _ in range(2):
        namespace = {"__name__": "typed_at_a_prompt"}
        exec(SOURCE.format(number=1.0), namespace)
        salts.append(source_salt(namespace["Foreign"]))
        assert source_salt(namespace["Foreign"]) == salts[-1]
    assert salts[0] != salts[1]


# ---------------------------------------------------------------------------------- recompiles


def test_a_changed_quantizer_recompiles_once_and_an_equal_one_never():
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(_quantize, backend=counter, fullgraph=True)
    x = torch.randn(4, 32)
    for quantizer, graphs in (
        (CurrentScaling(), 1),
        (CurrentScaling(), 1),
        (CurrentScaling(scale="pow2"), 2),
        (copy.deepcopy(CurrentScaling(scale="pow2")), 2),
        (CurrentScaling(), 2),
    ):
        compiled(x, quantizer)
        assert counter.frame_count == graphs
