"""`python -m specactor_ray.benchmarks.gpu_check`."""

from __future__ import annotations

import sys

from specactor_ray.benchmarks.gpu_check.command import main

if __name__ == "__main__":
    sys.exit(main())
