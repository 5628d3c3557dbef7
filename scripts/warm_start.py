"""Teach a small model to rename variables in code: the start of `conf/bench_train_renames.yaml`.

    python scripts/warm_start.py OUT [--model smollm2-135m] [--steps 6]

Reinforcement learning starts from a model that solves its task at times. Supervised training on new tasks in each
step makes one, in the folder OUT. `conf/prompts/code_renames.jsonl` has other tasks of the same kind
(`held_out_tasks`). Their answers have 35 to 995 tokens and most are short, which is the long tail of a rollout.
"""

from __future__ import annotations

import argparse
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from specactor_ray.models.loading import load_model, load_tokenizer

NOUNS = ["order", "user", "file", "price", "node", "item", "record", "score", "event", "token"]
VERBS = ["load", "check", "merge", "count", "find", "split", "clean", "write"]
RENAMES = (("data", "table"), ("result", "answer"), ("config", "settings"), ("batch", "group"), ("state", "status"))
FUNCTIONS = (
    """def {name}({old}, {a}s):
    for {a} in {a}s:
        if {a}.size > {n}:
            {old}.append({a})
    return {old}""",
    """def {name}({old}):
    {old}.{a} = {n}
    if {old}.{b} is None:
        return False
    return {old}.{a} < {old}.{b}.limit""",
    """def {name}({a}, {old}={n}):
    total = 0
    while {old} > 0:
        total += {a}.step({old})
        {old} -= 1
    return total""",
    """def {name}({old}):
    with open({old}.path) as {a}:
        return [{b}.strip() for {b} in {a} if len({b}) < {n}]""",
)
COUNTS = (1, 1, 1, 2, 2, 2, 3, 3, 4, 6, 10, 25)
"""Functions of each task of an epoch: most are short, one is long."""


def make_task(rng: random.Random, functions: int) -> dict[str, str]:
    """A chat prompt with code of this many functions, and the right answer."""
    old, new = rng.choice(RENAMES)
    names = rng.sample([f"{verb}_{noun}" for verb in VERBS for noun in NOUNS], functions)
    code = "\n\n".join(
        rng.choice(FUNCTIONS).format(
            name=name, old=old, a=rng.choice(NOUNS), b=rng.choice(NOUNS), n=rng.randrange(2, 90)
        )
        for name in names
    )
    prompt = f"Return the same code with `{old}` renamed to `{new}`. Change nothing else.\n\n{code}"
    return {"prompt": prompt, "answer": re.sub(rf"\b{old}\b", new, code)}


def held_out_tasks() -> list[dict[str, str]]:
    """The tasks of `conf/prompts/code_renames.jsonl`."""
    rng = random.Random(2)
    return [make_task(rng, functions) for functions in COUNTS]


def examples(tokenizer: Any, rng: random.Random, count: int) -> Iterator[tuple[list[int], list[int]]]:
    """Token ids of prompts and answers of new tasks."""
    for _ in range(count):
        task = make_task(rng, rng.choice(COUNTS))
        messages = [{"role": "user", "content": task["prompt"]}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        answer = tokenizer(task["answer"], add_special_tokens=False)["input_ids"]
        yield prompt, [*answer, tokenizer.eos_token_id]


def train(model: Any, tokenizer: Any, steps: int, rng: random.Random) -> None:
    """Supervised training in place: `steps` updates on 4 new tasks each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, betas=(0.9, 0.95), weight_decay=0.0)
    begin = time.monotonic()
    for step in range(steps):
        loss_sum, tokens = 0.0, 0
        for prompt, answer in examples(tokenizer, rng, 4):
            ids = torch.tensor([prompt + answer])
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(input_ids=ids, logits_to_keep=len(answer) + 1).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits.float(), ids[0, len(prompt) :], reduction="sum")
            (loss / 1000.0).backward()
            loss_sum += float(loss.detach())
            tokens += len(answer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1}/{steps}  loss {loss_sum / tokens:.4f}  {time.monotonic() - begin:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to write, must not exist")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    if args.out.exists():
        parser.error(f"{args.out} exists.")
    torch.manual_seed(0)
    tokenizer, model = load_tokenizer(args.model), load_model(args.model).requires_grad_(True).train()
    train(model, tokenizer, args.steps, random.Random(1))
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
