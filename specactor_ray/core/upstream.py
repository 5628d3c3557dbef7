"""Packages of which this one uses private parts: the versions that were tested, and what the installed one lacks.

Parts are looked up in the sources: importing vLLM, TRL or verl takes many seconds, and verl imports this package.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.metadata
import importlib.util
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from specactor_ray.core.environment import fall_back
from specactor_ray.core.errors import first_of

_ROOT = Path(__file__).parents[1]
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Found = tuple[str, ast.AST]
"""Module, and definition in it."""


@dataclass(frozen=True, slots=True)
class Upstream:
    """A package, and the parts of it that this one uses."""

    name: str
    """Name of its top-level module."""
    tested: tuple[str, ...]
    """Versions, or their beginnings, with which the tests have passed; the last one is recommended."""
    parts: Mapping[str, Sequence[str]]
    """Path of a module or class → names in it; a function that gets arguments has their names, as in `step(batch)`."""
    users: tuple[str, ...] = ()
    """Patterns of files below `specactor_ray`: what these import from the package are parts, too, and their classes
    define the abstract methods of its classes."""
    distributions: Sequence[str] = ()
    """Distributions that bring the package; by default the one of its name."""

    def installed(self) -> tuple[str, str] | None:
        """Distribution and version; None if it is not installed."""
        for name in self.distributions or (self.name,):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                return name, importlib.metadata.version(name)
        return None

    @property
    def install(self) -> str:
        """Command that installs a tested version."""
        version = self.tested[-1]
        return f"pip install '{self.name}=={version}{'.*' if version.count('.') < 2 else ''}'"

    def untested(self) -> str:
        """A sentence about an installed version that was not tested; empty if it was."""
        distribution, version = self.installed() or ("", self.tested[-1])
        if any(version == one or version.startswith((f"{one}.", f"{one}+")) for one in self.tested):
            return ""
        return f"{distribution} {version} is untested here; tested: {', '.join(self.tested)}"

    def note_untested(self, logger: logging.Logger) -> None:
        """Name an untested version in log and summary."""
        if untested := self.untested():
            fall_back(logger, untested)

    def lacking(self) -> str:
        """Why the package cannot be used, such as `vllm 0.34.0 has no vllm.a.B.c, which this package uses`; empty if
        it is installed with every part."""
        if (installed := self.installed()) is None:
            return f"{self.name} is not installed"
        if missing := _missing(self.name, tuple(self._wanted())):
            return f"{' '.join(installed)} has no {first_of(missing)}, which this package uses"
        if undefined := _undefined(self.name, self.users):
            return f"{' '.join(installed)} calls {first_of(undefined)}, which this package does not define"
        return ""

    def _wanted(self) -> Iterator[str]:
        for owner, names in self.parts.items():
            yield from (f"{owner}.{name}" for name in names)
        for tree in _trees(self.users):
            yield from _imported(self.name, tree).values()


@functools.cache
def _missing(package: str, wanted: Sequence[str]) -> list[str]:
    sources = Sources(package)
    return [part for part in dict.fromkeys(wanted) if not sources.has(part)]


@functools.cache
def _undefined(package: str, users: Sequence[str]) -> list[str]:
    """Abstract methods of the package's classes that classes of this package, derived from them, lack."""
    sources, found = Sources(package), list[str]()
    for tree in _trees(users):
        imported = _imported(package, tree)
        for one in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            own = {name for statement in one.body for name in _names(statement)}
            for base in (imported.get(ast.unparse(node), "") for node in one.bases):
                found += [f"{base}.{name}" for name in sources.abstract(base) if name not in own]
    return found


def _imported(package: str, tree: ast.AST) -> dict[str, str]:
    """Name in a module → path in the package from which it is imported."""
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module is not None)
    own = (node for node in imports if str(node.module).partition(".")[0] == package)
    return {alias.asname or alias.name: f"{node.module}.{alias.name}" for node in own for alias in node.names}


def _trees(users: Sequence[str]) -> list[ast.Module]:
    return [_tree(path) for pattern in users for path in sorted(_ROOT.glob(pattern))]


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


