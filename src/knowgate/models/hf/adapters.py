"""LoRA adapters in a model that also runs without them: on for who asks, off for everybody else.

Knows peft's layers and one lock; not what an adapter is for. The weights of the model are never changed or copied.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from knowgate.errors import MissingExtra
from knowgate.models.hf.load import explained


@dataclass
class Adapters:
    """The adapters put into a model, and the turn to use it: whoever runs it holds `turn`, so that nobody meets an
    adapter that somebody else switched on. The lock is one thread's as often as that thread likes."""

    model: Any
    turn: threading.RLock = field(default_factory=threading.RLock, repr=False)
    wrapped: Any = field(default=None, repr=False)

    def add(self, name: str, folder: Path) -> None:
        """Put the adapter in a folder into the model, off. One that is in is not read again."""
        with self.turn:
            if self.wrapped is not None and name in self.wrapped.peft_config:
                return
            try:
                from peft import PeftModel
            except ModuleNotFoundError:
                raise MissingExtra("a LoRA judge", "train") from None
            with explained(str(folder)):
                if self.wrapped is None:
                    self.wrapped = PeftModel.from_pretrained(self.model, str(folder), adapter_name=name)
                else:
                    self.wrapped.load_adapter(str(folder), adapter_name=name)
            self.wrapped.eval()
            self._switch_off()

    @contextlib.contextmanager
    def using(self, name: str) -> Iterator[None]:
        """The model with this adapter, for this thread alone; without any again at the end, whatever happens."""
        with self.turn:
            for layer in self._layers():
                layer.enable_adapters(True)
                layer.set_adapter(name, inference_mode=True)
            try:
                yield
            finally:
                self._switch_off()

    def _switch_off(self) -> None:
        for layer in self._layers():
            layer.enable_adapters(False)

    def _layers(self) -> list[Any]:
        from peft.tuners.tuners_utils import BaseTunerLayer

        return [module for module in self.model.modules() if isinstance(module, BaseTunerLayer)]
