"""What the Hugging Face hub and its client say when something fails → one sentence: what failed, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from verifiers.errors import InfraError, chain_of

_ADVICE = {
    401: "it does not know this token: set HF_TOKEN, or run `hf auth login`",
    403: "it does not allow this token to do that: give it the right to, or use another name",
    404: "there is no such repository, or this token may not see it: check the name, and HF_TOKEN",
    429: "it asks for fewer requests: wait a while",
}
_CLIENTS = ("httpx", "requests", "urllib3")  # whose errors are those of a connection


@contextmanager
def in_a_sentence(what: str) -> Iterator[None]:
    """Say what the hub refused; errors that are not the hub's stay as they are."""
    try:
        yield
    except Exception as error:  # foreign code
        said = _said(error)
        if said is None:
            raise
        raise InfraError(f"{what}: {said}") from error


def _said(error: BaseException) -> str | None:
    found = [*chain_of(error)]
    for one in found:
        is_missing = type(one).__name__ == "DatasetNotFoundError"  # which does not carry the answer
        status = 404 if is_missing else getattr(getattr(one, "response", None), "status_code", None)
        if isinstance(status, int):
            usual = "it failed on its side: try again later" if status >= 500 else "it refused the request"
            return f"the hub answered {status}; {_ADVICE.get(status, usual)}"
    for one in found:
        is_of_client = type(one).__module__.partition(".")[0].startswith(_CLIENTS)
        if is_of_client or isinstance(one, ConnectionError | TimeoutError):
            return f"the hub cannot be reached ({type(one).__name__}: {str(one)[:200]}): try again later"
    return None
