"""What the site needs beyond mkdocs: pages of whole folders in the nav, and pages that lie outside of docs/.

A document links to a file of the repository by its relative path, as a reader of the repository needs it. Documents
outside of docs/ that are listed in ``OUTSIDE`` become pages of the site; a link to any other file becomes its text.
"""

from __future__ import annotations

import importlib
import os.path
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

__all__ = ["expanded", "on_config", "on_files", "on_page_markdown", "outside"]

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)")
OUTSIDE = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "examples/**/*.md")
NOT_SEARCHED = ("results/", "decisions/")  # generated tables, and reasons of the past
SEARCHED = ("results/support.md", "results/h200.md")
FIRST = ("fsdp.md", "integrations/transformers.md")  # before other pages with "FSDP" or "Hugging Face" in their titles
FOR_CONTRIBUTORS = ("architecture.md", "contributing.md", "changelog.md", "testing.md", "benchmarks.md", "upstream.md")
PLACE = "<!-- names of the module -->"  # in a page of the reference


def outside(root: Path) -> dict[str, Path]:
    """Documents of the repository outside of docs/ that are pages of the site, by their places in the site."""
    found = [path for pattern in OUTSIDE for path in sorted(root.glob(pattern))]
    return {_place(path.relative_to(root).as_posix()): path for path in found}


def _place(path: str) -> str:
    """Where the site has a document outside of docs/: ``examples/train/README.md`` is ``examples/train.md``."""
    place = re.sub(r"/README\.md$", ".md", path)
    return (
        "examples/README.md"
        if place == "examples.md"
        else place.replace("CONTRIBUTING", "contributing")
        .replace("CHANGELOG", "changelog")
        .replace("SECURITY", "security")
    )


def expanded(nav: list[Any], pages: list[str]) -> list[Any]:
    """A nav whose entries ``folder/*`` are replaced by the pages of that folder, and ``*`` by those of docs/ itself.

    Args:
        nav: As mkdocs.yml has it.
        pages: All pages, by their paths from docs/.

    Returns:
        The nav. An index comes first in its folder; a page that the nav names itself stays where it is.
    """
    named = set(_named(nav))
    return _expanded(nav, sorted((page for page in pages if page not in named), key=_index_first))


def _index_first(page: str) -> tuple[str, bool, str]:
    return str(Path(page).parent), Path(page).name != "README.md", page


def _named(nav: list[Any]) -> list[str]:
    named: list[str] = []
    for entry in nav:
        if isinstance(entry, str):
            named.append(entry)
        else:
            for value in entry.values():
                named += _named([value] if isinstance(value, str) else value)
    return named


def _expanded(nav: list[Any], pages: list[str]) -> list[Any]:
    found: list[Any] = []
    for entry in nav:
        if isinstance(entry, dict):
            entry = {
                name: value if isinstance(value, str) else _expanded(value, pages) for name, value in entry.items()
            }
            found += [entry] if any(entry.values()) else []
        elif entry.endswith("*"):
            found += [page for page in pages if f"{Path(page).parent}/".removeprefix("./") == entry[:-1]]
        else:
            found.append(entry)
    return found


def _root(config: MkDocsConfig) -> Path:
    return Path(config.config_file_path).parent


def on_config(config: MkDocsConfig) -> None:
    """Replace the nav's ``folder/*``."""
    docs = Path(config.docs_dir)
    pages = [path.relative_to(docs).as_posix() for path in docs.rglob("*.md")]
    config.nav = expanded(config.nav, [*pages, *outside(_root(config))])


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the documents outside of docs/."""
    for place, path in outside(_root(config)).items():
        files.append(File.generated(config, place, abs_src_path=str(path)))
    return files


@cache
def _reference(root: Path) -> Any:
    """The pages of the reference, of the package in this checkout: mkdocs gives no hook a path to import from."""
    sys.path[:0] = [str(root), str(Path(__file__).parent)]
    return importlib.import_module("reference").Reference()


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in a page of the reference; turn links to files of the repository into links to their pages, or text."""
    root = _root(config)
    if page.file.src_uri.startswith(NOT_SEARCHED) and page.file.src_uri not in SEARCHED:
        page.meta["search"] = {"exclude": True}
    elif page.file.src_uri in FIRST:
        page.meta["search"] = {"boost": 2}
    elif page.file.src_uri in FOR_CONTRIBUTORS:
        page.meta["search"] = {"boost": 0.1}
    elif page.file.src_uri.startswith("reference/"):
        page.meta["search"] = {"boost": 0.3}  # guides come first
    if PLACE in markdown:
        return markdown.replace(PLACE, _reference(root).markdown(page.file.src_uri))
    places = {path.relative_to(root).as_posix(): place for place, path in outside(root).items()}
    here = next((path for path, place in places.items() if place == page.file.src_uri), f"docs/{page.file.src_uri}")

    def link(found: re.Match) -> str:
        image, text, path, anchor = found.groups()
        target = os.path.normpath(os.path.join(os.path.dirname(here), path))
        if (root / target).is_dir() and (root / target / "README.md").exists():
            target += "/README.md"
        if target == "README.md":
            target = "docs/README.md"
        place = places.get(target, target.removeprefix("docs/") if target.startswith("docs/") else None)
        if place is None or files.get_file_from_path(place) is None:
            return f"`{target}`" if text.startswith("`") or "/" in text else text
        relative = os.path.relpath(place, os.path.dirname(page.file.src_uri) or ".")
        return f"{image}[{text}]({relative}{anchor or ''})"

    parts = re.split(r"(^ *```.*?^ *```$)", markdown, flags=re.MULTILINE | re.DOTALL)  # fences are every other one
    return "".join(part if index % 2 else LINK.sub(link, part) for index, part in enumerate(parts))
