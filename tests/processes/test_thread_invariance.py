"""The bits of a forward do not depend on the number of threads."""

from __future__ import annotations

import os
import subprocess
import sys

COMPARE = """
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from specactor_ray.models.ragged_model import RaggedModel
torch.manual_seed(0)
shape = dict(hidden_size=576, num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536)
model = RaggedModel(LlamaForCausalLM(LlamaConfig(vocab_size=900, num_hidden_layers=2, **shape)), 16 << 20)
model._threads = None
rows = np.array([model.cache.open(900) for _ in range(3)])
for counts in ([400, 15, 801], [1, 1, 1], [5, 1, 9], [1, 64, 2], [1, 1, 1]):
    counts, before = np.array(counts), model.cache.lengths[rows]
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        model.cache.truncate(rows, before)
        results.append(model.forward(rows, counts, np.arange(counts.sum()) % 900, np.minimum(counts, 4)))
    assert torch.equal(*results), counts
"""


def test_a_forward_gives_the_same_bits_on_one_thread_and_two() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("MKL_CBWR", "OMP_NUM_THREADS")}
    done = subprocess.run([sys.executable, "-c", COMPARE], capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr
