"""Outside files: configs, tensors, tokenizers, chat templates. Only hf/__main__.py knows layers."""

from hf.tokenizer import load_tokenizer

__all__ = ["load_tokenizer"]
