"""Text to tokens, token files, and batches of them."""

from .loader import DataLoader
from .prepare import find_tokenizer_file, prepare, prepare_standard_library, tokenizer_for_prefix
from .tokenizer import Tokenizer, load_tokenizer, stream_text
from .tokens import TokenFile, write_tokens

__all__ = [
    "DataLoader",
    "TokenFile",
    "Tokenizer",
    "find_tokenizer_file",
    "load_tokenizer",
    "prepare",
    "prepare_standard_library",
    "stream_text",
    "tokenizer_for_prefix",
    "write_tokens",
]
