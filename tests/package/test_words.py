"""Users' pages and printed texts say what PyTorch engineers say: a short list of words that they do not contain."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# the literals of kernels are PTX; the keys of saved tensors have names of code
OF_CODE = {"kernels/stochastic_cvt.py", "tensor/saved.py"}
PACKAGE = ROOT / "fp8compile"
SOURCES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.relative_to(PACKAGE).as_posix() not in OF_CODE]
FOR_CONTRIBUTORS = {"architecture.md", "benchmarks.md", "testing.md"}
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in FOR_CONTRIBUTORS),
    *sorted((ROOT / "docs" / "integrations").glob("*.md")),
]
# CONTRIBUTING.md has the whole vocabulary
BETTER = {
    r"(?<!exit\s)codes": "FP8 data, FP8 weights or FP8 activations; quantized data, if four bits are meant too",
    r"beside": "compared with, next to, alongside",
    r"products": "GEMMs, matmuls",
    r"travel(s|led|ling)?": "is sent, is communicated, is all-gathered",
    r"mend(s|ed|ing)?": "fix",
    r"anew|once\s+more": "again",
    r"in\s+place\s+of": "instead of",
    r"behind": "after",
    r"outer\s+scales?": "global scale",
    r"refuse[sd]?": "raises a ValueError, is not supported",
    r"rehears(e|es|ed|al)|played": "dry run, simulated",
    r"owners?": "user",
    r"no\s+measurement": "not a measurement, an estimate",
    r"least\s+(times?|bytes)": "minimum time, lower bound",
    r"whole\s+(tensor|graph|model|weight|matrix)s?": "full tensor, single graph",
    r"to\s+the\s+bit": "bit for bit, bit-identical",
    r"lies|lie": "is stored, is laid out",
}


def prose(page: str) -> str:
    """A page with fenced, indented and inline code, and targets of links, blanked out; lines stay where they are."""
    blank = lambda found: re.sub(r"[^\n]", " ", found[0])  # noqa: E731
    for code in (r"^```.*?^```", r"^    (?! *[-*] ).*?$", r"`[^`]*`", r"\]\([^)]*\)"):
        page = re.sub(code, blank, page, flags=re.MULTILINE | re.DOTALL)
    return page


# in error messages and reports only
BETTER_IN_TEXTS = {
    r"; (it|they) (is|are|has|takes|returns)": "; it must be",
    r"(?<=\. )(Take|Mend)": "Use, Fix",
    r"Leave \w+ out": "Omit",
}


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each string literal of four words or more, without docstrings and regular expressions."""
    tree = ast.parse(source)
    skipped = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    skipped |= {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if id(node) in skipped or not isinstance(node, ast.JoinedStr | ast.Constant):
            continue
        parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in getattr(node, "values", [node])]
        text = "".join(part for part in parts if isinstance(part, str))
        if len(text.split()) > 3 and ")\\" not in text:
            yield node.lineno, text


def words_of(text: str) -> Iterator[str]:
    """Yield each word of the lists that a printed text contains, with the better word. Names of code don't count."""
    for said, better in (BETTER | BETTER_IN_TEXTS).items():
        for word in re.finditer(rf"(?<![\w.`'=-])(?:{said})(?![\w`'=(])", text, re.IGNORECASE):
            yield f'"{word[0]}" is better said as: {better}'


def findings(page: str) -> list[str]:
    """Each word of the list in a page: its line, and the better word."""
    text = prose(page)
    found = [
        (text[: word.start()].count("\n") + 1, f'"{word[0]}" is better said as: {better}')
        for said, better in BETTER.items()
        for word in re.finditer(rf"\b(?:{said})\b", text, re.IGNORECASE)
    ]
    return [f"line {line}: {said}" for line, said in sorted(found)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_none_of_these_words(page):
    found = findings(page.read_text())
    assert not found, "\n".join([str(page.relative_to(ROOT)), *found])


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_printed_text_has_none_of_these_words(source):
    found = [
        f"line {line}: {word}, in {text[:80]!r}" for line, text in texts(source.read_text()) for word in words_of(text)
    ]
    assert not found, "\n".join([str(source.relative_to(ROOT)), *found])


def test_a_word_is_found_with_its_line_and_not_in_code():
    page = "`codes`\n\n```python\ncodes = 1\n```\n\nExit codes, [codes](codes.md), and in place\nof them `codes`.\n"
    assert findings(page) == [
        'line 7: "codes" is better said as: FP8 data, FP8 weights or FP8 activations; quantized data, if four bits '
        "are meant too",
        'line 7: "in place\nof" is better said as: instead of',
    ]


def test_a_word_is_found_in_a_message_and_not_in_a_docstring_or_name():
    source = '"""A docstring may name codes."""\nraise ValueError(f"x is {x}; it is made of `codes`, not codes.")'
    ((line, text),) = texts(source)
    assert (line, text) == (2, "x is {}; it is made of `codes`, not codes.")
    assert [word.split('"')[1] for word in words_of(text)] == ["codes", "; it is"]
