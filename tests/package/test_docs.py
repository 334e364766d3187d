"""What the documents say is true: their code runs, their files exist, the API reference has every public name."""

from __future__ import annotations

import os
import re
import runpy
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from cheap_compiles import make_compiles_cheap
from own_arithmetic import Int8
from processes import print_to, process_context

import fp8compile as f8
from fp8compile._compat import TORCH_VERSION, cpu_has_rowwise_gemm
from fp8compile.ops.gemms.selection import select_gemm
from fp8compile.ops.gemms.table import EMULATED, NATIVE
from fp8compile.target import Build, Target, pretend_target

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    *(document for top in ("docs", "examples") for document in sorted((ROOT / top).rglob("*.md"))),
]
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OPTIONAL_CLIENTS = {"torchtitan.md": "torchtitan", "lightning.md": "lightning"}
# upstream.md has programs that show what PyTorch 2.13 and 2.15 do
NEED_RANKS = ("fsdp.md", "upstream.md")
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


def fences(document: Path) -> list[str]:
    return FENCE.findall(document.read_text())


def run_script(script: Path, backend: str) -> None:
    """Run a program in a process of its own, which prints beside it; its user's folder is not looked at.

    Args:
        script: The program.
        backend: Of torch.compile, where the program names none.
    """
    os.chdir(script.parent)
    os.environ["HOME"] = str(script.parent)
    print_to(script.with_suffix(".out"))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    make_compiles_cheap()
    torch.compile.__kwdefaults__["backend"] = backend
    runpy.run_path(str(script), run_name="__main__")


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if fences(d)], ids=lambda d: d.name)
def test_code_in_a_document_runs_from_top_to_bottom(document, tmp_path):
    if (client := OPTIONAL_CLIENTS.get(document.name)) and not find_spec(client):
        pytest.skip(f"needs {client}, which is not among what tests install")
    needs_ranks = document.name in NEED_RANKS or "fsdp_float8_all_gather(" in "".join(fences(document))
    if needs_ranks and TORCH_VERSION < (2, 12):
        pytest.skip(f"groups of ranks in a subclass need PyTorch 2.12, this is {torch.__version__}")
    script = tmp_path / "document.py"
    script.write_text("\n".join(fences(document)))
    # what Inductor makes of layers is shown elsewhere
    backend = "inductor" if document.name == "README.md" else "aot_eager"
    process = process_context().Process(target=run_script, args=(script, backend))
    process.start()
    process.join(300)
    process.kill()
    assert process.exitcode == 0, script.with_suffix(".out").read_text()[-3000:]


def test_getting_started_and_readme_have_code():
    with_code = {document.name for document in DOCUMENTS if fences(document)}
    assert {"README.md", "getting-started.md", "concepts.md", "numerics.md"} <= with_code


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOT / "CONTRIBUTING.md"], ids=lambda d: d.name)
def test_relative_links_lead_somewhere(document):
    missing = [link for link in LINK.findall(document.read_text()) if not (document.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOT / "CONTRIBUTING.md"], ids=lambda d: d.name)
def test_files_named_in_a_document_exist(document):
    named = re.findall(
        r"`((?:fp8compile|tests|compile_tests|benchmarks|examples|docs)/[\w/.-]+)`", document.read_text()
    )
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing


DECISIONS = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))


@pytest.mark.parametrize("document", [ROOT / "docs" / "architecture.md", *DECISIONS], ids=lambda d: d.stem)
def test_files_that_the_architecture_names_exist(document):
    """It names them as the package has them: from its root, or by what ends their path."""
    named = {
        name.rstrip("/") for name in re.findall(r"`([a-z_0-9]+(?:/[a-z_0-9]+)*(?:\.py|/))`", document.read_text())
    }
    package = ROOT / "fp8compile"
    there = [str(path.relative_to(ROOT)) for path in (*package.rglob("*"), ROOT / "tests", ROOT / "compile_tests")]
    tops = {path.name for path in ROOT.iterdir()}
    missing = sorted(name for name in named if not any(f"/{each}".endswith(f"/{name}") for each in there))
    assert [name for name in missing if name.split("/")[0] not in tops] == []


def test_the_architecture_is_one_page():
    page = re.sub(r"```python.*?```", "", (ROOT / "docs" / "architecture.md").read_text(), flags=re.DOTALL)
    assert len(page.splitlines()) <= 105  # besides the reference layer


@pytest.mark.parametrize("document", DECISIONS, ids=lambda d: d.stem)
def test_a_decision_has_a_number_a_date_and_its_reasons(document):
    title, _, date, *rest = document.read_text().splitlines()
    assert title.startswith(f"# {int(document.stem[:2])}. ")
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", date)
    assert [line for line in rest if line.startswith("#")] == ["## Context", "## Decision", "## What it rests on"]


