"""The corpus: the target's own rollouts, recorded on disk so that a killed collection can continue.

A drafter is trained on real outputs of the target. Rollouts come from the engine itself with keyed seeds, so the
corpus is a function of its recipe; existing parts are never made again.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specactor_ray.core.errors import InputError
from specactor_ray.core.files import flush_entry, read_foreign, replacing, write_json
from specactor_ray.core.types import SamplingParams
from specactor_ray.models.weight_buckets import from_wire
from specactor_ray.target.base import Finish, StepResult, TargetEngine, TargetRequest

logger = logging.getLogger(__name__)

_SHARD_RECORDS = 16
"""Number of finished rollouts that are written together; those lost by a kill are made again."""


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """One rollout to record. `index` is its number within its part of the corpus."""

    index: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class CorpusRecord:
    """One recorded rollout."""

    index: int
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    sampling: SamplingParams
    finish_reason: str
    """`stop` or `length`."""
    states: np.ndarray | None = field(default=None, compare=False, repr=False)
    """`(tokens - 1, width)`: hidden states from the engine, only while the record is in memory."""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)


class RecordStore:
    """One part of a corpus (`train`, `heldout`): safetensors shards, each complete or absent.

    A shard holds per record the token ids, and the target's hidden states if they were recorded: `(tokens - 1, width)`,
    row i of position i, including the prompt, up to the one that predicted the last token. States stay on disk until
    they are read.

    Args:
        folder: Created with the first shard. None keeps records and states in memory.
    """

    def __init__(self, folder: Path | None, part: str) -> None:
        self._folder, self._part = folder, part
        self._pending: list[CorpusRecord] = []
        self._where: dict[int, Path] = {}
        self._records: dict[int, CorpusRecord] = {}
        for path in sorted(folder.glob(f"{part}-[0-9]*.safetensors")) if folder is not None else ():
            self._read(path)

    def __contains__(self, index: int) -> bool:
        return index in self._records

    def records(self) -> list[CorpusRecord]:
        """All records, by index."""
        return [self._records[index] for index in sorted(self._records)]

    def add(self, record: CorpusRecord) -> None:
        """Add a record; it is on disk after the next `flush`, which is automatic every few records."""
        self._records[record.index] = record if self._folder is None else replace(record, states=None)
        self._pending.append(record)
        if len(self._pending) >= _SHARD_RECORDS:
            self.flush()

    def flush(self) -> None:
        """Write records that are not on disk yet. Raises OSError; nothing is lost then."""
        if self._folder is None or not self._pending:
            return
        from safetensors.torch import save_file

        self._folder.mkdir(parents=True, exist_ok=True)
        tensors: dict[str, torch.Tensor] = {}
        for record in self._pending:
            tensors[f"{record.index}.prompt"] = torch.tensor(record.prompt_token_ids, dtype=torch.int32)
            tensors[f"{record.index}.output"] = torch.tensor(record.output_token_ids, dtype=torch.int32)
            if record.states is not None:
                tensors[f"{record.index}.states"] = _as_stored(record.states)
        facts = [
            {"index": record.index, "finish_reason": record.finish_reason, "sampling": asdict(record.sampling)}
            for record in self._pending
        ]
        final = self._folder / f"{self._part}-{self._pending[0].index:06d}.safetensors"
        with replacing(final, final.with_suffix(".partial")) as partial:
            save_file(tensors, partial, metadata={"records": json.dumps(facts)})
        flush_entry(self._folder)
        self._where |= {record.index: final for record in self._pending}
        self._pending = []

    def states(self, index: int) -> torch.Tensor:
        """Hidden states of a flushed record. Raises KeyError if none were recorded."""
        from safetensors import safe_open

        with safe_open(self._where[index], framework="pt") as shard:
            name = f"{index}.states"
            if name not in shard.keys():  # noqa: SIM118 - a shard is not a mapping
                raise KeyError(name)
            return shard.get_tensor(name)

    def _read(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as shard:
                for facts in json.loads((shard.metadata() or {})["records"]):
                    self._take(path, shard, facts)
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("%s is damaged (%s); its rollouts are made again", path, error)
            for index in [index for index, where in self._where.items() if where == path]:
                del self._records[index], self._where[index]
            path.rename(path.with_suffix(".damaged"))

    def _take(self, path: Path, shard: Any, facts: dict[str, Any]) -> None:
        index, sampling = int(facts["index"]), dict(facts["sampling"])
        sampling["stop_token_ids"] = tuple(sampling["stop_token_ids"])
        prompt, output = (tuple(shard.get_tensor(f"{index}.{name}").tolist()) for name in ("prompt", "output"))
        self._where[index] = path
        self._records[index] = CorpusRecord(
            index, prompt, output, SamplingParams(**sampling), str(facts["finish_reason"])
        )


@dataclass(slots=True)
class _Open:
    request: RolloutRequest
    tokens: list[int] = field(default_factory=list)
    states: list[np.ndarray] = field(default_factory=list)


def collect(
    engine: TargetEngine,
    requests: Sequence[RolloutRequest],
    store: RecordStore,
    token_budget: int | None = None,
    max_open: int = 64,
    on_progress: Callable[[int], None] | None = None,
) -> list[CorpusRecord]:
    """Roll out requests in their order until `token_budget` output tokens are recorded, and return them.

    Existing records of the store are not made again. The result depends on requests and budget only, not on the point
    of an interruption: it is the shortest beginning of the requests that fills the budget (or all of them).

    Args:
        engine: Fresh engine; hidden states that it exports are recorded too.
        token_budget: Number of output tokens to record; None records all requests.
        max_open: Most requests in the engine at once.
        on_progress: Called with the number of output tokens so far.

    Raises:
        InputError: A prompt cannot be run.
    """
    known = {record.index: record for record in store.records()}
    have = sum(len(known[r.index].output_token_ids) for r in requests if r.index in known)
    waiting = deque(request for request in requests if request.index not in known)
    budget = float("inf") if token_budget is None else token_budget
    running: dict[int, _Open] = {}
    try:
        while True:
            underway = have + sum(len(entry.tokens) for entry in running.values())
            while waiting and len(running) < max_open and underway < budget:
                request = waiting.popleft()
                row = next(row for row in range(max_open) if row not in running)
                engine.add(row, TargetRequest(str(request.index), request.prompt_token_ids, request.sampling))
                running[row] = _Open(request)
            if not running:
                break
            have += _take(engine.step(), running, store)
            if on_progress is not None:
                on_progress(have + sum(len(entry.tokens) for entry in running.values()))
    finally:
        store.flush()
    return shortest_beginning(requests, store, token_budget)


def _take(result: StepResult, running: dict[int, _Open], store: RecordStore) -> int:
    """Record the requests that have ended; returns the number of their output tokens."""
    for row, _, states in result.states.split() if result.states is not None else ():
        running[row].states.append(states)
    ended = 0
    for row, tokens, finish in result.outputs():
        entry = running[row]
        entry.tokens += tokens
        if finish is Finish.RUNNING:
            continue
        del running[row]
        request = entry.request
        if finish is Finish.ERROR:
            logger.warning("rollout %d failed and is left out: %s", request.index, result.errors[row])
            continue
        ended += len(entry.tokens)
        whole = np.concatenate(entry.states) if entry.states else None
        prompt, output = request.prompt_token_ids, tuple(entry.tokens)
        store.add(CorpusRecord(request.index, prompt, output, request.sampling, finish.reason, whole))
    return ended


def _as_stored(states: np.ndarray) -> torch.Tensor:
    """Hidden states in half precision, which halves the corpus and changes logits by less than a thousandth; in full
    precision if a state is beyond its range."""
    whole = from_wire(states)
    half = whole.half()
    return half if bool(half.isfinite().all()) else whole.float()


def shortest_beginning(
    requests: Sequence[RolloutRequest], store: RecordStore, token_budget: int | None
) -> list[CorpusRecord]:
    """Records of the first requests, as many as fill the budget (None: all); failed ones are skipped."""
    known, tokens, found = {record.index: record for record in store.records()}, 0, list[CorpusRecord]()
    for request in requests:
        if token_budget is not None and tokens >= token_budget:
            break
        if request.index in known:
            found.append(known[request.index])
            tokens += len(found[-1].output_token_ids)
    return found


def claim_corpus(folder: Path, facts: dict[str, Any]) -> None:
    """Record the facts of a corpus folder, or check that they are the same. Raises InputError, see `claim_folder`."""
    claim_folder(folder, folder / "corpus.json", facts, "a corpus", "corpus")


def claim_folder(folder: Path, note: Path, facts: dict[str, Any], content: str, kind: str, option: str = "") -> None:
    """Create a folder and record the facts that determine its content, or check those of an existing one.

    Args:
        note: File for the facts, inside the folder.
        content, kind: Content and kind of the folder, for messages.
        option: Beginning of messages.

    Raises:
        InputError: The folder has other facts (the message has the differences), holds other files, or cannot be
        written to.
    """
    if note.is_file():
        differing = _differences(json.loads(read_foreign(note)), json.loads(json.dumps(facts)))
        if differing:
            raise InputError(
                f"{option}{folder} holds {content} of another recipe ({differing}). Fix: name another folder, or "
                "repeat its own options to go on with it"
            )
        return
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{option}{folder} exists and is no {kind}. Fix: name another folder")
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        write_json(note, facts, shared=True)
    except OSError as error:
        raise InputError(f"{option}{folder} cannot be written to ({error.strerror})") from None


def _differences(there: dict[str, Any], wanted: dict[str, Any], prefix: str = "") -> str:
    """Differences of two sets of facts, such as `temperature 0.5 there, 1.0 wanted; ...`."""
    found = []
    for key in sorted({*there, *wanted}):
        left, right = there.get(key), wanted.get(key)
        if isinstance(left, dict) and isinstance(right, dict):
            found.append(_differences(left, right, f"{prefix}{key}."))
        elif left != right:
            found.append(f"{prefix}{key} {left!r} there, {right!r} wanted")
    return "; ".join(text for text in found if text)
