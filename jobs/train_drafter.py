"""`specactor drafter train` as a job, with the command's arguments:

    ray job submit --working-dir . -- python jobs/train_drafter.py --target smollm2-135m --data prompts.jsonl \\
        --output /shared/drafter

It runs in the job's own process, on the node where the job's driver runs, and starts no actors; for a GPU add
`--entrypoint-num-gpus 1` before the `--`, and `--device cuda`.
"""

from __future__ import annotations

import sys

from specactor_ray.cli.main import run_as_job

if __name__ == "__main__":
    run_as_job(["drafter", "train"], sys.argv[1:])
