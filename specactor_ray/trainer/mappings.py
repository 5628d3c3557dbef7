"""Functions from row to row of well-known data sets, for `data.map`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ASK = 'Let\'s think step by step and output the final answer after "####".'


def gsm8k(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of GSM8K (`openai/gsm8k`, columns `question` and `answer`): the answer is the number after `####`, without
    commas, and the prompt asks for such an answer in verl's words."""
    number = row["answer"].rpartition("####")[2].strip().replace(",", "")
    return {**row, "prompt": f"{row['question']} {_ASK}", "answer": number, "data_source": "openai/gsm8k"}
