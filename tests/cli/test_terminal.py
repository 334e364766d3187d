"""Tables for a terminal, for 80 and 200 columns, and for none: folded, noted, wrapped, never wider than told."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers
from expecttest import assert_expected_inline
from torch import nn

import fp8compile as f8
from examples.train import table as train_table
from fp8compile.cli import main
from fp8compile.cli.section import Section
from fp8compile.cli.terminal import print_section
from fp8compile.tables import Note, folded, folded_names, listed, paragraph, table_lines, terminal_width
from fp8compile.testing import emulation_note, graph_report

# ---------------------------------------------------------------------------------- equal rows


pytestmark = pytest.mark.filterwarnings("ignore:convert. keep_ends=")  # of so small a model


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], []),
        (["lm_head"], ["lm_head"]),
        ([f"layers.{i}.{m}" for i in range(32) for m in ("gate_proj", "up_proj")], ["layers.{0..31}.{gate,up}_proj"]),
        ([f"layers.{i}.fc" for i in (0, 1, 4, 5, 6, 9)], ["layers.{0,1,4..6,9}.fc"]),
        (["a.q_proj", "b.q_proj", "a.k_proj"], ["a.{q,k}_proj", "b.q_proj"]),
        (["x.w1", "x.w3", "head"], ["x.{w1,w3}", "head"]),
        (["x.y", "x.y_b"], ["x.{y,y_b}"]),
        (["x.00", "x.0"], ["x.{00,0}"]),
        (["a", "a.b"], ["a", "a.b"]),
        (["", "a"], ["{,a}"]),
    ],
)
def test_names_are_folded(names, expected):
    assert folded_names(names) == expected


def meant(pattern):
    """All names that a pattern stands for."""
    found = re.search(r"\{([^{}]*)\}", pattern)
    if found is None:
        return [pattern]
    words = []
    for part in found[1].split(","):
        first, dots, last = part.partition("..")
        words += map(str, range(int(first), int(last) + 1)) if dots else [part]
    return [name for word in words for name in meant(pattern[: found.start()] + word + pattern[found.end() :])]


def test_a_pattern_stands_for_exactly_its_names():
    generator = torch.Generator().manual_seed(0)
    known = [f"m.layers.{i}.{b}.{p}" for i in range(12) for b in ("attn", "mlp") for p in ("q_proj", "k_proj", "o")]
    for keep in (0.2, 0.5, 0.9):
        names = [name for name in known if torch.rand((), generator=generator) < keep]
        patterns = folded_names(names)
        assert sorted(name for pattern in patterns for name in meant(pattern)) == sorted(names)
        assert len(patterns) < len(names)


def test_rows_stay_in_the_order_of_the_first_of_each():
    rows = [("a", 1), ("l.0", 2), ("b", 3), ("l.1", 2), ("c", 1)]
    assert folded(rows) == [("{a,c}", 1), ("l.{0,1}", 2), ("b", 3)]


# ---------------------------------------------------------------------------------- widths

LEFT_OUT = Note("excluded by the filter !lm_head, which somebody wrote at some length", "no")
COLUMNS = ("layer", "out x in", "recipe", "bytes")
ROWS = [
    ("model.layers.{0..31}.self_attn.{q,o}_proj", "4096 x 4096", "rowwise", "1,234"),
    ("model.layers.{0..31}.mlp.experts", "8 x (14336 x 4096, 4096 x 14336)", "rowwise", "5"),
    ("lm_head", "32000 x 4096", LEFT_OUT, ""),
    ("model.embed", "32000 x 4096", Note("not a nn.Linear", "no"), "67"),
    ("model.pos", "32000 x 4096", LEFT_OUT, ""),
]


def shown(width):
    return "\n".join(table_lines(COLUMNS, ROWS, width=width, right=(3,)))


def test_a_table_at_80_columns():
    assert_expected_inline(
        shown(80),
        """\
layer                            out x in                         recipe   bytes
-------------------------------  -------------------------------  -------  -----
model.layers.{0..31}.self_attn.  4096 x 4096                      rowwise  1,234
{q,o}_proj
model.layers.{0..31}.mlp.        8 x (14336 x 4096,               rowwise      5
experts                          4096 x 14336)
lm_head                          32000 x 4096                     no [1]
model.embed                      32000 x 4096                     no [2]      67
model.pos                        32000 x 4096                     no [1]
[1] excluded by the filter !lm_head, which somebody wrote at some length
[2] not a nn.Linear""",
    )


def test_a_table_at_200_columns():
    assert_expected_inline(
        shown(200),
        """\
