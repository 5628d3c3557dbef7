"""The user's saved Ray token."""

from __future__ import annotations

import os
from pathlib import Path


def send_saved_token() -> None:
    """Let this process use the token in the user's home, as the clusters that this user starts do.

    Left alone, Ray looks for it only when no address is given, and waits long for a cluster that wants one. A cluster
    without authentication takes no notice of a token. Call it before Ray is imported: that is when it reads its
    settings.
    """
    saved = Path.home() / ".ray" / "auth_token"
    if "RAY_AUTH_MODE" not in os.environ and saved.is_file():
        os.environ["RAY_AUTH_MODE"] = "token"
