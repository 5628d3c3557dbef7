"""`python -m specactor_ray.benchmarks.gpu_check`."""

from __future__ import annotations

import sys

from specactor_ray.errors import EXIT_USER_ERROR

if __name__ == "__main__":
    try:
        from specactor_ray.benchmarks.gpu_check.command import main
    except ModuleNotFoundError as error:
        sys.stderr.write(f"error: {error.name} is missing. Fix: {sys.executable} -m pip install {error.name}\n")
        sys.exit(EXIT_USER_ERROR)
    sys.exit(main())
