"""Stages `sleep`, what an engine leaves on a GPU that it shares, and `weights`, ways of new weights to an engine."""

from __future__ import annotations

import contextlib
import functools
import pickle
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
import torch.multiprocessing  # pickles tensors as handles

from gpu_check.models import model_folder, random_model, random_weights, vllm_target
from gpu_check.stage import Stage, shown
from gpu_check.target import begin_decoding, end_all, hf_engine, step_at_random, target_model
from specactor_ray.models.shapes import GIB
from specactor_ray.models.weight_buckets import grouped, pack, unpack
from specactor_ray.target.base import TargetEngine


def measure_sleep(stage: Stage) -> None:
    """Fill a point for `hf`, and for `vllm` if it is installed: GiB that all processes use on the GPU while the engine
    is awake and asleep, seconds to sleep and wake, the same of a sleep without weights and of new ones in it, as in a
    training with `trainer.offload`, and ms of a decode step before and afterwards."""
    with contextlib.closing(hf_engine(stage.settings, target_model(stage.settings))) as engine:
        measure_engine(stage, "hf", engine)
    stage.free()
    if find_spec("vllm"):
        with model_folder(stage.settings) as model:
            stage.apart(sleep_of_vllm, model)
    else:
        stage.entry["not_measured"].append("vllm: it is not installed")


def sleep_of_vllm(stage: Stage, model: str) -> None:
    from specactor_ray.target.vllm import VllmEngine

    measure_engine(stage, "vllm", VllmEngine(vllm_target(stage.settings, model), max(stage.settings.drafts)))


def measure_engine(stage: Stage, name: str, engine: TargetEngine) -> None:
    """Measure one engine."""
    settings, rows = stage.settings, max(stage.settings.rows)
    step = functools.partial(step_at_random, engine, max(settings.drafts), np.random.default_rng(0))

    def note(column: str, value: float | None) -> None:
        stage.point({"engine": name}, **{column: value})
        stage.changed(f"{stage.name}, {name}: {column} {value}")

    begin_decoding(engine, settings, rows)
    note("step ms", 1e3 * stage.median_s(step))
    end_all(engine)
    note("awake GiB", used_gib(settings.device))
    note("sleep s", stage.seconds(engine.sleep))
    note("asleep GiB", used_gib(settings.device))
    note("wake s", stage.seconds(engine.wake))
    weights = random_weights(settings.target, settings.dtype, "cpu", seed=1).state_dict()
    note("sleep without weights s", stage.seconds(functools.partial(engine.sleep, keep_weights=False)))
    note("without weights GiB", used_gib(settings.device))
    note("load s", stage.seconds(functools.partial(engine.load_weights, 1, weights)))
    note("loaded GiB", used_gib(settings.device))
    note("wake with new weights s", stage.seconds(engine.wake))
    begin_decoding(engine, settings, rows)
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
    """Fill a point for every way of a trainer's tensors to an engine's, in the target's shape: median seconds and GB/s;
    for copies to page-locked memory and back those of a bucket. Raises RuntimeError where the engine's weights are not
    those that were sent."""
    settings = stage.settings
    source = random_weights(settings.target, settings.dtype, settings.device, seed=1).state_dict()
    model = random_model(settings.target, settings.dtype, settings.device, tokens=4096)
    dtypes = {name: tensor.dtype for name, tensor in source.items()}
    groups, packed = list(grouped(source.items(), lambda tensor: tensor.nbytes, _BUCKET_BYTES)), list[Any]()
    bucket = [tensor for _, tensor in groups[0]]
    pinned = [torch.empty_like(one, device="cpu", pin_memory=settings.device == "cuda") for one in bucket]

    def to_buckets() -> None:
        packed[:] = [pack(group, dtypes) for group in groups]

    def from_buckets() -> None:
        model.load_weights(dict(pair for bucket in packed for pair in unpack(bucket)))

    _time_copy(stage, "device to engine", lambda: model.load_weights(source), source.values())
    _time_copy(stage, "device to buckets", to_buckets, source.values())
    _time_copy(stage, "buckets to engine", from_buckets, source.values())
    packed.clear()
    _time_copy(stage, "device to pinned", functools.partial(copy_all, bucket, pinned), bucket)
    _time_copy(stage, "pinned to device", functools.partial(copy_all, pinned, bucket), bucket)
    stage.apart(copy_from_handles, bytes(ForkingPickler.dumps(list(source.values()))))


def copy_from_handles(stage: Stage, handles: bytes) -> None:
    """Measure the copy of another process's tensors on the device."""
    theirs = list[torch.Tensor]()
    torch.zeros(1, device=stage.settings.device)
    stage.entry["figures"]["opening of handles s"] = stage.seconds(lambda: theirs.extend(pickle.loads(handles)))
    own = [torch.empty_like(tensor) for tensor in theirs]
    _time_copy(stage, "device of another process", functools.partial(copy_all, theirs, own), own)


def copy_all(sources: Iterable[torch.Tensor], targets: Iterable[torch.Tensor]) -> None:
    """Copy tensors without a wait."""
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source, non_blocking=True)


def _time_copy(stage: Stage, way: str, call: Callable[[], object], tensors: Iterable[torch.Tensor]) -> None:
    seconds, gb = stage.median_s(call), 1e-9 * sum(tensor.nbytes for tensor in tensors)
    point = stage.point({"way": way}, s=seconds, gb=gb, gb_per_s=gb / seconds)
    stage.changed(f"{stage.name}, {shown(point)}")
