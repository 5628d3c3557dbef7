"""Tests by speed and need; see CONTRIBUTING.md."""
