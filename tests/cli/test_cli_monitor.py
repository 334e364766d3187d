"""`fp8compile monitor`: what it reads, what it says, and a page that needs nothing else, also on a phone."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from fp8compile.cli import main
from fp8compile.cli.errors import UserError
from fp8compile.cli.monitor.charts import charts
from fp8compile.cli.monitor.readings import load_readings
from fp8compile.cli.monitor.summary import summary

pytest.importorskip("matplotlib")
LAYERS = ("model.layers.0.up", "model.layers.1.up")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def reading(step, **changes):
    """A line as a monitor writes it: two layers, two operands with the same FP8 data and one of its own."""
    line = {"step": step, "loss": 3.0 - 0.1 * step}
    for layer in LAYERS:
        for operand, share in (("weight", 0.0), ("weight_for_grad_input", 0.0), ("grad_output", 0.01 * step)):
            own = f"fp8/{layer}/{operand}"
            line |= {
                f"{own}/underflow": share, f"{own}/saturation": 0.0, f"{own}/nonfinite": 0.0, f"{own}/range": 14.5,
                f"{own}/sqnr": math.inf if operand == "weight" and step == 0 else 28.0 - step,
                f"{own}/exponents": [0.0, 4.0, 10.0] + [0.0] * 29,
            }  # fmt: skip
    return line | changes


@pytest.fixture
def run(tmp_path):
    def write(*lines, name="monitor.jsonl"):
        file = tmp_path / name
        file.write_text("\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines) + "\n")
        return file

    return write


def test_readings_are_in_the_order_of_steps_and_other_numbers_are_curves(run):
    file = run(reading(10), {"step": 20, "loss": 1.5}, reading(0, note="a text"))
    found = load_readings(file.parent)
    assert found.steps == (0, 10), "a line without statistics is no reading"
    assert found.layers == list(LAYERS)
    assert found.operands("sqnr") == ["weight", "weight_for_grad_input", "grad_output"]
    assert found.rows("grad_output", "underflow") == {layer: [0.0, 0.1] for layer in LAYERS}
    assert found.curves == {"loss": [(0, 3.0), (10, 2.0), (20, 1.5)]}
    assert found.last("grad_output", "exponents")[LAYERS[0]][2] == 10.0


def test_a_page_and_pngs_are_written_and_the_page_needs_nothing_else(run, capsys):
    file = run(*map(reading, range(4)))
    assert main(["monitor", str(file)]) == 0
    said = capsys.readouterr().out
    names = ["curves", "exponents", "ranges", "saturation", "sqnr", "underflow"]
    assert sorted(path.name for path in file.parent.glob("*.png")) == [f"monitor-{name}.png" for name in names]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in file.parent.glob("*.png"))
    page = file.with_suffix(".html")
    assert str(page) in said
    text = page.read_text()
    ET.fromstring(text.removeprefix("<!DOCTYPE html>\n"))  # well-formed
    assert text.count("<svg") == 6
    links = re.findall(r'(?:src|href|url)\s*[=(]\s*["\']?([^"\')\s>]+)', text)
    assert all(link.startswith(("#", "data:")) for link in links)
    assert set(re.findall(r'"(https?://[^"]*)"', text)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert "prefers-color-scheme: dark" in text
    assert "weight, weight_for_grad_input" in text, "operands with the same FP8 data share a panel"
    assert "currentColor" in text
    assert text.count('class="scale"') == 4, "the scales of heat maps stay when charts scroll"
    assert "codes" not in re.sub(r"<[^>]*>", "", text)


def test_nan_comes_first_and_an_unfinished_line_is_said(run, capsys):
    bad = {f"fp8/{LAYERS[1]}/grad_output/nonfinite": 3.0, f"fp8/{LAYERS[1]}/grad_output/sqnr": math.nan}
    file = run(reading(0), reading(7, **bad), reading(8, **bad), '{"step": 9, "fp8/mod')
    assert main(["monitor", str(file), "--no-png", "--html", str(file.parent / "page.html")]) == 0
    said = capsys.readouterr().out
    assert "3 readings of 2 layers, steps 0 to 8." in said
    assert "The last line is incomplete and was skipped." in said
    lines = said.splitlines()
    first = lines[next(at for at, line in enumerate(lines) if line.startswith("---")) + 1]
    assert re.split(r"\s{2,}", first) == [LAYERS[1], "grad_output", "NaN or infinite: 3 elements in step 7"]
    assert not list(file.parent.glob("*.png"))
    text = (file.parent / "page.html").read_text()
    assert '<tr class="loud">' in text
    assert "Dashed lines: steps with NaN" in text


def findings(file):
    return [row[1:] for row in summary(load_readings(file)).rows]


def test_what_is_usual_is_no_finding(run):
    quiet = {f"fp8/{layer}/weight/underflow": 0.104 for layer in LAYERS}  # as NVFP4 does with normal weights
    found = summary(load_readings(run(reading(0), reading(1, **quiet))))
    assert found.rows == ()
    assert found.columns == ()
    assert found.lines[-1] == "Nothing unusual was found."


@pytest.mark.parametrize(
    ("statistic", "values", "finding"),
    [
        ("underflow", (0.09, 0.0, 0.0), None),
        ("underflow", (0.11, 0.06, 0.0), None),
        ("underflow", (0.11, 0.055, 0.0), "underflows: 11.00%"),
        ("underflow", (0.21, 0.21, 0.21), "underflows: 21.00%"),
        ("saturation", (9e-5, 0.0, 0.0), None),
        ("saturation", (1e-4, 1e-4, 1e-4), "saturates: 0.01%"),
        ("sqnr", (18.1, 24.0, 30.0), None),
        ("sqnr", (18.0, 24.0, 30.0), "low signal-to-noise ratio: 18.0 dB (median of the layers: 24.0 dB)"),
    ],
)
def test_a_finding_is_far_from_the_other_layers_or_beyond_a_limit(run, statistic, values, finding):
    changes = {
        f"fp8/{layer}/{operand}/{statistic}": value
        for layer, value in zip((*LAYERS, "head"), values, strict=True)
        for operand in ("weight", "weight_for_grad_input")
    }
    found = findings(run(reading(0, **changes)))
    assert found[:1] == ([] if finding is None else [("weight, weight_for_grad_input", finding)])


def test_steps_and_exponents_are_whole_numbers_on_the_axis(run):
    drawn = {each.name: each.figure for each in charts(load_readings(run(*map(reading, range(3)))))}
    for name in ("curves", "exponents"):
        figure = drawn[name]
        figure.draw_without_rendering()
        for axes in figure.axes:
            assert len(axes.get_xticks()) > 0
            assert all(float(each).is_integer() for each in axes.get_xticks()), name


def test_zero_and_infinity_have_the_colors_of_the_ends(run):
    found = {each.name: each for each in charts(load_readings(run(*map(reading, range(3)))))}
    assert [text for _, text in found["underflow"].scale.ticks] == ["≤ 1%", "10%"]
    shown = found["underflow"].figure.axes[0].images[0].get_array()
    assert shown.min() == found["underflow"].scale.norm.vmin > 0
    assert found["sqnr"].figure.axes[0].images[0].get_array().max() == found["sqnr"].scale.norm.vmax == 28.0


def test_layers_are_chosen_by_patterns(run, capsys):
    file = run(reading(0), reading(1))
    assert main(["monitor", str(file), "--no-png", "--layers", "*.0.*"]) == 0
    assert "2 readings of 1 layer," in capsys.readouterr().out
    assert main(["monitor", str(file), "--layers", "*.7.*"]) == 2
    assert "no line has keys fp8/<layer>/<operand>/<statistic> that match *.7.*" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["{", '{"step": 0}'], "line 1: not JSON"),
        (["[1]", '{"step": 0}'], "line 1: expected a JSON object, got a list"),
        ([{"fp8/a/weight/amax": 1.0}], "line 1: the reading has no step"),
        ([{"step": 0, "loss": 1.0}], "no line has keys"),
    ],
)
def test_what_cant_be_read_is_said_with_its_line(run, lines, said):
    with pytest.raises(UserError, match=said):
        load_readings(run(*lines))


def test_a_folder_names_its_file(run, tmp_path):
    with pytest.raises(UserError, match="no such file or folder"):
        load_readings(tmp_path / "missing")
    with pytest.raises(UserError, match=r"has no monitor\.jsonl"):
        load_readings(tmp_path)
    run(reading(0), name="one.jsonl")
    assert load_readings(tmp_path).source.name == "one.jsonl"
    run(reading(0), name="monitor-nvfp4.jsonl")
    assert load_readings(tmp_path).source.name == "monitor-nvfp4.jsonl", "as examples/train names it"
    run(reading(0), name="monitor-bf16.jsonl")
    with pytest.raises(UserError, match=r"has 2 files that end in \.jsonl"):
        load_readings(tmp_path)


@pytest.mark.skipif(not any(map(shutil.which, BROWSERS)), reason="needs a browser")
def test_a_browser_shows_the_page_as_wide_as_a_phone(run):
    file = run(*map(reading, range(3)))
    assert main(["monitor", str(file), "--no-png"]) == 0
    page: Path = file.with_suffix(".html")
    script = (
        "<script>document.title=document.documentElement.scrollWidth<=document.documentElement.clientWidth</script>"
    )
    page.write_text(page.read_text().replace("</body>", f"{script}</body>"))
    browser = next(filter(None, map(shutil.which, BROWSERS)))
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=390,800",
        "--dump-dom",
        page.as_uri(),
    ]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert "<title>true</title>" in shown, "tables and charts scroll, and not the page"
