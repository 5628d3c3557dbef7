"""`specactor train` as a Ray job: `ray job submit --working-dir . -- python jobs/train.py --config conf/train_local_cpu.yaml`."""

import sys

from specactor_ray.cli.main import run_as_job

if __name__ == "__main__":
    run_as_job(["train"], sys.argv[1:])
