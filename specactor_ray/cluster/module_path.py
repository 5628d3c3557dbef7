"""Where Python looks for modules, here and in the workers of Ray."""

from __future__ import annotations

import os
import sys
from typing import Any


def put_current_folder_last() -> None:
    """Modules in the current folder can be named as drafters and rewards, but replace no other module.

    A checkout that the package itself is run from stays where it is.
    """
    folder = os.getcwd()
    package_root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if folder != package_root:
        sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != folder]
    if folder not in sys.path:
        sys.path.append(folder)


def worker_job_config() -> Any:
    """Ray's settings of a job, such that its workers look for modules in the same order as this process.

    Left alone, Ray puts the current folder before everything in its workers. Inside a Ray job its working folder is the
    code that was submitted, and everything stays as Ray has it: the result is None.
    """
    from ray.job_config import JobConfig

    if os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR"):
        return None

    class SamePath(JobConfig):
        def _runtime_env_has_working_dir(self) -> bool:
            return True  # then Ray adds no folders of its own

    # Each one is put before those that came earlier.
    return SamePath(_py_driver_sys_path=[os.path.abspath(entry) for entry in reversed(sys.path)])
