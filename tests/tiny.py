"""Tiny models that were really trained, and prompts of the domain they know.

The domain is small on purpose: counting, copying, sums, tables and descriptions in a few words. So a model of two
layers is often right about what one of four layers says next, text repeats itself, and answers end by themselves.
The models have a padded vocabulary, as many real ones do: 512 rows for about 410 tokens.
They are made once (about 30 seconds in all) and kept in the cache directory under a hash of this file.
"""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from specactor_ray.core.files import cache_dir
from specactor_ray.models.builtin import cached_dir, quiet_transformers

VOCAB_SIZE = 512
CONTEXT = 512
PAD, EOS, USER, ASSISTANT = "<|pad|>", "<|eos|>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}<|eos|>"
    "{% else %}<|user|>{{ message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

TARGET_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
WIDE_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
"""vLLM's attention has no heads of 16."""
DRAFT_SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
}

COLOURS = ("red", "blue", "green", "grey", "black", "white")
ANIMALS = ("fox", "cat", "owl", "hare", "crow", "pony")
PLACES = ("on the mat", "by the river", "in the barn", "under the oak", "near the gate")
ACTS = ("sleeps", "waits", "sings", "eats", "looks around")


def _thing(rng: random.Random) -> str:
    return f"the {rng.choice(COLOURS)} {rng.choice(ANIMALS)}"


def _count(rng: random.Random) -> tuple[str, str]:
    start, length = rng.randint(1, 30), rng.randint(4, 16)
    numbers = range(start, start + length)
    return f"Count from {numbers[0]} to {numbers[-1]}.", ", ".join(map(str, numbers)) + "."


def _repeat(rng: random.Random) -> tuple[str, str]:
    times, text = rng.randint(2, 5), f"{_thing(rng)} {rng.choice(ACTS)}"
    return f"Say {times} times: {text}.", " ".join([f"{text}."] * times)


def _add(rng: random.Random) -> tuple[str, str]:
    first, second = rng.randint(1, 20), rng.randint(1, 20)
    return f"Add {first} and {second}.", f"{first} plus {second} is {first + second}."


def _describe(rng: random.Random) -> tuple[str, str]:
    thing = _thing(rng)
    lines = [f"{thing} {rng.choice(ACTS)} {rng.choice(PLACES)}." for _ in range(rng.randint(1, 4))]
    return f"Tell me about {thing}.", " ".join(lines)


def _table(rng: random.Random) -> tuple[str, str]:
    names = rng.sample(ANIMALS, rng.randint(2, 4))
    rows = [f"| {name} | {rng.choice(COLOURS)} | {rng.randint(1, 9)} |" for name in names]
    return f"Make a table of {', '.join(names)}.", "\n".join(["| name | colour | age |", *rows])


TASKS: tuple[Callable[[random.Random], tuple[str, str]], ...] = (_count, _repeat, _add, _describe, _table)


def tiny_prompts(n: int, seed: int = 0) -> list[str]:
    """`n` questions of the domain, the kinds in turn; the same for the same seed."""
    rng = random.Random(f"prompts {seed}")
    return [TASKS[index % len(TASKS)](rng)[0] for index in range(n)]


def tiny_prompt_ids(n: int, seed: int = 0) -> list[tuple[int, ...]]:
    """`tiny_prompts` as token ids, wrapped in the chat template and ready to be answered."""
    tokenizer = _tokenizer()
    return [tuple(tokenizer.encode(f"{USER}{prompt}{ASSISTANT}").ids) for prompt in tiny_prompts(n, seed)]


def tiny_target() -> Path:
    """The directory of the tiny target model: 4 layers, hidden 64, untied head."""
    return _model("target", TARGET_SHAPE, steps=220, seed=1)


def tiny_vllm_target() -> Path:
    """The tiny target with heads of 32."""
    return _model("vllm-target", {**TARGET_SHAPE, **WIDE_HEADS}, steps=220, seed=1)


def tiny_draft() -> Path:
    """The directory of the tiny draft model: 2 layers, hidden 32, tied head, the same vocabulary."""
    return _model("draft", DRAFT_SHAPE, steps=260, seed=2)


def tiny_eagle() -> Path:
    """The directory of an EAGLE head for the tiny target, trained on the target's own rollouts."""
    recipe = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    return cached_dir(cache_dir() / "test-models" / f"tiny-eagle-{recipe}", _build_eagle)


def _model(role: str, shape: dict[str, Any], steps: int, seed: int) -> Path:
    recipe = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    final = cache_dir() / "test-models" / f"tiny-{role}-{recipe}"
    return cached_dir(final, functools.partial(_build, shape=shape, steps=steps, seed=seed))


