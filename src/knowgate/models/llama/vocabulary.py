"""Text for a model in a GGUF file: its chat template, and its tokens as a tokenizer of transformers shows them."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from knowgate.errors import MissingExtra, WeightsError
from knowgate.files import cache_dir, sha256_file, sha256_text, write_text
from knowgate.models.llama.engine import Engine
from knowgate.models.turns import as_text


class Vocabulary:
    """What `GrowingText` and rendering need of a tokenizer."""

    clean_up_tokenization_spaces = False

    def __init__(self, engine: Engine):
        self._engine = engine
        self.template = engine.template

    @functools.cached_property
    def specials(self) -> list[str]:
        """Tokens that stand for no text: what somebody wrote must not become one."""
        numbers = range(self._engine.n_vocab)
        return [text for n in numbers if self._engine.special(n) and (text := self._engine.spelling(n))]

    @functools.cached_property
    def _template(self) -> Any:
        """As transformers runs it: in a sandbox, with lines of tags leaving no trace."""
        try:
            from jinja2 import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ModuleNotFoundError:
            raise MissingExtra("a chat template", "llamacpp") from None
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        try:
            return environment.from_string(self.template)
        except TemplateError as error:
            raise WeightsError(f"the chat template of the GGUF file cannot be read: {error}.") from None

    def render(self, text: str) -> str:
        """The text as a user turn, up to where the answer begins. Models without a chat template get it bare."""
        if not self.template:
            return text
        turn = [{"role": "user", "content": as_text(text, self.specials)}]
        named = {"bos_token": self._engine.bos, "eos_token": self._engine.eos}
        return str(self._template.render(messages=turn, add_generation_prompt=True, **named))

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self._engine.decode(tokens, skip_special_tokens=skip_special_tokens) if tokens else ""

    def convert_ids_to_tokens(self, tokens: Sequence[int]) -> list[str]:
        return [self._engine.spelling(token) for token in tokens]


def file_digest(file: Path) -> str:
    """sha256 of the file, remembered by path, size and time: hashing a gigabyte at every start would be slow."""
    stat = file.stat()
    note = cache_dir() / "digests" / sha256_text(f"{file.resolve()}|{stat.st_size}|{stat.st_mtime_ns}")
    if note.is_file() and re.fullmatch(r"[0-9a-f]{64}", said := note.read_text(encoding="ascii")):
        return said
    found = sha256_file(file)
    write_text(note, found)
    return found
