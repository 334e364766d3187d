"""The draw of docstrings that readers judge: seeded, and from all of the package."""

from __future__ import annotations

from pathlib import Path

import fp8compile
from benchmarks.docstrings import docstrings, drawn, main

PACKAGE = Path(fp8compile.__file__).parent


def test_the_same_seed_draws_the_same_and_another_one_others():
    root = PACKAGE / "optim"
    one = drawn(root, 1, 30)
    assert len(set(one)) == 30
    assert drawn(root, 1, 30) == one
    assert drawn(root, 2, 30) != one


def test_modules_classes_and_functions_are_drawn_from(tmp_path):
    method = '    def f(self) -> int:\n        """Of a method."""\n'
    (tmp_path / "a.py").write_text(f'"""Of a module."""\n\n\nclass A(B):\n    """Of a class."""\n\n{method}')
    assert sorted((line, name, text) for _, line, name, text in docstrings(tmp_path)) == [
        (1, "module a", "Of a module."),
        (4, "class A(B)", "Of a class."),
        (7, "A.f(self) -> int", "Of a method."),
    ]


def test_the_command_prints_where_each_is(tmp_path, capsys):
    (tmp_path / "a.py").write_text('def f():\n    """First.\n\n    Second.\n    """\n')
    main(["--seed", "3", "--root", str(tmp_path)])
    assert capsys.readouterr().out == f"{tmp_path}/a.py:1 f()\n    First.\n    \n    Second.\n\n"
