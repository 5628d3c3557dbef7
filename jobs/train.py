"""`specactor train` as a job, with the command's arguments:

    ray job submit --working-dir . -- python jobs/train.py --config conf/train_local_cpu.yaml

Inside a Ray job, or where RAY_ADDRESS is set, it runs on that cluster and starts none of its own. The algorithm itself
reads from top to bottom in `specactor_ray/trainer/steps.py`.
"""

from __future__ import annotations

import sys

from specactor_ray.cli.main import run_as_job

if __name__ == "__main__":
    run_as_job(["train"], sys.argv[1:])