layer                                      out x in                          recipe   bytes
-----------------------------------------  --------------------------------  -------  -----
model.layers.{0..31}.self_attn.{q,o}_proj  4096 x 4096                       rowwise  1,234
model.layers.{0..31}.mlp.experts           8 x (14336 x 4096, 4096 x 14336)  rowwise      5
lm_head                                    32000 x 4096                      no [1]
model.embed                                32000 x 4096                      no [2]      67
model.pos                                  32000 x 4096                      no [1]
[1] excluded by the filter !lm_head, which somebody wrote at some length
[2] not a nn.Linear""",
    )


@pytest.mark.parametrize("width", [48, 57, 80, 100, 200])
def test_no_line_is_wider_than_told_and_no_word_is_lost(width):
    lines = shown(width).splitlines()
    assert max(map(len, lines)) <= width
    kept = "".join(shown(width).split())
    assert sum(kept.count(digit) for digit in "0123456789") == sum(
        "".join(shown(400).split()).count(digit) for digit in "0123456789"
    )


def test_the_width_is_that_of_columns_or_100_without_a_terminal(monkeypatch):
    for given, width in (("80", 80), ("200", 200), ("10", 40)):
        monkeypatch.setenv("COLUMNS", given)
        assert terminal_width() == width
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr(sys, "__stdout__", None)
    assert terminal_width() == 100


def test_a_list_of_operators_takes_three_lines():
    lines = listed("  forward: ", [f"aten.operator_{number}" for number in range(90)], width=80)
    assert_expected_inline(
        "\n".join(lines),
        """\
  forward: aten.operator_0, aten.operator_1, aten.operator_2, aten.operator_3,
    aten.operator_4, aten.operator_5, aten.operator_6, aten.operator_7,
    aten.operator_8, aten.operator_9, aten.operator_10, and 79 more""",
    )
    assert listed("  forward: ", ["aten.mm"], width=80) == ["  forward: aten.mm"]
    counted = listed("  ", [f"aten.operator_{number} x13" for number in range(9)], width=80)
    assert all(line.rstrip(",").endswith(("x13", "more")) for line in counted)


def test_a_long_class_name_is_broken_between_its_words():
    rows = [(f"model.layers.{{0..31}}.mlp.{name}", "Qwen3MoeTopKRouter", "8 x 64") for name in ("gate", "experts")]
    text = "\n".join(table_lines(("layer", "module", "out x in"), rows, width=40))
    assert re.findall(r"\b(?:Qwen|TopK|Router|Moe)\w*", text) == ["Qwen3Moe", "TopKRouter"] * 2


def test_a_long_line_is_wrapped_and_indented():
    text = "  graph break at " + " ".join(["word"] * 20)
    assert paragraph(text, width=60)[1].startswith("    word")
    assert " ".join(line.strip() for line in paragraph(text, width=60)) == text.strip()


# ---------------------------------------------------------------------------------- what stands out


def printed(capsys, monkeypatch, *, is_terminal, **environment):
    for name, value in {"COLUMNS": "80", **environment}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda self: is_terminal, raising=False)
    print_section(Section(title="title", columns=("a", "b"), rows=(("x", "1"), ("y", "2")), loud=frozenset({1})))
    return capsys.readouterr().out


def test_a_terminal_gets_colours_and_a_file_none(capsys, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[1;31my  2\x1b[0m" in printed(capsys, monkeypatch, is_terminal=True)
    assert "\x1b" not in printed(capsys, monkeypatch, is_terminal=False)
    assert "\x1b" not in printed(capsys, monkeypatch, is_terminal=True, NO_COLOR="1")


# ---------------------------------------------------------------------------------- those who use it


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up_proj": nn.Linear(64, 128), "down_proj": nn.Linear(128, 64)}) for _ in range(6)
        )
        self.router = nn.Linear(64, 8)
        self.lm_head = nn.Linear(64, 256)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer["down_proj"](layer["up_proj"](x).relu())
        return self.lm_head(x)


def converted():
    torch.manual_seed(0)
    return f8.convert(Model().bfloat16(), f8.recipes.rowwise(), keep_ends=1, filter=["*", "!lm_head"])


@pytest.fixture
def wide(monkeypatch, request):
    monkeypatch.setenv("COLUMNS", str(request.param))


@pytest.mark.parametrize("wide", [80], indirect=True)
def test_a_conversion_report_at_80_columns(wide):
    assert_expected_inline(
        str(f8.conversion_report(converted())),
        """\
layer                    module  out x in  recipe   GEMMs in FP8
-----------------------  ------  --------  -------  ------------
layers.{0,5}.up_proj     Linear  128 x 64  -        [1]
layers.{0,5}.down_proj   Linear  64 x 128  -        [1]
layers.{1..4}.up_proj    Linear  128 x 64  rowwise  all three
layers.{1..4}.down_proj  Linear  64 x 128  rowwise  all three
router                   Linear  8 x 64    -        [1]
lm_head                  Linear  256 x 64  -        [2]
[1] at one end of the model (keep_ends=1)
[2] excluded by the filter *, !lm_head
8 of 14 converted""",
    )


@pytest.mark.parametrize("wide", [80], indirect=True)
def test_a_graph_report_has_no_list_of_operators_over_three_lines(wide):
    text = str(graph_report(converted(), torch.randn(4, 64, dtype=torch.bfloat16)))
    lines = text.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("  forward: "))
    assert lines[at].startswith("  forward: fp8compile.linear.default x8, ")
    assert "backward" in "".join(lines[at + 1 : at + 4])


@pytest.mark.parametrize("wide", [80], indirect=True)
def test_the_table_of_training_at_80_columns(wide, monkeypatch):
    column = {"held-out loss (nats/byte)": "1.79", "FP8 GEMMs seen by the profiler": "63 of 66 (94.7% of flops)"}
    monkeypatch.setattr(train_table, "_column", lambda rows, arm: column)
    arms = [SimpleNamespace(name=name) for name in ("rowwise", "bf16")]
    assert_expected_inline(
        train_table.table([], arms),
        """\
                                              rowwise                       bf16
