"""`specactor bench rollout` as a job, with the command's arguments:

    ray job submit --working-dir . --runtime-env conf/runtime_env.yaml \\
        -- python jobs/bench.py --config conf/local_cpu.yaml

Inside a Ray job, or where RAY_ADDRESS is set, it runs on that cluster and starts none of its own.
"""

from __future__ import annotations

from specactor_ray.__main__ import main

if __name__ == "__main__":
    main("bench", "rollout")
