"""Exceptions of knowgate. Every message says what is wrong, then what to do.

KnowgateError
├── UnknownName        the name of a model, gate, retriever, ... is not known
├── BadSetting         an argument, option or setting has an invalid value
├── MissingExtra       an optional package is not installed
├── BadInput           a question, document or data file is invalid
├── ModelError         the LLM or its server failed, or returned something unusable
│   ├── ServerError    an HTTP server (model or search) failed
│   │   └── RejectionError  it rejected this request, or its reply is unusable; others may succeed
│   ├── DeviceError    the GPU failed; only a new process can continue
│   ├── OutOfMemory    the GPU has too little memory even for one question
│   └── UnsupportedSignal  the LLM backend cannot provide a signal that a gate needs
├── AdapterError       a wrapped retriever or model of another framework failed
├── WeightsError       model weights are missing, corrupted or cannot be downloaded
├── BrokenIndex        a retrieval index is missing, broken or of the wrong kind
└── ArtifactError      a saved folder is broken, or made by another version or for another LLM
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator


class KnowgateError(Exception):
    """Base class of all errors whose message is meant for the user.

    Args:
        message: What is wrong and what to do. Line breaks, which it may quote from a file or reply, become spaces.
        brief: Shorter text that only says what is wrong, for a table cell. Default: the whole message.
    """

    def __init__(self, message: str, *, brief: str = ""):
        message = " ".join(message.splitlines())
        super().__init__(message)
        self.brief = brief or message


def get_brief(error: BaseException) -> str:
    """Return what is wrong, without messages of servers and other libraries. They could quote questions or secrets."""
    if isinstance(error, KnowgateError) and error.brief != str(error):
        return error.brief
    cause = error.__cause__ or error
    if not isinstance(cause, KnowgateError):  # the message of `error` may quote that of its cause
        return f"unexpected error {type(cause).__name__}"
    return getattr(error, "brief", "") or str(error)


def get_cause(error: Exception) -> str:
    """Return the first line of an error message, or the type of an error without one."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


class UnknownName(KnowgateError):
    """The name of a model, gate, retriever or the like is not known.

    Args:
        kind: What the name should stand for, such as "gate".
        name: The unknown name.
        known: All known names. The message lists them and suggests the most similar one.
        also: What else is allowed instead of a name, in words, such as "the folder of a fitted gate".
    """

    def __init__(self, kind: str, name: str, known: Iterable[str], *, also: str = ""):
        self.known = sorted(known)
        self.also = also
        matches = difflib.get_close_matches(name, self.known, n=1)
        hint = f" Did you mean '{matches[0]}'?" if matches else ""
        alternative = f"; or {also}" if also else ""
        super().__init__(f"unknown {kind} '{name}'.{hint} Known: {', '.join(self.known)}{alternative}.")


class BadSetting(KnowgateError):
    """An argument, option or setting has an invalid value."""


class MissingExtra(KnowgateError):
    """An optional package is not installed.

    Args:
        feature: What needs the package, as the subject of the message.
        extra: The optional dependency group that installs the package, as in `pip install knowgate[EXTRA]`.
    """

    def __init__(self, feature: str, extra: str):
        super().__init__(f"{feature} needs the '{extra}' extra. Install it: pip install 'knowgate[{extra}]'")


@contextlib.contextmanager
def require_extra(feature: str, extra: str) -> Iterator[None]:
    """Raise MissingExtra if the `with` body imports a missing package.

    Args:
        feature: What needs the package, as the subject of the message.
        extra: The optional dependency group that installs the package.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("knowgate"):  # a mistake of ours, not a missing package
            raise
        raise MissingExtra(feature, extra) from error


class BadInput(KnowgateError):
    """A question, document or data file is invalid."""


class ModelError(KnowgateError):
    """The LLM or its server failed, or returned something unusable."""


class ServerError(ModelError):
    """An HTTP server failed, rejected a request, or returned something unusable."""


class RejectionError(ServerError):
    """A search, embedding or rerank server rejected a request or sent an unusable reply. Other requests may succeed."""


class DeviceError(ModelError):
    """The GPU failed. This process cannot use it any more; start a new process."""


class OutOfMemory(ModelError):
    """The GPU has too little memory even for one question."""


class UnsupportedSignal(ModelError):
    """The LLM backend cannot provide a signal that a gate needs, such as log-probabilities."""


class AdapterError(KnowgateError):
    """A retriever or model of another framework failed, or returned something unusable."""


class WeightsError(KnowgateError):
    """Model weights are missing, corrupted or cannot be downloaded."""


class BrokenIndex(KnowgateError):
    """A retrieval index is missing, broken or of the wrong kind."""


class ArtifactError(KnowgateError):
    """A saved folder, such as a fitted gate, is broken, or made by another version or for another LLM."""
