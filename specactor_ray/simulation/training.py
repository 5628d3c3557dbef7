"""Seconds of the other parts of a training step: the update, and the hand-over of its weights.

A token costs 2 FLOPs per weight of the matrix products in a forward, and 4 in a backward (Kaplan et al. 2020, arXiv
2001.08361, section 2.1); where activations are computed again, the backward has one more forward (Chen et al. 2016,
arXiv 1604.06174). Forwards without a gradient give the log-probabilities of the rollout's tokens by the old weights,
and by a reference if there is one. Each prompt counts with every one of its outputs. All GPUs of the rollout, those of
drafters included, share the work at a share of their peak (hardware FLOPs utilisation: Korthikanti et al. 2022, arXiv
2205.05198). Weights reach verifiers on nodes of other kinds than the first by the slower of the links. The FLOPs of
attention are left out: 6% for a model of 32B, outputs of 3,000 tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from specactor_ray.core.errors import ConfigError
from specactor_ray.plan.hardware import DeviceSpec, ModelSpec, find_model, load_hardware
from specactor_ray.simulation.scenario import Arrival, ScenarioConfig


def training_seconds(
    scenario: ScenarioConfig, output_tokens: int, gpus: Mapping[int, float], verifying: Collection[int] = ()
) -> tuple[float, float]:
    """Seconds of the update, and of the hand-over of weights, after a rollout with so many output tokens on `gpus` of
    each kind of machines, and verifiers on those `verifying`; none without `training.utilisation`. Raises ConfigError
    if the scenario has no steps, or hardware without a peak."""
    training, workload = scenario.training, scenario.workload
    if not training.utilisation:
        return 0.0, 0.0
    if workload.arrival is not Arrival.at_once:
        raise ConfigError("training.utilisation", "steps of a training begin all requests at once.", "leave it out.")
    peak_tflops, rate = 0.0, training.sync_gb_s
    fix = "use GPUs of a roofline, such as hardware: h100."
    if not scenario.config.target.gpus:
        raise ConfigError("training.utilisation", "the target is on CPU cores, which have no peak of FLOPs.", fix)
    for kind in (kind for kind, count in gpus.items() if count):
        device = load_hardware(name := scenario.machines[kind].accelerator or "")
        if not isinstance(device, DeviceSpec):
            raise ConfigError("training.utilisation", f"{name} has no peak of FLOPs: it is measured.", fix)
        peak_tflops += gpus[kind] * device.peak_tflops
    if {*verifying} - {0}:
        links = (scenario.machines[kind].link.gbit_s for kind in {0, *verifying})
        rate = min([rate, *(link / 8 for link in links if link is not None)])
    model = find_model(scenario.config.target.model)
    tokens = output_tokens + workload.requests * workload.prompt_tokens
    flops = flops_per_token(model, training.forwards, training.recompute) * tokens
    update_s = flops / (peak_tflops * 1e12 * training.utilisation)
    return update_s + training.fixed_s, model.parameters * model.weight_bytes / (rate * 1e9)


def flops_per_token(model: ModelSpec, forwards: int, recompute: bool) -> float:
    """FLOPs of an update per token: forward, backward and `forwards` without a gradient."""
    passes = 3 + recompute + forwards
    return 2.0 * passes * (model.attention_weights + model.dense_weights + model.head_weights)
