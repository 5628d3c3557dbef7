"""Which module may import which: layers go one way, heavy packages stay in their leaves, `--help` stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "specactor_ray"

# A module may import its own part and the parts of lower layers. Parts on one line know nothing of each other.
# What a proposer is lies below the configuration, whose checks ask for it.
# The pure half of the controller (plain data and decisions) lies below the actors, which are told what to be with it.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("clock", "errors", "fallbacks", "json_text", "leftovers", "ragged", "signals"),
    ("child", "files"),
    ("jit",),
    ("messages",),
    ("config.named",),
    ("draft.proposer",),
    ("draft.registry",),
    ("config",),
    ("sampling",),
    ("verify._kernels", "verify.acceptance", "verify.cost", "verify.tgs"),
    ("verify.table",),
    ("verify.waiting",),
    ("verify.policy",),
    ("verify.racing",),
    ("speculation",),
    ("observability",),
    ("models",),
    ("draft", "target", "learner"),
    ("drafter_training",),
    ("queues",),
    ("cluster",),
    ("controller.reconcile",),
    ("controller.reconcile",),
    ("loops",),
    ("draft.requests",),
    ("draft.loop",),
    ("verify",),
    ("actors",),
    ("controller",),
    ("rollout",),
    ("integrations", "serve"),
    ("training",),
    ("simulation", "benchmarks", "submission", "drafter_training.command"),
    ("simulation.validation",),
    ("cli_options",),
    ("cli_scenario", "cli_validate"),
    ("cli_demo", "cli_plan", "cli_serve", "cli_setup", "cli_simulate", "drafter_cli"),
    ("cli",),
    ("__main__",),
)
LAYER_OF = {part: number for number, parts in enumerate(LAYERS) for part in parts}

# Heavy package → the modules (or folders) that may import it at all, inside functions included.
MAY_IMPORT = {
    "ray": (
        "cluster/",
        "actors/trainer.py",
        "controller/start.py",
        "rollout/rollout.py",
        "runs/rollout.py",  # shows the cluster's resources
        "integrations/verl.py",
        "integrations/verl_server.py",
        "trainer/trainer_group.py",
        "submission.py",
    ),
    "greenlet": ("simulation/kernel.py",),
    "vllm": ("target/vllm_bridge.py", "target/vllm_worker.py", "bench/vllm_peer.py"),
    "trl": ("integrations/trl.py",),
    **dict.fromkeys(("fastapi", "starlette", "uvicorn", "prometheus_client"), ("serve/",)),
    "verl": ("integrations/verl.py", "integrations/verl_server.py"),
    "triton": ("sampling/triton.py", "models/_paged_attention_triton.py"),
    "deepspeed": ("learner/engines/deepspeed_engine.py",),
    "transformers": ("models/", "draft/eagle/head.py", "training/", "drafter_training/", "benchmarks/gpu_check/"),
    "torch": (
        "sampling/",
        "models/",
        "draft/",
        "drafter_training/",
        "target/",
        "learner/",
        "drafter_training/",
        "actors/",
        "training/",
        "bench/side_by_side.py",
        "bench/vllm_peer.py",
        "benchmarks/gpu_check/",
    ),
}
# These take seconds to import: only inside the function that needs them.
ONLY_INSIDE_FUNCTIONS = ("vllm", "deepspeed", "transformers", "trl", "triton", "verl")
LEAVES = (
    "target/vllm_worker.py",
    "sampling/triton.py",
    "sampling/fused.py",
    "integrations/verl.py",
    "models/_paged_attention_triton.py",
)
"""Import such a package when they are themselves imported: vLLM and verl load theirs by name, functions the others."""
LEAF_MODULES = tuple(f"specactor_ray.{name[:-3].replace('/', '.')}" for name in LEAVES)


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imports_of(path: Path, *, top_level: bool = False) -> Iterator[str]:
    """Full names of the imported modules, those for type checkers left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    skipped = {id(node) for guard in ast.walk(tree) if _is_for_type_checkers(guard) for node in ast.walk(guard)}
    if top_level:
        functions = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))
        skipped |= {id(node) for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def part_of(module: str) -> str:
    """`models` for `models.loading`, `controller.reconcile` for itself: the longest part that has a layer."""
    first, _, rest = module.partition(".")
    two = f"{first}.{rest.partition('.')[0]}"
    return two if two in LAYER_OF else first


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_imports_go_down_the_layers(path: Path) -> None:
    part = part_of(module_of(path))
    if part == "__init__":
        assert not [name for name in imports_of(path, top_level=True) if name.startswith("specactor_ray")]
        return
    assert part in LAYER_OF, f"{part} has no place in the layers: add it to LAYERS and to docs/architecture.md"
    for name in imports_of(path):
        root, _, rest = name.partition(".")
        imported = part_of(rest)
        if root != "specactor_ray" or imported in ("", part, "__version__"):
            continue
        assert imported in LAYER_OF, f"{name_of(path)} imports {name}, which has no layer"
        assert LAYER_OF[imported] < LAYER_OF[part], f"{name_of(path)} imports {name}, which is not below it"


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_heavy_packages_stay_in_their_leaves(path: Path) -> None:
    for name in imports_of(path):
        allowed = MAY_IMPORT.get(name.partition(".")[0])
        if allowed is not None:
            assert name_of(path).startswith(allowed), f"{name_of(path)} imports {name}; only {allowed} may"
    for name in imports_of(path, top_level=True) if name_of(path) not in LEAVES else ():
        assert not name.startswith(LEAF_MODULES), f"{name_of(path)} imports {name}, whose package may be missing"
        package = name.partition(".")[0]
        assert package not in ONLY_INSIDE_FUNCTIONS, f"{name_of(path)} imports {name} when it is itself imported"


PURE = [
    f"verify/{name}.py" for name in ("_kernels", "acceptance", "cost", "policy", "racing", "table", "tgs", "waiting")
]


@pytest.mark.parametrize("path", [PACKAGE / name for name in PURE], ids=name_of)
def test_what_is_decided_depends_on_arguments_only(path: Path) -> None:
    """No clock, no threads, no chance, no messages, no models."""
    pure = ("__future__", "collections", "dataclasses", "typing", "enum", "math", "numpy", "operator")
    for name in imports_of(path):
        root, _, rest = name.partition(".")
        mine = part_of(rest).startswith(("verify.", "config", "jit", "ragged"))
        good = mine if root == "specactor_ray" else root in pure
        assert good and not name.startswith("numpy.random"), f"{name_of(path)} imports {name}"


def test_type_checking_imports_are_told_apart() -> None:
    path, name = PACKAGE / "training" / "record.py", "specactor_ray.rollout.rollout.Rollout"
    assert name in path.read_text(encoding="utf-8").replace(" import ", ".") and name not in set(imports_of(path))


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
    """Code that runs the command line as `python -m specactor_ray.cli.main` does."""
    return (
        f"import runpy, sys; sys.argv = {['specactor', *arguments]!r}; "
        "runpy.run_module('specactor_ray.cli.main', run_name='__main__')"
    )


@pytest.mark.parametrize(
    "code",
    [
        "import specactor_ray",
        "from specactor_ray import SamplingParams",
        "from specactor_ray.config import load_config; load_config('conf/local_cpu.yaml')",
        specactor("--help"),
        specactor("bench", "rollout", "--help"),
        specactor("drafter", "train", "--help"),
        specactor("plan", "--help"),
        specactor("config", "--config", "conf/local_cpu.yaml"),
    ],
    ids=[
        "import",
        "public name",
        "load_config",
        "--help",
        "bench rollout --help",
        "drafter train --help",
        "plan --help",
        "config",
    ],
)
def test_nothing_heavy_is_loaded(code: str) -> None:
    assert loaded_by(code) == ""


def test_lookups_and_seeds_load_no_torch() -> None:
    assert loaded_by("import specactor_ray.sampling.keyed, specactor_ray.draft.lookup.proposer") == "numba"


def test_the_check_sees_a_heavy_import() -> None:
    assert loaded_by("import sys, types; sys.modules['torch'] = types.ModuleType('torch')") == "torch"
