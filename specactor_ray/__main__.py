"""The command `specactor`, also as `python -m specactor_ray`."""

import sys


def main() -> None:
    """Run the command line. Ctrl-C ends it without a traceback also while its modules are imported."""
    try:
        from specactor_ray.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
