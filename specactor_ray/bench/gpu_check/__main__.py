"""`python -m specactor_ray.bench.gpu_check`."""

import sys

try:
    from specactor_ray.bench.gpu_check.command import main
except ModuleNotFoundError as error:  # Typer or rich
    sys.stderr.write(f"error: {error.name} is missing. Fix: {sys.executable} -m pip install typer rich\n")
    sys.exit(2)
sys.exit(main())
