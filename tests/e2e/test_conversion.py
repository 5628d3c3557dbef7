"""The built-in model is converted whole, and says what it should."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specactor_ray.models import loading

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]


def test_the_model_is_whole_and_says_what_it_should(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPECACTOR_CACHE", str(tmp_path))
    capfd.readouterr()
    model, tokenizer = loading.load_model("smollm2-135m"), loading.load_tokenizer("smollm2-135m")
    shown = "".join(capfd.readouterr())
    assert "GGUF" not in shown and "accelerator" not in shown, "progress bars, or DeepSpeed's search for a GPU"
    assert [path.name for path in (tmp_path / "models").iterdir() if path.is_dir()] == ["smollm2-135m-v1"]

    config = model.config
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert not hasattr(config, "quantization_config") and model.dtype is torch.float32
    assert model.generation_config.eos_token_id == config.eos_token_id == tokenizer.eos_token_id == 2
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)

    assert tokenizer("<|im_start|>")["input_ids"] == [1]
    assert tokenizer.tokenize("in 12  345") == ["in", "Ġ", "1", "2", "ĠĠ", "3", "4", "5"]
    for text in ("Grüße, naïve café", "def f(x):\n    return x ** 2\n", " 日本語 \t and tabs"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
