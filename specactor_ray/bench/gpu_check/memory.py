"""Stages `sleep`, what an engine leaves on a GPU that it shares, and `weights`, ways of new weights to an engine."""

from __future__ import annotations

import functools
import pickle
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
import torch.multiprocessing  # pickles tensors as handles

from specactor_ray.bench.gpu_check.models import model_folder, random_model, random_weights, vllm_target
from specactor_ray.bench.gpu_check.stage import Stage
from specactor_ray.bench.gpu_check.target import begin_decoding, hf_engine, step_at_random, target_model
from specactor_ray.core.child import Report, run_in_child
from specactor_ray.models.cache_size import GIB
from specactor_ray.models.weight_buckets import grouped, pack, unpack
from specactor_ray.target.base import TargetEngine


def measure_sleep(stage: Stage) -> None:
    """Fill a point for `hf`, and for `vllm` if it is installed: GiB that all processes use on the GPU while the engine
    is awake and asleep, seconds to sleep and wake, ms of a step before, of the first one afterwards, and of others."""
    measure_engine(stage, "hf", hf_engine(stage.settings, target_model(stage.settings)))
    if find_spec("vllm"):
        with model_folder(stage.settings) as model:
            stage.apart(sleep_of_vllm, model)
    else:
        stage.entry["not_measured"].append("vllm: it is not installed")


def sleep_of_vllm(stage: Stage, model: str) -> None:
    from specactor_ray.target.vllm import VllmEngine

    measure_engine(stage, "vllm", VllmEngine(vllm_target(stage.settings, model), max(stage.settings.drafts)))


def measure_engine(stage: Stage, name: str, engine: TargetEngine) -> None:
    """Measure one engine; `wake` restores its weights."""
    settings, rows = stage.settings, max(stage.settings.rows)
    step = functools.partial(step_at_random, engine, max(settings.drafts), np.random.default_rng(0))

    def note(column: str, value: float | None) -> None:
        stage.point({"engine": name}, **{column: value})
        stage.changed(f"{stage.name}, {name}: {column} {value}")

    begin_decoding(engine, settings, rows)
    note("step ms", 1e3 * stage.median_s(step))
    for row in range(rows):
        engine.remove(row)
    note("awake GiB", used_gib(settings.device))
    note("sleep s", stage.seconds(engine.sleep))
    note("asleep GiB", used_gib(settings.device))
    note("wake s", stage.seconds(engine.wake))
    begin_decoding(engine, settings, rows)
    note("first step ms", 1e3 * stage.seconds(step))
    note("later step ms", 1e3 * stage.median_s(step))


def used_gib(device: str) -> float | None:
    """Memory of the GPU that is in use; None on a CPU."""
    if device != "cuda":
        return None
    free, total = torch.cuda.mem_get_info()
    return (total - free) / GIB


# ---- weights ----

_BUCKET_BYTES = 256 << 20


def measure_weights(stage: Stage) -> None:
    """Fill a point for every way of a trainer's tensors to an engine's, in the target's shape: seconds and GB/s. Raises
    RuntimeError where the engine's weights are not those that were sent."""
    settings = stage.settings
    source = random_weights(settings.target, settings.dtype, settings.device, seed=1).state_dict()
    model = random_model(settings.target, settings.dtype, settings.device, tokens=4096)
    dtypes = {name: tensor.dtype for name, tensor in source.items()}
    size = sum(tensor.nbytes for tensor in source.values())
    groups = list(grouped(source.items(), lambda tensor: tensor.nbytes, _BUCKET_BYTES))
    packed = list[Any]()

    def note(way: str, seconds: float) -> None:
        stage.point({"way": way}, s=seconds, gb=1e-9 * size, gb_per_s=1e-9 * size / seconds)
        stage.changed(f"{stage.name}, {way}: {seconds:.3g} s, {1e-9 * size / seconds:.3g} GB/s")

    def load(weights: Mapping[str, torch.Tensor]) -> None:
        model.load_weights(weights)

    note("device to engine", stage.seconds(lambda: load(source)))
    if stale := model.stale_weights(source):
        raise RuntimeError(f"{len(stale)} weights are not those that were sent, such as {stale[0]}")
    note("device to buckets", stage.seconds(lambda: packed.extend(pack(group, dtypes) for group in groups)))
    note("buckets to engine", stage.seconds(lambda: load(dict(pair for bucket in packed for pair in unpack(bucket)))))
    packed.clear()
    down, up = pinned_copies(groups, settings.device)
    note("device to pinned", stage.seconds(down))
    note("pinned to device", stage.seconds(up))
    handles = bytes(ForkingPickler.dumps(list(source.values())))
    opening_s, copying_s = run_in_child(
        copy_from_handles, (handles, settings.device), "gpu-check weights", stage.changed
    )
    note("device of another process", copying_s)
    stage.entry["figures"]["opening of handles s"] = opening_s


def pinned_copies(
    groups: list[list[tuple[str, torch.Tensor]]], device: str
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Copies of all tensors to one buffer of page-locked memory, group by group, and back."""
    largest = max(sum(tensor.nbytes for _, tensor in group) for group in groups)
    buffer = torch.empty(largest, dtype=torch.uint8, pin_memory=device == "cuda")

    def copy(to_device: bool) -> None:
        for group in groups:
            begin = 0
            for _, tensor in group:
                part = buffer[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                source, target = (part, tensor) if to_device else (tensor, part)
                target.copy_(source, non_blocking=True)
                begin += tensor.nbytes
            if device == "cuda":
                torch.cuda.synchronize()  # the buffer is free for the next group

    return functools.partial(copy, False), functools.partial(copy, True)


def copy_from_handles(work: tuple[bytes, str], report: Report) -> tuple[float, float]:
    """Seconds to open another process's tensors, and to copy them on the device."""
    del report
    handles, device = work

    def synchronize() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    torch.zeros(1, device=device)
    begin = time.perf_counter()
    theirs: list[torch.Tensor] = pickle.loads(handles)
    own = [torch.empty_like(tensor) for tensor in theirs]
    synchronize()
    opened = time.perf_counter()
    for target, tensor in zip(own, theirs, strict=True):
        target.copy_(tensor)
    synchronize()
    return opened - begin, time.perf_counter() - opened
