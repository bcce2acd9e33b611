"""Every error knowgate raises on purpose. Each message says what was wrong, then what to do.

KnowgateError
├── UnknownName        a model, gate, retriever, ... that is not in its table
├── BadSetting         a value, option or config key that cannot be used
├── MissingExtra       an optional package is not installed
├── BadInput           a question, document or data file that cannot be used
├── ModelError         the LLM or its server did not give what it was asked for
│   ├── ServerError    an HTTP model or search server failed
│   ├── DeviceError    the GPU failed; only a new process can go on
│   ├── OutOfMemory    the GPU has too little memory even for one question
│   └── NotOffered     this backend cannot give a signal
├── WrappedError       a retriever or model of another framework failed, or gave what nobody can use
├── WeightsError       model weights are missing, corrupted or cannot be fetched
├── BrokenIndex        a retrieval index is missing, broken or of another kind
└── ArtefactError      a saved file is broken, of another version, or of another model
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class KnowgateError(Exception):
    """Base of all errors whose message is meant for the user.

    brief: what was wrong, without what to do about it: for the cell of a table. The whole message where none is given.
    """

    def __init__(self, message: str, *, brief: str = ""):
        super().__init__(message)
        self.brief = brief or message


class UnknownName(KnowgateError):
    """also: what is allowed beside the known ones, in words."""

    def __init__(self, what: str, name: str, known: Iterable[str], *, also: str = ""):
        options = sorted(known)
        near = difflib.get_close_matches(name, options, n=1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        super().__init__(f"unknown {what} '{name}'.{hint} Known: {', '.join(options)}{f'; or {also}' if also else ''}.")


class BadSetting(KnowgateError):
    pass


class MissingExtra(KnowgateError):
    def __init__(self, feature: str, extra: str):
        super().__init__(f"{feature} needs the '{extra}' extra. Install it: pip install 'knowgate[{extra}]'")


class BadInput(KnowgateError):
    pass


class ModelError(KnowgateError):
    pass


class ServerError(ModelError):
    pass


class DeviceError(ModelError):
    pass


class OutOfMemory(ModelError):
    pass


class NotOffered(ModelError):
    pass


class AdapterError(KnowgateError):
    pass


class WeightsError(KnowgateError):
    pass


class BrokenIndex(KnowgateError):
    pass


class ArtifactError(KnowgateError):
    pass
