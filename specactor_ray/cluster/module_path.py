"""Module search path of this process and of Ray's workers."""

from __future__ import annotations

import os
import sys
from typing import Any


def put_current_folder_last() -> None:
    """Put the current folder last on the search path: its modules can be drafters and rewards, but replace no module.

    A checkout from which the package itself runs keeps its place.
    """
    folder = os.getcwd()
    package_root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if folder != package_root:
        sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != folder]
    if folder not in sys.path:
        sys.path.append(folder)


def worker_job_config() -> Any:
    """Job settings for Ray with which its workers search modules in the same order as this process.

    By default Ray puts the current folder first in its workers. Inside a Ray job the working folder is the submitted
    code, and Ray's order is kept: the result is None.
    """
    from ray.job_config import JobConfig

    if os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR"):
        return None

    class SamePath(JobConfig):
        def _runtime_env_has_working_dir(self) -> bool:
            return True  # then Ray adds no folders of its own

    # Each entry is put before the earlier ones.
    return SamePath(_py_driver_sys_path=[os.path.abspath(entry) for entry in reversed(sys.path)])
