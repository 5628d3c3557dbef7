"""Which module may import which: layers go one way, heavy packages stay in their leaves, `--help` stays light."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "specactor_ray"

# A module may import its own package and the packages before it, imports for type checkers included.
LAYERS = (
    *("core", "config", "plan", "sampling", "models", "transport", "table", "target"),
    *("draft", "verify", "learner", "distill", "cluster", "startup", "actors", "controller"),
    *("rollout", "runs", "trainer", "integrations", "serve", "simulation", "bench", "cli"),
)
LAYER_OF = {package: number for number, package in enumerate(LAYERS)}
BESIDE = ("__init__", "__main__")
"""Modules beside the packages."""

# Heavy package → the modules (or folders) that may import it at all, inside functions included.
MAY_IMPORT = {
    "ray": (
        "cluster/",
        "actors/trainer.py",
        "controller/controller.py",
        "rollout/rollout.py",
        "runs/rollout.py",  # shows the cluster's resources
        "integrations/verl.py",
        "integrations/verl_server.py",
        "trainer/trainer_ranks.py",
    ),
    "greenlet": ("simulation/kernel.py",),
    "matplotlib": ("core/plot.py",),
    "vllm": (
        "target/vllm.py",
        "target/vllm_cpu.py",
        "target/vllm_rank.py",
        "target/vllm_worker.py",
        "target/vllm_weights.py",
    ),
    "trl": ("integrations/trl.py",),
    **dict.fromkeys(("fastapi", "starlette", "uvicorn", "prometheus_client"), ("serve/",)),
    "verl": ("integrations/verl.py", "integrations/verl_server.py"),
    "triton": (
        "sampling/gpu",
        "target/vllm_cpu.py",
        "models/_layers_triton.py",
        "models/_paged_attention_triton.py",
        "models/_products_triton.py",
    ),
    "deepspeed": ("learner/deepspeed_engine.py",),
    "transformers": ("models/", "draft/eagle/head.py", "trainer/", "distill/", "runs/"),
    "torch": (
        "core/device.py",
        "sampling/",
        "models/",
        "draft/",
        "distill/",
        "target/",
        "learner/",
        "actors/",
        "runs/",
        "trainer/",
        "cli/doctor.py",
        "cli/train_drafter.py",
        "integrations/trl.py",
    ),
}
# These take seconds to import: only inside the function that needs them.
ONLY_INSIDE_FUNCTIONS = ("matplotlib", "vllm", "deepspeed", "transformers", "trl", "triton", "verl")
LEAVES = (
    "target/vllm_worker.py",
    "target/vllm_weights.py",
    "sampling/gpu.py",
    "sampling/gpu_noise.py",
    "integrations/verl.py",
    "models/_layers_triton.py",
    "models/_paged_attention_triton.py",
    "models/_products_triton.py",
)
"""Import such a package when they are themselves imported: vLLM and verl load theirs by name, functions the others."""
LEAF_MODULES = tuple(f"specactor_ray.{name[:-3].replace('/', '.')}" for name in LEAVES)


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@functools.cache
def imports_of(path: Path, *, top_level: bool = False) -> list[str]:
    """Full names of the imported modules; `top_level`: without those of functions and for type checkers."""
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    skipped, found = set[int](), list[str]()
    if top_level:
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
        outer = (node for node in ast.walk(tree) if isinstance(node, kinds) or _is_for_type_checkers(node))
        skipped = {id(node) for one in outer for node in ast.walk(one)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def _is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def test_imports_go_down_the_layers() -> None:
    for path in sources():
        package = module_of(path).partition(".")[0]
        if package in BESIDE:
            assert not [name for name in imports_of(path, top_level=True) if name.startswith("specactor_ray")]
            continue
        assert package in LAYER_OF, f"{package} has no layer: add it to LAYERS and to docs/architecture.md"
        for name in imports_of(path):
            root, _, rest = name.partition(".")
            imported = rest.partition(".")[0]
            if root == "specactor_ray" and imported not in (package, "__version__"):
                assert imported in LAYER_OF, f"{name_of(path)} imports {name}, which has no layer"
                assert LAYER_OF[imported] < LAYER_OF[package], f"{name_of(path)} imports {name}, which is not below it"


def test_heavy_packages_stay_in_their_leaves() -> None:
    for path in sources():
        for name in imports_of(path):
            allowed = MAY_IMPORT.get(name.partition(".")[0], "")
            assert name_of(path).startswith(allowed), f"{name_of(path)} imports {name}; only {allowed} may"
        for name in imports_of(path, top_level=True) if name_of(path) not in LEAVES else ():
            assert not name.startswith(LEAF_MODULES), f"{name_of(path)} imports {name}, whose package may be missing"
            package = name.partition(".")[0]
            assert package not in ONLY_INSIDE_FUNCTIONS, f"{name_of(path)} imports {name} when it is itself imported"


def test_files_do_not_import_one_another_in_circles() -> None:
    """Imports inside functions and for type checkers included: two files in a circle are one file, or what both need
    belongs below them."""
    graph = {name_of(path): imported_files(path) for path in sources()}
    TopologicalSorter(graph).prepare()  # its CycleError has the files


def imported_files(path: Path) -> set[str]:
    """Names of the files of the package that a file imports."""
    found = set[str]()
    for name in imports_of(path):
        place = REPOSITORY / name.replace(".", "/")  # a module, or a name in one
        files = (
            place.with_suffix(".py"),
            place / "__init__.py",
            place.parent.with_suffix(".py"),
            place.parent / "__init__.py",
        )
        if name.startswith("specactor_ray.") and (file := next(filter(Path.is_file, files), path)) != path:
            found.add(name_of(file))
    return found - {"__init__.py"}


PURE = [
    "core/step_cost.py",
    "plan/search.py",
    *(f"table/{name}.py" for name in ("_kernels", "requests", "table")),
    *(f"verify/{name}.py" for name in ("_kernels", "acceptance", "policy", "racing")),
]


@pytest.mark.parametrize("path", [PACKAGE / name for name in PURE], ids=name_of)
def test_what_is_decided_depends_on_arguments_only(path: Path) -> None:
    """No clock, no threads, no chance, no messages, no models."""
    pure = ["__future__", "bisect", "collections", "dataclasses", "enum", "itertools", "math", "operator", "typing"]
    pure += ["heapq", "numpy"]
    for name in imports_of(path):
        root, _, rest = name.partition(".")
        below = ("verify.", "table.", "plan.", "config.", "core.errors", "core.jit", "core.ragged", "core.types.")
        below += ("core.step_cost",)
        mine = rest.startswith((*below, "sampling.rules."))
        good = mine if root == "specactor_ray" else root in pure
        assert good and not name.startswith("numpy.random"), f"{name_of(path)} imports {name}"


HEAVY = ("ray", "torch", "vllm", "deepspeed", "transformers", "numba", "triton")
REPORT = """
import atexit, sys
def report(names):
    sys.stderr.write("HEAVY:" + ",".join(name for name in names if name in sys.modules))
"""


def loaded_by(code: str) -> str:
    """Which heavy packages a fresh interpreter has loaded after `code` (which may exit)."""
    program = f"{REPORT}\natexit.register(report, {HEAVY!r})\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stderr.rpartition("HEAVY:")[2]


def specactor(*arguments: str) -> str:
    """Code that runs the command line as `python -m specactor_ray` does."""
    return (
        f"import runpy, sys; sys.argv = {['specactor', *arguments]!r}; "
        "runpy.run_module('specactor_ray', run_name='__main__')"
    )


@pytest.mark.parametrize(
    "code",
    [
        "from specactor_ray import SamplingParams",
        "from specactor_ray.config import load_config; load_config('conf/local_cpu.yaml')",
        specactor("--help"),
        specactor("bench", "rollout", "--help"),
        specactor("config", "--config", "conf/local_cpu.yaml"),
    ],
    ids=[
        "public name",
        "load_config",
        "--help",
        "bench rollout --help",
        "config",
    ],
)
def test_nothing_heavy_is_loaded(code: str) -> None:
    assert loaded_by(code) == ""


def test_lookups_and_seeds_load_no_torch() -> None:
    assert loaded_by("import specactor_ray.sampling.keyed, specactor_ray.draft.lookup") == "numba"
