"""`specactor bench rollout` as a job, with the command's arguments:

    ray job submit --working-dir . -- python jobs/bench.py --config conf/local_cpu.yaml

Inside a Ray job, or where RAY_ADDRESS is set, it runs on that cluster and starts none of its own.
"""

from __future__ import annotations

import sys

from specactor_ray.cli.main import run_as_job

if __name__ == "__main__":
    run_as_job(["bench", "rollout"], sys.argv[1:])
