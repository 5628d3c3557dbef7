"""TRL's trainers with our rollouts: after `attach(trainer, rollout)` an unmodified `GRPOTrainer` generates here.

TRL calls an engine through its class `VLLMGeneration`, and in that class's server mode through a client with a few
methods. `RolloutClient` is such a client, and `ServerClient`, for `attach(trainer, "http://host:8000")`. Everything
above it is TRL's code: gathering over ranks, FSDP, ZeRO and PEFT, tools, evaluation, importance correction. vLLM is not
needed.
"""

from __future__ import annotations

import abc
import itertools
import json
import logging
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specactor_ray.core.errors import InputError
from specactor_ray.core.types import SamplingParams
from specactor_ray.core.upstream import TRL
from specactor_ray.sampling.dialect import Dialect
from specactor_ray.sampling.seeds import derive_seed

if TYPE_CHECKING:
    import torch

    from specactor_ray.rollout.rollout import Rollout

logger = logging.getLogger(__name__)
_DIALECT = Dialect(
    known=("temperature", "top_p", "top_k", "max_tokens", "stop_token_ids", "stop"),
    neutral={"logprobs": (0,)},
    where="TRL: ",
)
"""TRL's arguments, and keys of `generation_kwargs`."""
_TEXT = "specactor: 3 rivers, naïve \u6cb3 \n\tx = 1"
"""Text that two tokenizers encode in the same way if they are those of one model."""

_MOST_CHOICES, _MOST_BYTES, _AT_A_TIME = 64, 4 << 20, 32
"""Most choices of a request to a server, bytes of its prompts as JSON, and requests at a time: together half of the
outputs that may wait in a server, so that it has room for others."""
_TOTALS = (
    *(f"specactor_{name}_total" for name in ("committed_tokens", "row_steps", "supplied_row_steps", "step_seconds")),
    "specactor_plain_seconds",
)
Outputs = list[tuple[Sequence[int], Sequence[float]]]
"""Token ids and log-probabilities of each output."""


def attach(trainer: Any, rollout: Rollout | str | None, weights_folder: str | None = None) -> None:
    """Make a TRL trainer generate with this rollout; call it once, before `trainer.train()`.

    The trainer pushes its weights before it generates, if a step has changed them. Seeds are derived from its
    `args.seed`, its step and the number of calls in that step, so that a run can be repeated and resumed.

    Args:
        trainer: A `GRPOTrainer` or `RLOOTrainer` that was created with `use_vllm=False`.
        rollout: Serves the model that is trained: a rollout of this process, or the address of a server,
            `http://host:8000` (`specactor serve`; its token is read from SPECACTOR_API_KEY). If a trainer has several
            processes, the main one passes it and the others None.
        weights_folder: Folder shared by trainer and server, through which a server gets weights. Default: a temporary
            one of this machine.

    Raises:
        InputError: TRL lacks a part that is used here, the trainer uses options that keyed sampling does not have, or
            the rollout serves another model or tokenizer.
    """
    _require_supported(trainer)
    client: _Client | None = None
    if trainer.accelerator.is_main_process:
        if rollout is None:
            raise InputError("attach: the main process passes no rollout; only the other processes pass None")
        if isinstance(rollout, str):
            if not rollout.startswith(("http://", "https://")):
                raise InputError(
                    f"attach takes a rollout or the address of a server, http://host:port, not {rollout!r}"
                )
            client = ServerClient(trainer, rollout, weights_folder)
        else:
            client = RolloutClient(trainer, rollout)
        client.sampling(**_sampling_arguments(trainer))  # refuse unsupported arguments before the first step
    trainer.vllm_generation = _generation(trainer, client)
    trainer.use_vllm, trainer.vllm_mode = True, "server"
    trainer._last_loaded_step = -1