class Sources:
    """Definitions in the sources of an installed package, which is not imported."""

    def __init__(self, package: str) -> None:
        spec = importlib.util.find_spec(package)
        self._package, self._folders = package, list((spec and spec.submodule_search_locations) or ())
        self._members: dict[ast.ClassDef, dict[str, _Found]] = {}

    def has(self, part: str) -> bool:
        """Whether a dotted path exists, and is a function with the parameters in parentheses behind it."""
        path, _, parameters = part.rstrip(")").partition("(")
        _, node = self.find(path) or ("", None)
        if not parameters:
            return node is not None
        return isinstance(node, _Function) and set(parameters.split(", ")) <= set(_parameters(node))

    def find(self, path: str) -> _Found | None:
        """Module and definition of a dotted path, through re-exports and base classes; None if there is none."""
        if (tree := self._module(path)) is not None:
            return path, tree
        owner_path, _, name = path.rpartition(".")
        if not owner_path or (owner := self.find(owner_path)) is None:
            return None
        module, node = owner
        if isinstance(node, ast.ClassDef):
            return self.members(module, node).get(name)
        return self._named(module, name, node) if isinstance(node, ast.Module) else None

    def fields(self, path: str) -> list[str]:
        """Names that a class annotates in its body: the fields of a dataclass."""
        _, node = self.find(path) or ("", None)
        body = node.body if isinstance(node, ast.ClassDef) else []
        return [name for one in body if isinstance(one, ast.AnnAssign) for name in _names(one)]

    def abstract(self, path: str) -> list[str]:
        """Names of the abstract methods of a class."""
        module, node = self.find(path) or ("", None)
        members = self.members(module, node) if isinstance(node, ast.ClassDef) else {}
        methods = {name: one for name, (_, one) in members.items() if isinstance(one, _Function)}
        return [name for name, one in methods.items() if "abstractmethod" in map(ast.unparse, one.decorator_list)]

    def members(self, module: str, node: ast.ClassDef) -> dict[str, _Found]:
        """Methods, fields and attributes of a class of a module, and of its bases as far as the package has them."""
        if (found := self._members.get(node)) is not None:
            return found
        found = self._members[node] = {}
        for base in reversed(node.bases):
            owner = self.find(f"{module}.{ast.unparse(base).partition('[')[0]}")
            if owner is not None and isinstance(owner[1], ast.ClassDef):
                found |= self.members(owner[0], owner[1])
        for one in ast.walk(node):
            if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store) and ast.unparse(one.value) == "self":
                found[one.attr] = module, one
        found |= {name: (module, one) for one in node.body for name in _names(one)}
        return found

    def _module(self, path: str) -> ast.Module | None:
        first, *rest = path.split(".")
        for folder in self._folders if first == self._package else ():
            place = Path(folder, *rest)
            if (file := place / "__init__.py").is_file() or (file := place.with_suffix(".py")).is_file():
                return _tree(file)
        return None

    def _named(self, module: str, name: str, tree: ast.AST) -> _Found | None:
        for node in _statements(tree):
            if name not in _names(node):
                continue
            if not isinstance(node, ast.ImportFrom):
                return module, node
            source = _absolute(node, module, self._module(f"{module}.__init__") is not None)
            own = next(alias.name for alias in node.names if name in (alias.asname, alias.name))
            return self.find(f"{source}.{own}") if source.partition(".")[0] == self._package else (module, node)
        return None


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Statements of a module or class, those behind conditions included."""
    for node in ast.iter_child_nodes(tree):
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            yield from _statements(node)


def _names(node: ast.AST) -> Iterable[str]:
    """Names that a statement defines."""
    match node:
        case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
            return [node.name]
        case ast.ImportFrom() | ast.Import():
            return [alias.asname or alias.name for alias in node.names]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case ast.Assign():
            return [one.id for one in node.targets if isinstance(one, ast.Name)]
    return ()


def _parameters(node: _Function) -> list[str]:
    own = node.args
    return [one.arg for one in (*own.posonlyargs, *own.args, *own.kwonlyargs)]


def _absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    """Full name of the module that an import in a module or package names."""
    if not node.level:
        return node.module or ""
    folder = module.split(".")[: len(module.split(".")) + is_package - node.level]
    return ".".join((*folder, *((node.module,) if node.module else ())))
