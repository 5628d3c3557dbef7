"""The built-in model is converted whole, whoever is killed meanwhile, and says what it should."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from specactor_ray.models import loading

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]
REPOSITORY = Path(__file__).parents[2]


def wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


class TestRealConversion:
    CONVERT = "from specactor_ray.models.loading import resolve_model; resolve_model('smollm2-135m')"

    def test_killed_in_the_middle_then_whole(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("SPECACTOR_CACHE", str(tmp_path))
        models = tmp_path / "models"
        process = subprocess.Popen([sys.executable, "-c", self.CONVERT], cwd=REPOSITORY, env=dict(os.environ))
        wait_until(lambda: any(models.glob(".smollm2-135m-*.tmp-*/*")), timeout_s=300)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not list(models.glob("smollm2-135m-*"))

        capfd.readouterr()
        model = loading.load_model("smollm2-135m")
        shown = "".join(capfd.readouterr())
        assert "GGUF" not in shown and "accelerator" not in shown, "progress bars, or DeepSpeed's search for a GPU"
        self.check_model(model)
        self.check_tokenizer()
        assert [path.name for path in models.iterdir() if path.is_dir()] == ["smollm2-135m-v1"]

    def check_model(self, model: torch.nn.Module) -> None:
        config = model.config
        assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
        assert not hasattr(config, "quantization_config")
        assert model.generation_config.eos_token_id == config.eos_token_id == 2
        assert model.dtype is torch.float32
        assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
        tokenizer = loading.load_tokenizer("smollm2-135m")
        question = [{"role": "user", "content": "What is the capital of France?"}]
        inputs = tokenizer.apply_chat_template(
            question, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        answer = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        assert "Paris" in tokenizer.decode(answer)

    def check_tokenizer(self) -> None:
        tokenizer = loading.load_tokenizer("smollm2-135m")
        assert tokenizer.eos_token_id == 2
        assert tokenizer("<|im_start|>")["input_ids"] == [1]
        assert tokenizer.tokenize("in 12  345") == ["in", "Ġ", "1", "2", "ĠĠ", "3", "4", "5"]
        for text in ("Grüße, naïve café", "def f(x):\n    return x ** 2\n", " 日本語 \t and tabs"):
            assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
