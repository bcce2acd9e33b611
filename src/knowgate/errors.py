"""Exceptions. Every message says what is wrong, then what to do.

KnowgateError
├── UnknownName        a model, gate, retriever, ... that is not registered
├── BadSetting         an argument, option or setting that cannot be used
├── MissingExtra       an optional package is not installed
├── BadInput           a question, document or data file that cannot be used
├── ModelError         the LLM or its server failed, or returned something unusable
│   ├── ServerError    an HTTP server (model or search) failed
│   ├── DeviceError    the GPU failed; only a new process can continue
│   ├── OutOfMemory    the GPU has too little memory even for one question
│   └── UnsupportedSignal  the backend does not offer a signal
├── AdapterError       a wrapped retriever or model of another framework failed
├── WeightsError       model weights are missing, corrupted or cannot be downloaded
├── BrokenIndex        a retrieval index is missing, broken or of another kind
└── ArtifactError      a saved artifact is broken, of another version, or of another model
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class KnowgateError(Exception):
    """Base class of all errors whose message is meant for the user.

    Args:
        message: What is wrong and what to do.
        brief: What is wrong only, for the cell of a table. Default: the whole message.
    """

    def __init__(self, message: str, *, brief: str = ""):
        super().__init__(message)
        self.brief = brief or message


class UnknownName(KnowgateError):
    """A name is not registered.

    Args:
        kind: What the name should be, such as "gate".
        name: The unknown name.
        known: The registered names.
        also: What else is allowed, in words.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str], *, also: str = ""):
        names = sorted(known)
        matches = difflib.get_close_matches(name, names, n=1)
        hint = f" Did you mean '{matches[0]}'?" if matches else ""
        super().__init__(f"unknown {kind} '{name}'.{hint} Known: {', '.join(names)}{f'; or {also}' if also else ''}.")


class BadSetting(KnowgateError):
    """An argument, option or setting cannot be used."""


class MissingExtra(KnowgateError):
    """An optional package is not installed.

    Args:
        feature: What needs the package.
        extra: The extra of knowgate that installs it.
    """

    def __init__(self, feature: str, extra: str):
        super().__init__(f"{feature} needs the '{extra}' extra. Install it: pip install 'knowgate[{extra}]'")


class BadInput(KnowgateError):
    """A question, document or data file cannot be used."""


class ModelError(KnowgateError):
    """The LLM or its server failed, or returned something unusable."""


class ServerError(ModelError):
    """An HTTP server failed, rejected a request, or returned something unusable."""


class DeviceError(ModelError):
    """The GPU failed. Only a new process can continue."""


class OutOfMemory(ModelError):
    """The GPU has too little memory even for one question."""


class UnsupportedSignal(ModelError):
    """The backend does not offer a signal that is needed."""


class AdapterError(KnowgateError):
    """A wrapped object of another framework failed, or returned something unusable."""


class WeightsError(KnowgateError):
    """Model weights are missing, corrupted or cannot be downloaded."""


class BrokenIndex(KnowgateError):
    """A retrieval index is missing, broken or of another kind."""


class ArtifactError(KnowgateError):
    """A saved artifact is broken, of another version, or of another model."""