--------------------------  -------------------------  -------------------------
held-out loss (nats/byte)                        1.79                       1.79
FP8 GEMMs seen by the       63 of 66 (94.7% of flops)  63 of 66 (94.7% of flops)
profiler""",
    )


EXAMPLE = """
import torch
from test_terminal import converted

def example():
    return converted(), torch.randn(16, 64, dtype=torch.bfloat16)
"""


def explained(tmp_path, monkeypatch, capsys, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shown.py").write_text(EXAMPLE)
    assert main(["explain", "shown.py", "--no-gpu"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= columns
    return text[: text.index("\ngraphs\n")]  # the rest has PyTorch's operators


def test_explain_at_80_columns(tmp_path, monkeypatch, capsys):
    assert_expected_inline(
        explained(tmp_path, monkeypatch, capsys, 80),
        """\
is this really running in FP8?
YES, as the recipes specify: 24 of 38 GEMMs of linear layers run in FP8, 8 of 14
  layers are converted

linear layers, and what their GEMMs really run in
FP8 formats are those of the two operands in the graphs; a single dtype means
  high precision.
layer               out x in  recipe   GEMMs                really run in
------------------  --------  -------  -------------------  --------------------
layers.0.up_proj    128 x 64  - [1]    output, grad_weight  bfloat16
                                       grad_input           not in the graph [2]
layers.{0,5}.       64 x 128  - [1]    all three            bfloat16
down_proj
layers.{1..4}.      128 x 64  rowwise  all three            e4m3 x e4m3 rowwise
up_proj
layers.{1..4}.      64 x 128  rowwise  all three            e4m3 x e4m3 rowwise
down_proj
layers.5.up_proj    128 x 64  - [1]    all three            bfloat16
router              8 x 64    - [1]    all three            not in the graph [3]
lm_head             256 x 64  - [4]    all three            bfloat16
[1] at one end of the model (keep_ends=1)
[2] its input needs no gradient
[3] the layer is not called
[4] excluded by the filter *, !lm_head

padding
no FP8 GEMM is padded: all sizes are multiples of what the GEMM requires
""",
    )


def test_the_graphs_are_printed_before_code_for_a_gpu_is_generated(tmp_path, monkeypatch, capsys):
    from fp8compile.testing.explain import explanation

    def generates(*args, **kwargs):
        shown.append(sys.stdout is not real and capsys.readouterr().out)
        return explanation.GpuExplanation(gpu="NVIDIA H200 SXM", problem="left out")

    shown, real = [], sys.stdout
    monkeypatch.setattr(explanation, "explain_gpu", generates)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shown.py").write_text(EXAMPLE)
    assert main(["explain", "shown.py"]) == 0
    (before,) = shown
    lines = before.splitlines()
    assert lines[1].startswith("YES, as the recipes specify: 24 of 38 GEMMs")
    assert "according to the peak rates of an NVIDIA H200 SXM: " in before
    assert "bf16's speed with these inputs, too small to benefit" in " ".join(before.split())
    assert "\ngraphs\n" in before
    after = capsys.readouterr().out
    assert after.startswith("launches on NVIDIA H200 SXM\nno generated code: left out")


@pytest.mark.parametrize(
    ("recipe", "line"),
    [
        ("nvfp4", "nvfp4 is emulated here in 8 layers: the values are correct, but it is much slower than bf16"),
        (
            "blockwise",
            "blockwise is emulated here in 8 layers: the values are correct, but it is much slower than bf16",
        ),
    ],
)
def test_emulation_is_said_before_a_run(recipe, line):
    model = f8.convert(Model().bfloat16(), f8.recipes.by_name(recipe), keep_ends=1, filter=["*", "!lm_head"])
    assert emulation_note(model) == line
    assert emulation_note(Model()) == ""
    with torch.device("meta"):
        assert emulation_note(f8.convert(Model().bfloat16(), f8.recipes.by_name(recipe))) == ""


def test_experts_that_are_multiplied_group_by_group_are_emulated_like_linears():
    config = transformers.MixtralConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        num_local_experts=2, vocab_size=64,
    )  # fmt: skip
    model = f8.convert(transformers.MixtralForCausalLM(config).bfloat16(), f8.recipes.nvfp4(), filter="*.experts")
    assert emulation_note(model).startswith("nvfp4 is emulated here in 1 layer: ")
    f8.revert(model)
    assert emulation_note(model) == ""
