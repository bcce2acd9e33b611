"""A backend in one file: any program that reads a prompt and prints an answer."""

import hashlib
import shlex
import subprocess
from collections.abc import Sequence

from knowgate.errors import ModelError, UnsupportedSignal
from knowgate.models.backend import Backend
from knowgate.types import Completion, LabelPrompt, Prompt, Reading, Signal, SignalRequest, Vector


class CommandModel(Backend):
    """Starts `command` for each prompt. It drafts and answers; it shows no probabilities and no hidden states."""

    offers = frozenset({Signal.DRAFT})
    depth = 0

    def __init__(self, command: str):
        self.name = f"command:{command}"
        self.fingerprint = hashlib.sha256(self.name.encode()).hexdigest()[:16]
        self._command = shlex.split(command)

    def read(self, prompts: Sequence[Prompt], want: SignalRequest) -> list[Reading]:
        if want.layers or want.samples:
            raise UnsupportedSignal(f"{self.name} drafts answers and gives nothing else.")
        return [Reading(self._answer(prompt) if want.draft_tokens else None) for prompt in prompts]

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        n: int = 1,
        seed: int | None = None,
        resume: Sequence[object] | None = None,
    ) -> list[list[Completion]]:
        return [[self._answer(prompt) for _ in range(n)] for prompt in prompts]

    def fits(self, prompts: Sequence[Prompt], max_tokens: int) -> list[bool]:
        return [True for _ in prompts]

    def label_logits(self, prompts: Sequence[LabelPrompt], labels: Sequence[str]) -> list[Vector]:
        raise UnsupportedSignal(f"{self.name} shows no logits.")

    def _answer(self, prompt: Prompt) -> Completion:
        done = subprocess.run(self._command, input=prompt.text, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ModelError(f"{self.name} failed: {done.stderr.strip()}")
        text = done.stdout.strip()
        return Completion(text, n_tokens=len(text.split()))
