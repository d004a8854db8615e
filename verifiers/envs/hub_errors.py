"""Errors of the Hugging Face hub and its client → one sentence: what failed, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from verifiers.errors import InfraError, chain_of

_ADVICE = {
    401: "the token is invalid: set HF_TOKEN, or run `hf auth login`",
    403: "this token lacks the permission: grant it, or use another name",
    404: "there is no such repository, or this token has no access to it: check the name, and HF_TOKEN",
    429: "too many requests: wait a while",
}
_CLIENTS = ("httpx", "requests", "urllib3")  # packages whose errors are connection errors


@contextmanager
def in_a_sentence(what: str) -> Iterator[None]:
    """Turn errors of the hub into one sentence. Other errors are not changed."""
    try:
        yield
    except Exception as error:  # foreign code
        cause = _cause(error)
        if cause is None:
            raise
        raise InfraError(f"{what}: {cause}") from error


def _cause(error: BaseException) -> str | None:
    found = [*chain_of(error)]
    for one in found:
        is_missing = type(one).__name__ == "DatasetNotFoundError"  # it has no HTTP response
        status = 404 if is_missing else getattr(getattr(one, "response", None), "status_code", None)
        if isinstance(status, int):
            usual = "it had a server error: try again later" if status >= 500 else "it refused the request"
            return f"the hub answered {status}; {_ADVICE.get(status, usual)}"
    for one in found:
        is_of_client = type(one).__module__.partition(".")[0].startswith(_CLIENTS)
        if is_of_client or isinstance(one, ConnectionError | TimeoutError):
            return f"the hub cannot be reached ({type(one).__name__}: {str(one)[:200]}): try again later"
    return None
