"""Tokenizers, token files, and batches of tokens."""

from .loader import DataLoader
from .prepare import find_tokenizer_file, prepare, prepare_standard_library, tokenizer_for_prefix
from .questions import Question, read_questions
from .shards import TokenFiles, find_files, is_pattern
from .tokenizer import Tokenizer, load_tokenizer, stream_text
from .tokens import TokenFile, write_tokens

__all__ = [
    "DataLoader", "Question", "TokenFile", "TokenFiles", "Tokenizer", "find_files", "find_tokenizer_file", "is_pattern",
    "load_tokenizer", "prepare", "prepare_standard_library", "read_questions", "stream_text", "tokenizer_for_prefix",
    "write_tokens",
]  # fmt: skip
