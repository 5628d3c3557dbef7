"""`specactor drafter train` as a Ray job, in the job's own process on its driver's node: `ray job submit --working-dir . --
python jobs/train_drafter.py --target smollm2-135m --data prompts.jsonl --output /shared/drafter`. For a GPU add
`--entrypoint-num-gpus 1` before the `--`, and `--device cuda`."""

import sys

from specactor_ray.cli.main import run_as_job

if __name__ == "__main__":
    run_as_job(["drafter", "train"], sys.argv[1:])