def test_decisions_are_numbered_in_order_of_time_and_indexed():
    assert [int(document.stem[:2]) for document in DECISIONS] == list(range(1, len(DECISIONS) + 1))
    lines = [document.read_text().splitlines() for document in DECISIONS]
    assert [date for _, _, date, *_ in lines] == sorted(date for _, _, date, *_ in lines)
    rows = [f"| {date} | [{title[2:]}]({d.name}) |" for d, (title, _, date, *_) in zip(DECISIONS, lines, strict=True)]
    index = (ROOT / "docs" / "decisions" / "README.md").read_text().splitlines()
    assert [line for line in index if line.startswith("| 2")] == rows


WRITTEN = [each for each in DOCUMENTS if each.parent.name != "results"]


@pytest.mark.parametrize("document", [*WRITTEN, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=lambda d: d.name)
def test_prose_wraps_at_100(document):
    prose = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    lines = [line for line in prose.splitlines() if len(line) > 100]
    # a table's row, code, and a line that is one word or code span can't be broken
    wide = [
        line
        for line in lines
        if not line.startswith(("|", "    ")) and re.search(r"\s", re.sub(r"`[^`]*`", "", line.strip()))
    ]
    assert not wide


def cells(row):
    return len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`]*`", "", row))) - 1


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOT / "CONTRIBUTING.md"], ids=lambda d: d.name)
def test_a_table_has_a_head_and_rows_as_wide(document):
    prose = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    for table in re.findall(r"(?:^\|.*\n?)+", prose, re.MULTILINE):
        head, *rows = table.splitlines()
        assert re.fullmatch(r"\|[ :|-]+\|", "".join(rows[:1])), head
        assert {cells(row) for row in rows} == {cells(head)}, head


# ---------------------------------------------------------------------------------- the table of hardware


def scaled(*block, **options):
    return f8.CurrentScaling(block=block, **options)


BUILD = Build((2, 13))  # the table is for PyTorch 2.13
HARDWARE = {
    "CPU, PyTorch 2.13": Target("cpu", build=BUILD),
    "8.9 (L40S, RTX 40)": Target("cuda", (8, 9), build=BUILD),
    "9.0 (H100, H200)": Target("cuda", (9, 0), build=BUILD),
    "10.x, 11.0 (B200, B300, Thor)": Target("cuda", (10, 0), build=BUILD),
    "12.x (RTX 50, RTX PRO, GB10)": Target("cuda", (12, 0), build=BUILD),
}
OPERANDS = {
    "tensorwise": (scaled(-1, -1), scaled(-1, -1), torch.bfloat16),
    "rowwise, bfloat16 out": (scaled(1, -1), scaled(-1, 1), torch.bfloat16),
    "rowwise, another dtype out": (scaled(1, -1), scaled(-1, 1), torch.float32),
    'blockwise, `scale="fp32"`': (scaled(1, 128), scaled(128, 128), torch.bfloat16),
    'blockwise, `scale="pow2"`': (
        scaled(1, 128, scale="pow2"),
        scaled(128, 128, scale="pow2"),
        torch.bfloat16,
    ),
    "MX, 1 x 32 with a power of two": (
        scaled(1, 32, scale="e8m0_rceil"),
        scaled(32, 1, scale="e8m0_rceil"),
        torch.bfloat16,
    ),
    "NVFP4, 1 x 16 in two levels": (
        f8.TwoLevelScaling(),
        f8.TwoLevelScaling(block=(16, 1), packed="columns"),
        torch.bfloat16,
    ),
    "blocks of another size": (scaled(1, 16), scaled(16, 1), torch.bfloat16),
    "data with its own `dequantize`": (Int8(), Int8(block=(-1, 1)), torch.bfloat16),
}


def chosen(a, b, out_dtype, target):
    with pretend_target(target):
        try:
            return select_gemm(a, b, torch.device("cpu"), out_dtype)
        except RuntimeError:
            return "none"


@pytest.mark.skipif(not cpu_has_rowwise_gemm(), reason="the table shows the CPU of PyTorch 2.13 and later")
def test_the_table_of_hardware_is_that_of_the_gemms():
    rows = [["operands", *HARDWARE], ["---"] * (1 + len(HARDWARE))]
    rows += [
        [name, *(chosen(*operands, target) for target in HARDWARE.values())] for name, operands in OPERANDS.items()
    ]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines[1] = lines[1].replace(" ", "")
    assert "\n".join(lines) in (ROOT / "docs" / "numerics.md").read_text()


def test_the_table_of_gemms_has_all_in_their_order():
    text = (ROOT / "docs" / "numerics.md").read_text().split("| GEMM | what it calls |\n|---|---|\n")[1]
    named = [line.split("|")[1].strip() for line in text.split("\n\n")[0].splitlines()]
    assert named == [*(gemm.name for gemm in NATIVE), "registered", EMULATED.name]


@pytest.mark.parametrize("name", [n for n in f8.__all__ if n != "__version__"])
def test_public_name_has_a_docstring(name):
    assert (getattr(f8, name).__doc__ or "").strip()
