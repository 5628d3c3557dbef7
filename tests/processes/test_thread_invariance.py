"""The bits of a forward do not depend on the number of threads."""

from __future__ import annotations

import os
import subprocess
import sys

COMPARE = """
import torch
from specactor_ray.models.ragged_attention import _Attend
torch.manual_seed(0)
attend = _Attend(None, None, None, None)
differ = []
for length in (*range(15, 140, 2), 301, 700, 1501):
    key, value = torch.randn(1, 3, length, 64), torch.randn(1, 3, length, 64)
    for queries in (1, 5):
        query = torch.randn(1, 9, queries, 64)
        mask = torch.zeros(queries, length) if queries > 1 else None
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(attend(query, key, value, mask))
        if not torch.equal(*results):
            differ.append((length, queries))
assert not differ, differ
"""


def test_attention_gives_the_same_bits_on_one_thread_and_two() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("MKL_CBWR", "OMP_NUM_THREADS")}
    done = subprocess.run([sys.executable, "-c", COMPARE], capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr
