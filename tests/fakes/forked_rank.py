"""What the processes of `tests.fakes.forked_ranks` have imported before they are forked."""

import contextlib
import gc
import importlib
import os

os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
for name in ("tests.fakes.forked_ranks", "specactor_ray.actors.trainer", "transformers.models.llama.modeling_llama"):
    importlib.import_module(name)
for name in ("deepspeed", "peft"):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
gc.freeze()  # what ranks share is not visited, and so copied, whenever one collects garbage
