"""Each extra brings what the code that it is for imports; what neither it nor the package requires is refused."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator

from tests.extras import REPOSITORY, brought_by, distributions

PACKAGE = REPOSITORY / "specactor_ray"
EXTRAS = {
    "integrations/trl.py": "trl",
    "integrations/verl": "verl",
    "serve/": "serve",
    "trainer/": "rl",
    "models/adapter": "rl",
    "learner/deepspeed": "deepspeed",
    "target/vllm": "vllm",
    "core/plot.py": "demo",
}
"""Beginning of a path → the extra that its code is for; other code has the package's own requirements."""
NAMED_BY_A_CHECK = {"triton", "wandb"}
"""Modules of no extra: torch brings triton on GPUs, and `tracking.wandb_project` is refused without wandb."""


def imports() -> Iterator[tuple[str, str]]:
    """Yield each foreign module at the top with the path that imports it, wherever in the code."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [one.name for one in node.names] if isinstance(node, ast.Import) else []
            for module in {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {PACKAGE.name}:
                yield module, path.relative_to(PACKAGE).as_posix()


def test_every_import_is_brought_by_the_requirements_or_by_the_extra_of_its_code() -> None:
    there, brought = distributions(), {extra: brought_by(extra) for extra in EXTRAS.values()}
    brought[""] = brought_by()
    used, lacking = set[str](), set[str]()

    def names(module: str) -> set[str]:
        return {module} | there.get(module, set())  # vLLM's build for CPUs has another name

    for module, path in set(imports()):
        extra = next((extra for begin, extra in EXTRAS.items() if path.startswith(begin)), "")
        if not names(module) & brought[""] and module not in NAMED_BY_A_CHECK:
            used.add(extra)
            if not names(module) & brought[extra]:
                lacking.add(f"{path}: {module}")
    assert not lacking and used == {*EXTRAS.values()}
