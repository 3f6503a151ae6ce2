"""Files of the outside world: configs, tensors, tokenizers, chat templates. It knows no layers."""

from hf.tokenizer import load_tokenizer

__all__ = ["load_tokenizer"]
