"""Text of clients: messages are literal, plain prompts are read as vLLM reads them, and none is too long to be read."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.server import ask, fake_service
