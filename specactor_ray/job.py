"""`python -m specactor_ray.job COMMAND ...`: a command inside a Ray job; what `specactor submit` runs there."""

from __future__ import annotations

import sys

from specactor_ray.cli import SUBMITTABLE, run_as_job

if __name__ == "__main__":
    run_as_job(SUBMITTABLE[sys.argv[1]].split(), sys.argv[2:])
