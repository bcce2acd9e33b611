"""Gates and arbiters of other packages: whatever they raise is said in a sentence that names them, not knowgate."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from knowgate.errors import KnowgateError, ModelError
from knowgate.types import Arbiter, Gate


@contextlib.contextmanager
def blamed(part: Gate | Arbiter, what: str = "gate") -> Iterator[None]:
    """Around every call of a part's own code."""
    try:
        yield
    except (KnowgateError, MemoryError):
        raise
    except Exception as error:
        kind = type(part)
        if kind.__module__.split(".")[0] == "knowgate":
            raise  # ours to mend
        first = (str(error).strip().splitlines() or [""])[0][:300]
        raise ModelError(
            f"{what} '{part.name}' ({kind.__module__}.{kind.__qualname__}) failed: {type(error).__name__}: {first}. "
            "It is not a part of knowgate: tell whoever wrote it."
        ) from error
