"""`knowgate serve --demo`: the embedded model in front of the packaged handbook, and what to try."""

from __future__ import annotations

from pathlib import Path

from knowgate.cli.console import WORDS
from knowgate.cli.demo_traffic import demo_folder

QUESTIONS = ("Who is the head of the calibration laboratory?", "What is the capital of France?", "Thanks a lot!")


def demo_docs() -> Path:
    """What is looked up in where nothing else is named."""
    return demo_folder() / "handbook"


def say_what_to_try(address: str) -> None:
    """Lines to copy into another terminal."""
    WORDS.print(f"The handbook of a company nobody knows is in {demo_docs()}. Try:", markup=False)
    for question in QUESTIONS:
        body = f'{{"model": "knowgate", "messages": [{{"role": "user", "content": "{question}"}}]}}'
        WORDS.print(f"  curl {address}/v1/chat/completions -d '{body}'", markup=False, soft_wrap=True)
    WORDS.print(f'  curl {address}/v1/decide -d \'{{"question": "{QUESTIONS[0]}"}}\'', markup=False, soft_wrap=True)
    WORDS.print(f"  curl {address}/metrics        # in a browser: {address}/docs", markup=False, soft_wrap=True)
    WORDS.print(f"Any OpenAI client works: its base URL is {address}/v1", markup=False, soft_wrap=True)
