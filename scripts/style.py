#!/usr/bin/env python
"""Size and language of the package, as a table; exit code 1 if docstrings or comments contain a phrase to avoid.

    python scripts/style.py
    python scripts/style.py --largest 10    # the largest files, classes and functions, too

Phrases to avoid: processes are not persons (`who`, `nobody`, ...), and a docstring begins with a noun or a verb.
"""

from __future__ import annotations

import argparse
import ast
import io
import itertools
import re
import statistics
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from specactor_ray.core.console import figures_table, make_console

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "specactor_ray"
AVOIDED = re.compile(
    r"\b(who|whom|nobody|somebody|anybody|everybody|everyone|[Hh]armless|as one who)\b|^(Of|They themselves)\b"
)


class Part(NamedTuple):
    """A file, a class or a function."""

    lines: int
    name: str


class Source:
    """A Python file."""

    def __init__(self, path: Path) -> None:
        self.path, self.text = path, path.read_text(encoding="utf-8")
        self.tree = ast.parse(self.text, str(path))
        self.lines = self.text.count("\n")
        self.module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        """Dotted name."""


def sources(folder: Path) -> list[Source]:
    """All Python files below a folder."""
    return [Source(path) for path in sorted(folder.rglob("*.py"))]


def parts(files: list[Source], *kinds: Any) -> list[Part]:
    """Classes or functions, with their docstrings."""
    found = []
    for file in files:
        for node in ast.walk(file.tree):
            if isinstance(node, kinds):
                found.append(Part(node.end_lineno - node.lineno + 1, f"{file.module}.{node.name}"))
    return found


def prose(file: Source) -> Iterator[tuple[int, str]]:
    """Line number and text of every docstring and comment."""
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
    for token in tokenize.generate_tokens(io.StringIO(file.text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def repeated(files: list[Source]) -> int:
    """Class names that exist more than once."""
    names = sorted(node.name for file in files for node in ast.walk(file.tree) if isinstance(node, ast.ClassDef))
    return len({one for one, other in itertools.pairwise(names) if one == other})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--largest", type=int, default=0, metavar="N", help="list the N largest of each kind")
    options = parser.parse_args()
    files = sources(PACKAGE)
    lines = [Part(file.lines, file.module) for file in files]
    classes, functions = parts(files, ast.ClassDef), parts(files, ast.FunctionDef, ast.AsyncFunctionDef)
    spoken = 0
    for file in files:  # a comment beside code is no line of its own
        rows = file.text.splitlines()
        spoken += sum(text.count("\n") + 1 for at, text in prose(file) if rows[at - 1].lstrip()[0] in "#\"'r")
    total = sum(one.lines for one in lines)
    avoided = [
        (file.path.relative_to(ROOT), number, found.group())
        for file in files
        for number, text in prose(file)
        if (found := AVOIDED.search(text))
    ]
    figures = {
        "lines of the package": f"{total:,}",
        "files / classes": f"{len(files)} / {len(classes)}",
        "largest class / file / function": f"{max(classes).lines} / {max(lines).lines} / {max(functions).lines}",
        "median function": f"{statistics.median(one.lines for one in functions):g}",
        "modules beside packages": str(sum(path.name != "__init__.py" for path in PACKAGE.glob("*.py"))),
        "class names that exist twice": str(repeated(files)),
        "lines of docstrings and comments": f"{spoken / total:.1%}",
        "lines of scripts": f"{sum(file.lines for file in sources(ROOT / 'scripts')):,}",
        "lines of tests": f"{sum(file.lines for file in sources(ROOT / 'tests')):,}",
        "phrases to avoid": str(len(avoided)),
    }
    console = make_console()
    console.print(figures_table("style", figures.items()))
    for kind, found in (("files", lines), ("classes", classes), ("functions", functions)):
        for one in sorted(found, reverse=True)[: options.largest]:
            console.print(f"{kind}: {one.lines} {one.name}", highlight=False)
    for path, number, phrase in avoided:
        console.print(f"{path}:{number}: avoid {phrase!r}", highlight=False)
    return int(bool(avoided))


if __name__ == "__main__":
    sys.exit(main())
