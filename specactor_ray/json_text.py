"""JSON that somebody else wrote."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str) -> Any:
    """`json.loads`, which says about whatever cannot be read that it cannot be read.

    Raises:
        json.JSONDecodeError: It is no JSON, is nested too deeply, or holds a number with thousands of digits.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", text, 0) from None
    except ValueError as error:
        raise json.JSONDecodeError(str(error).partition(";")[0], text, 0) from None
