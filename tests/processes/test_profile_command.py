"""`specactor profile`, then `specactor plan` by what it wrote."""

from __future__ import annotations

import json
from pathlib import Path

from specactor_ray.config.load import load_config
from specactor_ray.plan.profile import load_profile
from specactor_ray.rollout.planning import as_decoupled, make_plan
from tests import tiny
from tests.fakes.forked_command import specactor


def test_profile_then_plan(tiny_model_dir: Path, tiny_draft_model_dir: Path, tmp_path: Path) -> None:
    """The real commands: measure on one core in a process of its own, then plan by the file."""
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in tiny.tiny_prompts(4)))
    drafters = f"drafters=[{{method: ngram}},{{method: draft_model, model: {tiny_draft_model_dir}, kv_cache_gb: 0.05}}]"
    known = [f"target.model={tiny_model_dir}", "target.kv_cache_gb=0.05", drafters, "sampling.max_tokens=16"]
    axes = ["--batches", "1,2", "--windows", "1,3", "--contexts", "16", "--devices", "1", "--repeats", "1"]
    measure = ["profile", *known, "data.path=p.jsonl", *axes, "--output", "profile.json"]
    done = specactor(tmp_path, *measure)
    assert done.returncode == 0, done.stderr
    assert "ms, context 16" in done.stdout and "drafting, draft_model" in done.stdout
    profile = load_profile(tmp_path / "profile.json")
    assert set(profile.methods) == {"ngram", "draft_model"}
    assert profile.verify[1].knots == ((1, 2), (1, 2, 4), (16,))
    assert {"cpu", "cores", "vector", "gpu"} <= profile.data["hardware"].keys()
    assert {"torch", "transformers", "specactor-ray"} <= profile.data["versions"].keys()
    again = specactor(tmp_path, *measure)
    assert again.returncode == 2 and "exists and is never overwritten" in again.stderr
    planned = specactor(tmp_path, "plan", *known, "cluster.num_cpus=2", "profile=profile.json", "--json")
    assert planned.returncode == 0, planned.stderr
    config = as_decoupled(load_config(None, [*known, "cluster.num_cpus=2", f"profile={tmp_path / 'profile.json'}"]))
    chosen = json.loads(planned.stdout)["chosen"]
    assert chosen["tokens_per_s"] == make_plan(config, profile).chosen.tokens_per_s
