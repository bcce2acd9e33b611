"""What a first run is told: documents, LLM, questions, how many. Checks them; does nothing with them."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from knowgate.doors import check_seed, check_whole
from knowgate.errors import BadSetting
from knowgate.servers import without_secrets

COUNT, MOST = 100, 100_000
MAX_LOSS = 0.05  # what 72 questions can prove where two gates compete, and a hundred leave 80 for that
OUT, CONFIG = Path("knowgate-start"), Path("knowgate.toml")
NAMES = ("docs", "index", "model", "questions", "count", "max_loss", "writer", "out", "config", "seed")
SHOWN_AS = {name: f"--{name.replace('_', '-')}" for name in NAMES}


@dataclass(frozen=True)
class Wishes:
    """docs: folder or JSONL file; or index: folder or http:URL. questions: file or data spec; '' has them written, by
    `writer` or, where that is '', by the LLM itself. count: questions labelled, at most. max_loss: to be proven."""

    docs: str = ""
    index: str = ""
    model: str = "smollm"
    questions: str = ""
    count: int = COUNT
    max_loss: float = MAX_LOSS
    writer: str = ""
    out: Path = OUT
    config: Path = CONFIG
    seed: int = 0

    @property
    def source(self) -> str:
        """Documents or index, whichever was given."""
        return self.docs or self.index

    def check(self) -> None:
        """What can be seen before anything is read."""
        if bool(self.docs) == bool(self.index):
            problem = "both --docs and --index are given" if self.docs else "no documents are named"
            raise BadSetting(f"{problem}. Type: knowgate start --docs FOLDER (or --index DIR)")
        check_whole(self.count, "the number of questions (--count)", most=MOST)
        if not 0 < self.max_loss < 1:
            raise BadSetting(f"--max-loss is {self.max_loss}; it must be above 0 and below 1 (0.05 is five points).")
        check_seed(self.seed)

    def command(self, **other: Any) -> str:
        """What to type for the same first run, or for another one; logins and keys in addresses are left out."""
        usual, own = asdict(Wishes()), {**asdict(self), **other}
        words = [
            word
            for name, option in SHOWN_AS.items()
            if own[name] != usual[name]
            for word in (option, without_secrets(str(own[name])))
        ]
        return shlex.join(["knowgate", "start", *words])

    def record(self) -> dict[str, Any]:
        """Plain data, without logins and keys."""
        return {
            key: without_secrets(value) if isinstance(value, str) else str(value) if isinstance(value, Path) else value
            for key, value in asdict(self).items()
        }

    def changes(self, before: dict[str, Any]) -> list[str]:
        """What is not as it was in an earlier record, in words."""
        now, known = self.record(), {one.name for one in fields(self)} - {"out", "config"}
        return [
            f"{SHOWN_AS[key]} was '{before[key]}', now '{now[key]}'"
            for key in now
            if key in known and key in before and before[key] != now[key]
        ]