class _Client(abc.ABC):
    """Client that TRL calls in place of its `VLLMClient`."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._step, self._calls = -1, [0, 0]
        """Numbers of calls in that step in evaluation, and in training."""

    def _require_tokenizer(self, token_ids: Sequence[int], model: str) -> None:
        """Raises InputError unless `_TEXT` has these tokens, after a beginning of sequence if there is one."""
        own = self._trainer._tokenizer(_TEXT, add_special_tokens=False)["input_ids"]
        if list(token_ids[-len(own) :]) != own:
            raise InputError(f"attach: {model} has another tokenizer than the trainer; serve the trainer's model")

    @abc.abstractmethod
    def roll_out(self, prompts: list[list[int]], sampling: SamplingParams, n: int) -> Outputs:
        """`n` outputs of each prompt, those of a prompt together."""

    @abc.abstractmethod
    def update_named_params(self, metadata: object, named_params: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Use these weights for all further outputs; every tensor is checked on arrival."""

    def generate(self, prompts: Sequence[Sequence[int]], n: int, **arguments: Any) -> dict[str, Any]:
        """Outputs in the order of the prompts, the `n` of a prompt together."""
        prompt_ids, before = [list(prompt) for prompt in prompts], self.totals()
        done = self.roll_out(prompt_ids, self.sampling(seed=self._next_seed(), **arguments), n)
        self._log(before, self.totals())
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [list(token_ids) for token_ids, _ in done],
            "logprobs": [[[value] for value in logprobs] for _, logprobs in done],
            "logprob_token_ids": [[[token] for token in token_ids] for token_ids, _ in done],
        }

    @abc.abstractmethod
    def totals(self) -> Mapping[str, float]:
        """Totals of all verifiers by the names of `core.metrics`, those of other clients included."""

    def _log(self, before: Mapping[str, float], after: Mapping[str, float]) -> None:
        """Add what drafts did in between to the metrics that TRL logs; `saved_s`: estimated seconds that plain decoding
        takes longer, over all verifiers, negative where drafts cost more."""
        committed, row_steps, supplied, steps_s, plain_s = (after[name] - before[name] for name in _TOTALS)
        if row_steps > 0:
            metrics = self._trainer._metrics["train" if self._trainer.model.training else "eval"]
            metrics["specactor/acceptance_length"].append(committed / row_steps)
            metrics["specactor/drafted_share"].append(supplied / row_steps)
            metrics["specactor/saved_s"].append(plain_s - steps_s)

    def reset_prefix_cache(self) -> None:  # noqa: B027
        """No operation: no cache outlives an update of the weights."""

    def sampling(
        self, *, max_tokens: int | None, generation_kwargs: Mapping[str, Any] | None, seed: int = 0, **others: Any
    ) -> SamplingParams:
        """TRL's arguments as parameters of a request. Outputs end at the trainer's end-of-sequence ids."""
        if max_tokens is None:
            raise InputError("TRL: max_completion_length is None; give a number of tokens")
        settings = {"max_tokens": max_tokens, **others, **(generation_kwargs or {})}
        chosen = _DIALECT.read(settings)
        try:
            chosen["stop_token_ids"] = (*self._trainer.eos_token_ids, *chosen.get("stop_token_ids", ()))
            return SamplingParams(**chosen, seed=seed, ignore_eos=True)
        except (InputError, TypeError) as error:
            raise InputError(f"TRL's arguments or generation_kwargs, as keys of specactor_ray: {error}") from None

    def _whole(self, named_params: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """TRL's pairs, and after them the model's buffers, which TRL leaves out where it sends parameters alone."""
        from specactor_ray.models.loading import named_weights

        sent = set[str]()
        for name, tensor in named_params:
            sent.add(name)
            yield name, tensor
        model = self._trainer.accelerator.unwrap_model(self._trainer.model)
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
        trained = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        yield from ((name, tensor) for name, tensor in named_weights(model) if name not in sent | trained)

    def _next_seed(self) -> int:
        """A seed that no other call has. It does not depend on the calls since the start, so that a resumed run is
        equal to an uninterrupted one."""
        step, training = int(self._trainer.state.global_step), bool(self._trainer.model.training)
        if step != self._step:
            self._step, self._calls = step, [0, 0]
        self._calls[training] += 1
        return derive_seed(self._trainer.args.seed, 2 * step + training, self._calls[training])


class RolloutClient(_Client):
    """Generates with a rollout of this process. InputError: that has another tokenizer, or too short a context."""

    def __init__(self, trainer: Any, rollout: Rollout) -> None:
        from specactor_ray.rollout.rollout import Rollout

        super().__init__(trainer)
        if not isinstance(rollout, Rollout):
            raise InputError(f"attach takes a rollout or the address of a server, not {type(rollout).__name__}")
        self._rollout, target = rollout, rollout.config.target
        if (
            tokenizer := rollout.queue.tokenizer
        ) is not None:  # else prompts and outputs are token ids, as those of TRL
            self._require_tokenizer(tokenizer(_TEXT)["input_ids"], target.model)
        length = trainer.max_completion_length
        if length is not None and target.max_model_len is not None and length >= target.max_model_len:
            raise InputError(
                f"TRL: max_completion_length is {length}, and target.max_model_len {target.max_model_len} holds prompt "
                "and output. Fix: raise target.max_model_len"
            )

    def roll_out(self, prompts: list[list[int]], sampling: SamplingParams, n: int) -> Outputs:
        done = self._rollout.generate(prompts, sampling, n)
        failed = [trajectory for trajectory in done if trajectory.error]
        if failed:
            raise InputError(f"prompt {failed[0].prompt_index} of {len(prompts)} cannot run: {failed[0].error}")
        return [(trajectory.token_ids, trajectory.logprobs) for trajectory in done]

    def totals(self) -> Mapping[str, float]:
        totals = defaultdict[str, float](float)
        for row in self._rollout.metric_rows():
            totals[row.name] += row.value
        return totals

    def update_named_params(self, metadata: object, named_params: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._rollout.update_weights(self._whole(named_params))


class ServerClient(_Client):
    """Generates with `specactor serve`. A version of the weights is a checkpoint in a folder, removed when the server
    has read it. InputError: the server does not answer, or has another tokenizer; or the package httpx is missing."""

    def __init__(self, trainer: Any, url: str, weights_folder: str | None = None) -> None:
        super().__init__(trainer)
        try:
            import httpx
        except ImportError:
            raise InputError(f"attach({url!r}) needs the package httpx. Fix: pip install httpx") from None
        headers = {"Authorization": f"Bearer {key}"} if (key := os.environ.get("SPECACTOR_API_KEY")) else {}
        base = url.rstrip("/").removesuffix("/v1")
        self._http, self._folder = httpx.Client(base_url=base, headers=headers, timeout=None), weights_folder
        if weights_folder is not None and not Path(weights_folder).is_dir():
            raise InputError(
                f"attach: weights_folder={weights_folder!r} is no folder; name one that the server sees, too"
            )
        self._model = self._ask("/v1/models")["data"][0]["id"]
        self._require_tokenizer(self._ask("/tokenize", {"prompt": _TEXT})["tokens"], self._model)

    def roll_out(self, prompts: list[list[int]], sampling: SamplingParams, n: int) -> Outputs:
        """As the base class, in requests of bounded size, several at a time. Each choice has the seed that it would
        have in one request of all prompts."""
        more = {"model": self._model, "n": n, "logprobs": 0, "return_token_ids": True}

        def ask(part: range) -> Outputs:
            own = {"prompt": prompts[part.start : part.stop], "first_prompt": part.start}
            answer = self._ask("/v1/completions", {**asdict(sampling), **more, **own})
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            return [(choice["token_ids"], choice["logprobs"]["token_logprobs"]) for choice in choices]

        pool = ThreadPoolExecutor(_AT_A_TIME)
        try:
            return list(itertools.chain.from_iterable(pool.map(ask, _parts(prompts, n))))
        finally:
            pool.shutdown(cancel_futures=True)

    def totals(self) -> Mapping[str, float]:
        totals = defaultdict[str, float](float)
        for line in self._ask("/metrics", as_text=True).splitlines():
            if (name := line.partition("{")[0]) in _TOTALS:
                totals[name] += float(line.rpartition(" ")[2])
        return totals

    def update_named_params(self, metadata: object, named_params: Iterable[tuple[str, torch.Tensor]]) -> None:
        from safetensors.torch import save_file

        tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in self._whole(named_params)}
        with tempfile.TemporaryDirectory(prefix="specactor-weights-", dir=self._folder) as folder:
            save_file(tensors, Path(folder, "model.safetensors"))
            self._ask("/update_weights", {"weight_dir": folder})

    def _ask(self, path: str, body: Mapping[str, Any] | None = None, as_text: bool = False) -> Any:
        """Send a request and return its answer; with a body it is a POST. Waits while too many outputs wait there."""
        from httpx import HTTPError

        try:
            while (answer := self._http.request("GET" if body is None else "POST", path, json=body)).status_code == 429:
                time.sleep(float(answer.headers.get("Retry-After", 1)))
            content = None if answer.is_error else answer.text if as_text else answer.json()
        except (HTTPError, ValueError) as error:
            url = self._http.base_url.join(path)
            raise InputError(f"{url} does not answer: {error}. Fix: start `specactor serve`") from None
        if answer.is_error:
            raise InputError(f"{answer.url}: {answer.status_code}: {answer.text[:2000]}")
        return content


def _parts(prompts: Sequence[Sequence[int]], n: int) -> Iterator[range]:
    """Yield the numbers of the prompts of each request for `n` choices of every prompt."""
    begin = size = 0
    for number, prompt in enumerate(prompts):
        length = len(json.dumps(prompt))
        if number > begin and ((number + 1 - begin) * n > _MOST_CHOICES or size + length > _MOST_BYTES):
            yield range(begin, number)
            begin, size = number, 0
        size += length
    yield range(begin, len(prompts))


def _generation(trainer: Any, client: _Client | None) -> Any:
    from trl.generation.vllm_generation import VLLMGeneration

    class RolloutGeneration(VLLMGeneration):  # type: ignore[misc]
        """TRL's own class with another client."""

        def _init_vllm(self) -> None:
            self.vllm_client = client
            self.accelerator.wait_for_everyone()

    arguments = _sampling_arguments(trainer)
    arguments["max_completion_length"] = arguments.pop("max_tokens")
    return RolloutGeneration(
        trainer.model, trainer.accelerator, trainer.processing_class, mode="server", logprobs=0, **arguments
    )


def _sampling_arguments(trainer: Any) -> dict[str, Any]:
    return {
        "temperature": trainer.temperature,
        "top_p": trainer.top_p,
        "top_k": trainer.top_k,
        "min_p": trainer.min_p,
        "repetition_penalty": trainer.repetition_penalty,
        "max_tokens": trainer.max_completion_length,
        "structured_outputs_regex": trainer.args.vllm_structured_outputs_regex,
        "generation_kwargs": trainer.args.generation_kwargs,
    }


def _require_supported(trainer: Any) -> None:
    if lacking := TRL.lacking():
        raise InputError(f"attach: {lacking}. Fix: {TRL.install}")
    TRL.note_untested(logger)
    from trl import GRPOTrainer, RLOOTrainer

    if not isinstance(trainer, GRPOTrainer | RLOOTrainer):
        raise InputError(f"attach takes TRL's GRPOTrainer or RLOOTrainer, not {type(trainer).__name__}")
    if trainer.use_vllm:
        raise InputError("TRL: use_vllm is True, which starts vLLM or is attached already. Fix: set use_vllm=False")
    if trainer._is_vlm:
        raise InputError("TRL: the processing class is one for images; rollouts are of text only")
