"""The site: it builds without a warning, fetches nothing from elsewhere, and has every page and public name."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="the site is made by mkdocs, of the docs extra")
ROOT = Path(__file__).parents[2]


def tool(name):
    """A file of docs/_site, which is no package."""
    spec = spec_from_file_location(name, ROOT / "docs" / "_site" / f"{name}.py")
    spec.loader.exec_module(found := module_from_spec(spec))
    return found


hooks, public, reference = tool("hooks"), tool("public"), tool("reference")
FETCHED = re.compile(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"([^\"]*)|<link\b[^>]*\bhref=\"([^\"]*)")
IMPORTED = re.compile(r"(?:@import\s+|url\()[\"']?(https?:[^\"')]*)")


def outside_hosts(site):
    """What pages and style sheets of the site fetch from elsewhere."""
    for page in site.rglob("*.html"):
        yield from (
            url for pair in FETCHED.findall(page.read_text()) for url in pair if re.match(r"(https?:)?//", url)
        )
    for sheet in site.rglob("*.css"):
        yield from IMPORTED.findall(sheet.read_text())


def missing_names(site):
    """Public names without an entry on their page, and names of the table that lead nowhere."""
    for page, module in reference.MODULES.items():
        html = (site / page.replace("README.md", "index.html").replace(".md", ".html")).read_text()
        linked = re.findall(r'<td><a href="([^"]*)"><code>(\w+)</code></a>', html)
        named = {name for _, name in linked}
        yield from (f"{module}.{name}" for name in reference.names_of(module) if name not in named)
        for link, name in linked:
            where, anchor = link.split("#")
            target = (site / "reference" / where).read_text() if where else html
            if f'id="{anchor}"' not in target:
                yield f"{module}.{name}: {link}"


def missing_integrations(site):
    """Names of ``__all__`` of the integrations without an entry; a library that is not there is not imported."""
    html = (site / "reference" / "integrations.html").read_text()
    for file in sorted((ROOT / "fp8compile" / "integrations").rglob("*.py")):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if module.count(".") == 2 and not module.endswith(public.OF_INTEGRATIONS):
            (names,) = re.findall(r"^__all__ = (\[.*?\])$", file.read_text(), re.MULTILINE | re.DOTALL)
            yield from (f"{module}.{name}" for name in ast.literal_eval(names) if f'id="{module}.{name}"' not in html)


def test_the_site_builds_and_is_whole(tmp_path):
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr[-3000:]  # strict: nav, links and anchors
    assert set(outside_hosts(tmp_path)) == set()
    assert list(missing_names(tmp_path)) == []
    assert list(missing_integrations(tmp_path)) == []
    assert "var __index" in (tmp_path / "search" / "search_index.js").read_text()  # search without a server


def test_a_page_that_fetches_from_elsewhere_is_found(tmp_path):
    (tmp_path / "a.html").write_text('<script src="https://cdn/x.js"></script><a href="https://fine">')
    (tmp_path / "a.css").write_text('@import "https://fonts/y.css"; a { background: url(data:image/png) }')
    assert list(outside_hosts(tmp_path)) == ["https://cdn/x.js", "https://fonts/y.css"]


def test_a_folder_in_the_nav_is_its_other_pages_with_the_index_first():
    nav = [{"A": ["a.md", {"B": ["b/*"]}, "b/named.md", "*"]}, {"Empty": ["c/*"]}]
    pages = ["a.md", "b/z.md", "b/README.md", "b/named.md", "other.md"]
    assert hooks.expanded(nav, pages) == [{"A": ["a.md", {"B": ["b/README.md", "b/z.md"]}, "b/named.md", "other.md"]}]
