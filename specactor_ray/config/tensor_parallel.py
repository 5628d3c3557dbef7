"""What is wrong about ranks of a verifier (`target.tensor_parallel`) and the devices they need."""

from __future__ import annotations

from specactor_ray.config.schema import Config, PlanPolicy
from specactor_ray.errors import ConfigError


def reject_ranks_the_backend_has_not(config: Config) -> None:
    target, ranks = config.target, config.target.tensor_parallel
    if ranks > 1 and target.backend != "vllm":
        problem = f"{ranks}, but target.backend={target.backend} runs the model on one device."
        raise ConfigError("target.tensor_parallel", problem, "use target.backend=vllm, or raise target.replicas.")
    if ranks > 1 and config.plan is PlanPolicy.auto:
        problem = f"{ranks} ranks, but plan=auto chooses a verifier's cores, and a profile is of one rank."
        raise ConfigError("target.tensor_parallel", problem, "use plan=fixed.")


def reject_devices_that_do_not_fit_the_ranks(config: Config) -> None:
    target, ranks = config.target, config.target.tensor_parallel
    if target.gpus not in (0, ranks):
        fixes = [f"use target.gpus={ranks}", "raise target.replicas"]
        if target.backend == "vllm":
            fixes.insert(1, f"target.tensor_parallel={target.gpus}")
        problem = f"{target.gpus} GPUs for {ranks} rank(s) of target.tensor_parallel; every rank has one."
        raise ConfigError("target.gpus", problem, f"{', '.join(fixes[:-1])} or {fixes[-1]}.")
    if not target.gpus and target.cores % ranks:
        problem = f"{target.cores} core(s) cannot be shared out evenly among {ranks} ranks (target.tensor_parallel)."
        raise ConfigError("target.cores", problem, f"use a multiple of {ranks}.")
