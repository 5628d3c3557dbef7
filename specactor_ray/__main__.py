"""The command `specactor`, also as `python -m specactor_ray`, and the commands that run as Ray jobs."""

import sys


def main(*job: str) -> None:
    """Run the command line, or the command `job` as a Ray job with the arguments of this process. Ctrl-C and SIGTERM
    end it without a traceback, also while modules are imported."""
    from specactor_ray.core.signals import signals_deferred, sigterm_interrupts

    with sigterm_interrupts():
        try:
            with signals_deferred():
                from specactor_ray.cli import main as cli
            if job:
                cli.run_as_job(job, sys.argv[1:])
            else:
                cli.main()
        except KeyboardInterrupt:
            sys.exit(130)


if __name__ == "__main__":
    main()
