"""HTTP clients as the environment has them made: proxies and certificates that cannot be used are named.

Knows nothing of what is asked of whom. Addresses of proxies may hold passwords: only the variables are named.
"""

from __future__ import annotations

import os
from typing import Any

import httpx

from knowgate.errors import BadSetting

NAMES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "SSLKEYLOGFILE")


def new_client(**options: Any) -> httpx.Client:
    """`httpx.Client`, which reads the environment when it is made."""
    try:
        return httpx.Client(**options)
    except ImportError:
        raise BadSetting(
            f"{_set(NAMES)} asks for a SOCKS proxy, which needs a package: pip install 'httpx[socks]', or unset it."
        ) from None
    except (ValueError, httpx.InvalidURL):
        raise BadSetting(f"{_set(NAMES)} holds no address such as http://host:port. Correct or unset it.") from None
    except OSError as error:
        raise BadSetting(
            f"the certificates of {_set(CERTIFICATES)} cannot be used ({error.strerror or error}). Correct or unset it."
        ) from None


def _set(names: tuple[str, ...]) -> str:
    """Those of these variables that are set, in either spelling."""
    found = [name for upper in names for name in (upper, upper.lower()) if os.environ.get(name)]
    return " or ".join(found) or "the environment"
