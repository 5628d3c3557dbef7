"""Measurement of `specactor profile`: costs of drafting and verifying on this machine, and acceptance of drafts."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from specactor_ray.bench.micro import refuse_existing
from specactor_ray.bench.profile_process import Axes, Measured, Share, measure_share
from specactor_ray.config.schema import MAX_WINDOW, Config, ModeName
from specactor_ray.core.child import run_in_child
from specactor_ray.core.errors import ConfigError, InputError
from specactor_ray.core.files import require_folder, write_json
from specactor_ray.core.machine import count_gpus
from specactor_ray.core.progress import PhaseProgress, show_steps
from specactor_ray.core.signals import sigterm_interrupts
from specactor_ray.plan.profile import KIND, SCHEMA
from specactor_ray.rollout.planning import as_decoupled, facts_of
from specactor_ray.rollout.preflight import check_target, export_what_drafters_read, require_named
from specactor_ray.rollout.prompts import read_prompts


def run_profile(config: Config, axes: Axes, devices: Sequence[int], output: Path, console: Console) -> dict[str, Any]:
    """Measure `target` and `drafters`, and write the profile, which is returned; a file is never overwritten.

    Each of `devices` (core counts, or 1 on a GPU) is measured in its own process, pinned to that many cores; the
    largest is measured first and records the outputs on which acceptance is measured. Nothing else should run here.

    Raises:
        UserError: The configuration, the prompts, the models or the arguments are wrong.
        SpecActorError: A process failed or died.
    """
    if config.data.path is None:
        raise ConfigError("data.path", "is not set.", "name a file of prompts: data.path=prompts.jsonl")
    prompts = read_prompts(config.data.path, config.data.limit)
    _reject_devices(config, devices, len(os.sched_getaffinity(0)))
    refuse_existing(output, "--output")
    if not output.parent.is_dir():
        raise InputError(f"--output: there is no folder {output.parent}; make it first")
    require_folder(output.parent, "--output")
    config = copy.deepcopy(as_decoupled(config))
    if config.drafters:
        config.mode = ModeName.decoupled  # everything is measured, whatever mode it will run in
    require_named(config)
    check_target(config)
    config = export_what_drafters_read(config)
    facts = facts_of(config)
    begin = time.monotonic()
    shares = _measure(config, axes, devices, tuple(prompts), console)
    recorded = shares[0].recorded
    data = {
        "kind": KIND,
        "schema": SCHEMA,
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "seconds": round(time.monotonic() - begin, 1),
        **facts,
        "prompt_tokens": sum(len(one.prompt_token_ids) for one in recorded) / len(recorded),
        "verify": [asdict(point) for share in shares for point in share.verify],
        "methods": _methods(config, shares),
    }
    try:
        write_json(output, data, new=True)
    except OSError as error:
        raise InputError(f"--output: {output} cannot be written ({error.strerror})") from None
    return data


def _measure(
    config: Config, axes: Axes, devices: Sequence[int], prompts: tuple[Any, ...], console: Console
) -> list[Measured]:
    """Measure one share per device count, the largest first: it records the outputs for the others, too."""
    counts = sorted(set(devices), reverse=True)
    total = 1 + len(config.drafters) + len(counts) * axes.points(len(config.drafters))
    shares: list[Measured] = []
    with sigterm_interrupts(), PhaseProgress(console, "profile", total) as progress:
        show = show_steps(progress, total)
        for count in counts:
            recorded = shares[0].recorded if shares else ()
            share = Share(config, count, axes, prompts if not shares else (), recorded)

            def report(text: str, where: str = f"{count} {'GPU' if config.target.gpus else 'core(s)'}") -> None:
                show(f"{where}: {text}")

            shares.append(run_in_child(measure_share, share, f"profile-{count}", report))
    return shares


def parse_axes(batches: Sequence[int], windows: Sequence[int], contexts: Sequence[int], repeats: int) -> Axes:
    """Axes in order, each value once. Raises InputError for a value out of range."""
    for option, values, largest in (
        ("--batches", batches, 4096),
        ("--windows", windows, MAX_WINDOW),
        ("--contexts", contexts, 1 << 20),
        ("--repeats", [repeats], 1000),
    ):
        bad = [value for value in values if not 1 <= value <= largest]
        if bad or not values:
            raise InputError(f"{option}: {bad[0] if bad else 'nothing'} is given; use numbers from 1 to {largest}")
    return Axes(tuple(sorted(set(batches))), tuple(sorted(set(windows))), tuple(sorted(set(contexts))), repeats)


def default_devices(config: Config) -> list[int]:
    """1, 2, 4, ... cores of those this process may use; one GPU."""
    if config.target.gpus:
        return [1]
    cores = len(os.sched_getaffinity(0))
    return [1 << power for power in range(cores.bit_length()) if 1 << power <= cores]


def _methods(config: Config, shares: Sequence[Measured]) -> dict[str, Any]:
    """Points and acceptance of each method."""
    from specactor_ray.models.identity import method_identity

    return {
        drafter.method: {
            "identity": method_identity(drafter),
            "free": bool(config.target.gpus) and not drafter.gpus,
            "points": [asdict(point) for share in shares for point in share.drafting[drafter.method]],
            "acceptance": shares[0].acceptance[drafter.method],
        }
        for drafter in config.drafters
    }


def _reject_devices(config: Config, devices: Sequence[int], cores: int) -> None:
    if config.target.tensor_parallel > 1:
        problem = f"{config.target.tensor_parallel} ranks, and a profile is of one."
        raise ConfigError("target.tensor_parallel", problem, "use 1.")
    if config.target.gpus:
        if list(devices) != [1]:
            raise InputError("--devices: a verifier runs on one GPU; use 1")
        if not count_gpus():
            raise ConfigError("target.gpus", "there is no GPU on this machine.", "use target.gpus=0.")
        return
    bad = [count for count in devices if not 1 <= count <= cores]
    if bad or not devices:
        raise InputError(
            f"--devices: {bad[0] if bad else 'nothing'} cannot be measured; this process has {cores} core(s)"
        )
    for index, drafter in enumerate(config.drafters):
        if drafter.gpus:
            problem = "the target runs on cores, and a plan counts devices of one kind."
            raise ConfigError(f"drafters.{index}.gpus", problem, "use 0, or target.gpus=1.")
