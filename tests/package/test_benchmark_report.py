"""`python -m benchmarks.report`: which scripts it runs, and the report."""

from __future__ import annotations

import ast
import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import report as bench

ROOT = Path(__file__).parents[2]


def test_one_script_runs_and_the_report_has_its_table(tmp_path, capsys):
    assert bench.main(["roofline", "--json", "--out", str(tmp_path)]) == 0
    (printed,) = json.loads(capsys.readouterr().out)
    assert printed["name"] == "roofline"
    assert json.loads((tmp_path / "results.json").read_text()) == [printed]
    report = (tmp_path / "report.md").read_text()
    for row in printed["rows"]:
        assert f"|{row['GPU']}|{row['casts']}|" in report


def test_every_name_is_a_script_that_prints_json():
    for name in bench.NAMES:
        source = (ROOT / "benchmarks" / f"{name}.py").read_text()
        assert '"--json"' in source, name
        assert f"python -m benchmarks.{name} [--json]" in ast.get_docstring(ast.parse(source))


@pytest.mark.skipif(not find_spec("matplotlib"), reason="draws with matplotlib, which is not installed")
def test_a_table_becomes_a_picture(tmp_path):
    rows = [{"block": "bf16", "saved MB": 2.0}, {"block": "rowwise", "saved MB": 1.0}]
    bench.write_report([{"name": "memory", "title": "saved", "seconds": 1.0, "rows": rows}], tmp_path)
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert "![memory](memory.png)" in (tmp_path / "report.md").read_text()


def test_a_script_that_fails_is_named_and_the_others_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "NAMES", ("no_such_script", "roofline"))
    assert bench.main(["--out", str(tmp_path)]) == 1
    assert "no_such_script failed" in capsys.readouterr().err
    report = (tmp_path / "report.md").read_text()
    assert "No module named benchmarks.no_such_script" in report
    assert "## roofline" in report


def test_an_unknown_name_is_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main(["kernelz"])
    assert stop.value.code == 2
    assert f"no benchmark is called kernelz; there are {', '.join(bench.NAMES)}" in capsys.readouterr().err
