"""What a vLLM worker does in its steps: graphs, and the time of its GPU."""

from __future__ import annotations

from collections import Counter
from typing import Any

from gpu_check.stage import Kernels


class Watch:
    """Methods that vLLM adds to a worker (`worker_extension_cls`), for `collective_rpc`."""

    model_runner: Any

    def watch_begin(self) -> None:
        """Count graphs, and record kernels."""
        runner = self.model_runner
        place = getattr(runner, "cudagraph_manager", None) or getattr(runner, "cudagraph_dispatcher", None)
        self.watch_place, self.watch_graphs = place, Counter[str]()
        if place is not None:
            choose, graphs = place.dispatch, self.watch_graphs

            def dispatch(*args: Any, **options: Any) -> Any:
                found = choose(*args, **options)
                mode, batch = found if isinstance(found, tuple) else (found.cg_mode, found)
                graphs[f"{mode.name} {batch.num_tokens}"] += 1
                return found

            place.dispatch = dispatch
        self.watch_kernels = Kernels("cuda" if runner.device.type == "cuda" else "cpu")

    def watch_end(self) -> tuple[dict[str, int], float | None]:
        """Graph, such as `FULL 128` (mode and padded positions) → steps; seconds in which the GPU was busy."""
        busy_s = self.watch_kernels.end().busy_s
        if self.watch_place is not None:
            del self.watch_place.dispatch  # that of its class is left
        return dict(self.watch_graphs), busy_s
