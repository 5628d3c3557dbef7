"""What a module's class computes, by its source: which classes the forms of `layers.py` stand for.

A few tokens at load do not show a scale that begins at a far position or a clip of large values, but the source does. A
class whose source is not listed keeps its own forward.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import textwrap
import types
from typing import Any

_DISPATCHED = "eager_attention_forward"
"""Attention itself, which transformers replaces by the registered one."""


@functools.cache
def source_of(kind: type) -> str | None:
    """Digest of a class's `forward` and of all functions and methods that it calls, apart from names of types; None if
    there is no source."""
    parts = dict[Any, str]()
    try:
        _collect(kind.forward, kind, parts)  # type: ignore[attr-defined]
    except (OSError, TypeError, SyntaxError):
        return None
    return hashlib.sha256("\n".join(parts.values()).encode()).hexdigest()[:12]


def _collect(function: Any, kind: type, parts: dict[Any, str]) -> None:
    """Add the source of a function, and of what it calls, in the order of their names."""
    if function in parts:
        return
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    parts[function] = ast.unparse(_Normal().visit(tree))
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - {_DISPATCHED}
    for name in sorted(names):
        used = getattr(function, "__globals__", {}).get(name)
        if isinstance(used, types.FunctionType):
            _collect(used, kind, parts)
    own = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    for name in sorted(own):
        used = inspect.getattr_static(kind, name, None)
        used = used.fget if isinstance(used, property) else getattr(used, "__func__", used)
        if isinstance(used, types.FunctionType):
            _collect(used, kind, parts)


class _Normal(ast.NodeTransformer):
    """Removes what does not compute: docstrings and annotations."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        self.generic_visit(node)
        node.returns = None
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return node

    def visit_arg(self, node: ast.arg) -> Any:
        node.annotation = None
        return node


# Sources that were read and compute exactly what the forms of `layers.py` do, by a class of transformers that has
# it; many others have the same. `tests/unit/models/test_layers.py` compares them with the installed version.
NORMS = {
    "9635bcd843f3": "llama.LlamaRMSNorm",
    "e5559c7750c3": "gemma.GemmaRMSNorm",
    "eef4e978a32a": "olmo2.Olmo2RMSNorm",
    "b6d7ab076811": "helium.HeliumRMSNorm",
    "e0fd214fdd79": "gemma4.Gemma4RMSNorm",
}
OFFSET_NORM = "gemma.GemmaRMSNorm"
"""The one of `NORMS` that multiplies by 1 + weight."""
GATED_MLPS = {"7d2027d4464e": "llama.LlamaMLP"}
LAYERS = {"1a8125909341": "llama.LlamaDecoderLayer", "eb03c623c021": "gemma2.Gemma2DecoderLayer"}
ATTENTIONS = {
    "4e31d0172afb": "llama.LlamaAttention",
    "50617a8e5d37": "qwen3.Qwen3Attention",
    "011021e6df66": "mistral.MistralAttention",
    "a26271d6671c": "qwen2.Qwen2Attention",
    "a96910474169": "gemma2.Gemma2Attention",
    "36b4ab8c6c27": "gemma3.Gemma3Attention",
    "4d99f20b8989": "seed_oss.SeedOssAttention",
    "9171b16addc8": "starcoder2.Starcoder2Attention",
    "ca6580054bfb": "apertus.ApertusAttention",
    "7911b56a3bd8": "glm4_moe.Glm4MoeAttention",
}
