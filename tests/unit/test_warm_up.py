"""Kernels are compiled before the first request: compiling in a running step takes seconds."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
from pathlib import Path
import numpy as np
from numba.core.dispatcher import Dispatcher
from specactor_ray.simulation.comparison import simulate_variant
from specactor_ray.messages import Branches, TailBatch
from specactor_ray.queues import inbox
from specactor_ray.spec import _kernels
from specactor_ray.spec.table import RequestTable
from specactor_ray.verify.drafting import warm_up

def compiled():
    functions = {**vars(_kernels), **vars(inbox)}
    kernels = {name: one for name, one in functions.items() if isinstance(one, Dispatcher)}
    called = {name: one for name, one in kernels.items() if "inline" not in one.targetoptions}  # not parts of others
    return {name: len(one.signatures) for name, one in called.items()}

def arrive(writeable):
    array = np.zeros(1, np.int32)
    array.flags.writeable = writeable
    none = array[:0]
    message, box = TailBatch("d", array, array, array, array, none, Branches(*[none] * 4)), inbox.for_verifier(10)
    box.put(message)
    assert box.drain() == [message]
    RequestTable(4).take(0, message)

warm_up()
inbox.warm_up()
before = compiled()
assert all(before.values()), before
items = ["workload.requests=4", "workload.median_tokens=20", "workload.max_tokens=40"]
for variant in %r:
    simulate_variant(Path("conf/simulation/qwen32b_5xh100.yaml"), items, variant)
for writeable in (True, False):  # of this process, and as Ray hands them over
    arrive(writeable)
assert compiled() == before, compiled()
"""


@pytest.mark.slow
def test_no_kernel_is_compiled_in_a_step() -> None:
    program = PROGRAM % (["coupled", "decoupled"],)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