def _build(folder: Path, shape: dict[str, Any], steps: int, seed: int) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_tokenizer(),
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=CONTEXT,
        chat_template=CHAT_TEMPLATE,
    )
    with quiet_transformers():
        _train(shape, steps, seed).save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _documents(n: int) -> list[str]:
    rng = random.Random("documents")
    pairs = [rng.choice(TASKS)(rng) for _ in range(n)]
    return [f"{USER}{question}{ASSISTANT}{answer}{EOS}" for question, answer in pairs]


@functools.cache
def _tokenizer() -> Any:
    """A byte-level BPE of at most 512 tokens: every text can be encoded, frequent words are one or two tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, EOS, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_documents(500), trainer)
    return tokenizer


def _train(shape: dict[str, Any], steps: int, seed: int) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = _tokenizer()
    eos = tokenizer.token_to_id(EOS)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=tokenizer.token_to_id(PAD),
        **shape,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).train()
        rows = torch.tensor(_rows(tokenizer, length=160))
        optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=6e-3, total_steps=steps, pct_start=0.1)
        for _ in range(steps):
            batch = rows[torch.randint(len(rows), (16,))]
            loss = model(input_ids=batch, labels=batch).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    model.generation_config.eos_token_id = eos
    return model.eval()


def _rows(tokenizer: Any, length: int) -> list[list[int]]:
    """Rows of documents one after the other, each row beginning with the start of a document and cut to length."""
    rows, row = [], []
    for encoding in tokenizer.encode_batch(_documents(12000)):
        row += encoding.ids
        if len(row) >= length:
            rows.append(row[:length])
            row = []
    return rows


def _build_eagle(folder: Path) -> None:
    import torch

    from specactor_ray.distill.eagle import expected_counts, make_batch, new_head, unroll_loss
    from specactor_ray.draft.eagle.checkpoint import save_head
    from specactor_ray.models.loading import load_model

    target = load_model(str(tiny_target()))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        examples = _eagle_examples()
        counts = sum(expected_counts(target, example) for example in examples)
        head = new_head(target, "tiny-target", counts, 300).train()
        trained = [weight for weight in head.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=2e-3)
        for epoch in range(3):
            for batch in _batches_by_length(examples, 1500, random.Random(epoch)):
                loss = unroll_loss(head, make_batch(batch, head), 3)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    save_head(head.eval(), folder)


def _batches_by_length(examples: Sequence[Any], max_positions: int, rng: random.Random) -> Iterator[list[Any]]:
    """Batches of similar lengths in random order, each of at most `max_positions` padded positions (or one example)."""
    ranked = sorted(examples, key=lambda example: len(example) + rng.uniform(0, 32))
    batches, current, longest = list[list[Any]](), list[Any](), 0
    for example in ranked:
        if current and max(longest, len(example)) * (len(current) + 1) > max_positions:
            batches.append(current)
            current, longest = [], 0
        current.append(example)
        longest = max(longest, len(example))
    if current:
        batches.append(current)
    rng.shuffle(batches)
    yield from batches


def _eagle_examples() -> list[Any]:
    """Rollouts of the tiny target with the states of all its layers."""
    import torch

    from specactor_ray.core.types import SamplingParams
    from specactor_ray.distill.eagle import EagleExample
    from specactor_ray.models.loading import load_model
    from specactor_ray.models.ragged_model import HEAD_INPUT, RaggedModel
    from specactor_ray.models.weight_buckets import from_wire
    from specactor_ray.table.requests import TargetRequest
    from specactor_ray.target.hf import HfEngine

    model = load_model(str(tiny_target()))
    eos = model.generation_config.eos_token_id
    engine = HfEngine(RaggedModel(model, 64 << 20, (0, 1, 2, HEAD_INPUT)), [eos], max_batch=32)
    prompts = tiny_prompt_ids(96, seed=77)
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature=1.0, max_tokens=48, seed=index)
        engine.add(engine.table.open(TargetRequest(str(index), prompt, sampling)))
    tokens: dict[int, list[int]] = {index: [] for index in range(len(prompts))}
    states: dict[int, list[Any]] = {index: [] for index in range(len(prompts))}
    while engine.has_work():
        result = engine.step()
        for row, fresh, _ in result.outputs():
            tokens[row] += fresh
        for row, _, values in result.states.split() if result.states is not None else ():
            states[row].append(from_wire(values))
    examples = []
    for index, prompt in enumerate(prompts):
        whole = torch.cat(states[index])
        examples.append(EagleExample((*prompt, *tokens[index]), len(prompt), whole[:, :192], whole[:, 192:]))
    return examples
