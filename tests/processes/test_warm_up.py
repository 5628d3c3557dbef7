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
from specactor_ray.transport.messages import TailBatch
from specactor_ray.transport import inbox
from specactor_ray.table import _kernels as of_table
from specactor_ray.table.table import RequestTable
from specactor_ray.verify import _kernels
from specactor_ray.verify.drafting import warm_up

def compiled():
    functions = {**vars(_kernels), **vars(of_table), **vars(inbox)}
    kernels = {name: one for name, one in functions.items() if isinstance(one, Dispatcher)}
    parts = {"agreed", "token_at"}  # as are those with an underscore: they are part of the others
    return {name: len(one.signatures) for name, one in kernels.items() if name[0] != "_" and name not in parts}

def arrive(writeable):
    arrays = [np.zeros(size, np.int32) for size in (1, 1, 1, 1, 0)]
    for array, flag in zip(arrays, writeable):
        array.flags.writeable = flag
    message, box = TailBatch("d", *arrays), inbox.for_verifier(10)
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
for number in range(32):  # of this process, as Ray hands them over, and any mix
    arrive([bool(number >> bit & 1) for bit in range(5)])
assert compiled() == before, compiled()
"""


@pytest.mark.slow
def test_no_kernel_is_compiled_in_a_step() -> None:
    program = PROGRAM % (["coupled", "decoupled"],)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
