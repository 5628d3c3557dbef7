"""`specactor rollout` as a Ray job: `ray job submit --working-dir . -- python jobs/rollout.py --config conf/local_cpu.yaml`."""

import sys

from specactor_ray.cli.main import run_as_job

if __name__ == "__main__":
    run_as_job(["rollout"], sys.argv[1:])
