"""A request → a completion from a remote endpoint, with retries."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlencode, urlsplit

from verifiers import deadlines
from verifiers.calls import PerLoop
from verifiers.clients import wire
from verifiers.clients.activity import note_retry
from verifiers.clients.openai_looks import OpenAILooks
from verifiers.clients.protocol import Completion, Request
from verifiers.clients.reading import Prices
from verifiers.clients.recording import record_completion
from verifiers.clients.retries import Backoff, Failure, bad_reply, reported_failure, status_failure
from verifiers.clients.secrets import hide_in_url, mask, redact, secrets_in
from verifiers.clients.wire import Call, Reply
from verifiers.errors import (
    AccessRefusedError,
    BadReplyError,
    EmptyModelResponseError,
    RequestRefusedError,
    ServerError,
)

if TYPE_CHECKING:
    from multidict import CIMultiDictProxy

    from verifiers.clients.limits import Limit
    from verifiers.clients.transport import Pool

logger = logging.getLogger("verifiers.clients")

DOWN_AFTER_S = 120.0
SHOWN_CHARS = 500
NO_KEY_SENT = "no key was sent: pass api_key=, or on the command line -k with the name of its variable"
_READ_CHARS = 65536  # of an error's body


class RemoteClient(OpenAILooks):
    """Base class of the HTTP clients. A subclass writes requests (`_write`) and reads replies (`_read`).

    ``timeout_s`` bounds one attempt. ``max_concurrent`` bounds the requests in flight, in addition to the endpoint's
    adaptive limit. ``prices`` are US dollars per million ``prompt`` and ``completion`` tokens. An endpoint that refuses
    everything for ``down_after_s`` counts as down. A reply longer than ``max_reply_bytes`` is not read to its end.
    """

    default_base_url: ClassVar[str] = "https://api.openai.com/v1"
    key_variable: ClassVar[str] = "OPENAI_API_KEY"  # read only for the default endpoint: never sent elsewhere
    backoff: Backoff = Backoff()

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 600.0,
        max_retries: int = 8,
        max_concurrent: int | None = None,
        prices: Prices | None = None,
        down_after_s: float = DOWN_AFTER_S,
        max_reply_bytes: int = wire.MAX_REPLY_BYTES,
    ) -> None:
        base_url = (base_url or self.default_base_url).rstrip("/")
        if api_key is None and base_url == self.default_base_url:
            api_key = os.environ.get(self.key_variable)
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"base_url must look like https://host/v1, not {hide_in_url(base_url)!r}")
        if timeout_s <= 0 or max_retries < 0 or (max_concurrent is not None and max_concurrent < 1):
            raise ValueError(
                f"timeout_s must be above 0, max_retries 0 or more, max_concurrent 1 or more; "
                f"got {timeout_s=}, {max_retries=}, {max_concurrent=}"
            )
        if not down_after_s > 0 or max_reply_bytes < 1:
            raise ValueError(
                f"down_after_s must be above 0 and max_reply_bytes 1 or more; got {down_after_s=}, {max_reply_bytes=}"
            )
        if unknown := set(prices or ()) - {"prompt", "completion"}:
            raise ValueError(f"prices has {sorted(unknown)}; it can have 'prompt' and 'completion'")
        self.base_url = base_url
        self.api_key = (api_key or "").strip() or None
        self.headers = dict(headers or {})
        self.timeout_s = timeout_s
        self.max_retries = max_retries
        self.max_concurrent = max_concurrent
        self.prices = prices
        self.down_after_s = down_after_s
        self.max_reply_bytes = max_reply_bytes
        self._prepared: CIMultiDictProxy[str] | None = None
        self._urls: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({hide_in_url(self.base_url)!r}, api_key={mask(self.api_key)!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_prepared": None}

    # --- what a subclass defines ----------------------------------------------------------------------------------

    def _auth(self, api_key: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {api_key}"}

    def _fixed_headers(self) -> dict[str, str]:
        return {}

    def _write(self, request: Request, args: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """The path and the body of a request. ``args`` is a copy of its sampling arguments that may be modified."""
        raise NotImplementedError

    def _read(self, reply: dict[str, Any], request: Request) -> Completion:
        raise NotImplementedError

    # --- the attempts ---------------------------------------------------------------------------------------------

    async def complete(self, request: Request) -> Completion:
        """Send the request, with retries; raises a `verifiers.errors.Error` when they are exhausted or pointless."""
        call = self._call(request)
        pool = await _pools.get()
        read = partial(self._outcome, request)
        limit = pool.limit(self.base_url)
        attempts = 0
        while True:
            outcome = await self._attempt(pool, call, read, request.model)
            if isinstance(outcome, Completion):
                return record_completion(self, request, outcome)
            attempts += 1
            self._check_down(limit, outcome, call)
            if outcome.ends_after(attempts, max_retries=self.max_retries):
                break
            note_retry(is_refusal=outcome.is_overload)
            delay_s = self.backoff.delay_s(attempts, outcome.retry_after_s)
            if logger.isEnabledFor(logging.DEBUG):
                logger.debug("attempt %d failed, next one in %.2f s: %s", attempts, delay_s, self._say(outcome, call))
            await (limit.sleep(delay_s) if self.backoff.sleep is None else self.backoff.sleep(delay_s))
        times = f" after {attempts} attempts" if attempts > 1 else ""
        raise outcome.error(f"{self._say(outcome, call)}{times} (POST {self._shown(call.url, call)})")

    async def _attempt(self, pool: Pool, call: Call, read: Any, model: str) -> Completion | Failure:
        """One attempt, unless the endpoint is known to refuse the key or the model."""
        access = pool.access(self.base_url, self.api_key, model)
        await access.enter()
        outcome: Completion | Failure | None = None
        try:
            outcome = await pool.ask(call, read, self.base_url, self.max_concurrent)
        finally:
            if outcome is None:
                access.left()
        if isinstance(outcome, Completion) or not outcome.is_access:
            access.open()
        elif access.refuse(f"{self._say(outcome, call)} (POST {self._shown(call.url, call)})"):
            raise AccessRefusedError(access.said)
        return outcome

    def _check_down(self, limit: Limit, outcome: Failure, call: Call) -> None:
        if not outcome.is_refusal or limit.refused_since is None:
            return
        refused_s = deadlines.current().clock.now() - limit.refused_since
        if refused_s >= self.down_after_s:
            where = self._shown(hide_in_url(self.base_url), call)
            said = f"{where} has refused everything for {self.down_after_s:g} s and counts as down"
            limit.declare_down(f"{said}; its last error: {self._say(outcome, call)}")
            limit.check()

    def _outcome(self, request: Request, reply: Reply) -> Completion | Failure:
        if not 200 <= reply.status < 300:
            return status_failure(reply.status, reply.headers, _text(reply.body))
        try:
            value = wire.decode(reply.body)
        except ValueError:
            return bad_reply(reply.status, _text(reply.body))
        if not isinstance(value, dict):
            return bad_reply(reply.status, _text(reply.body))
        if value.get("error") or value.get("object") == "error":
            return reported_failure(value, _text(reply.body))
        try:
            return self._read(value, request)
        except (EmptyModelResponseError, BadReplyError, ServerError) as error:
            return Failure(error=type(error), text=f"{error}: {_text(reply.body)}")
        except (AttributeError, KeyError, TypeError, ValueError):  # JSON of an unknown shape
            return bad_reply(reply.status, _text(reply.body))

    # --- requests -------------------------------------------------------------------------------------------------

    def _call(self, request: Request) -> Call:
        args = wire.checked(request.sampling)
        extra_body, extra_headers = args.pop("extra_body", None), args.pop("extra_headers", None)
        extra_query, timeout_s = args.pop("extra_query", None), args.pop("timeout", None)
        path, body = self._write(request, args)
        if extra_body:
            body.update(extra_body)
        url = self._url(path)
        if extra_query:
            url += ("&" if "?" in url else "?") + urlencode(extra_query)
        return Call(
            url=url,
            headers=self._headers(extra_headers),
            body=wire.encode(body),
            timeout_s=self._deadline(request.timeout_s, timeout_s),
            max_reply_bytes=self.max_reply_bytes,
            secrets=tuple(secrets_in(extra_headers or {}, [url])) if extra_headers or extra_query else (),
        )

    def _url(self, path: str) -> str:
        url = self._urls.get(path)
        if url is None:
            base, question, query = self.base_url.partition("?")
            url = self._urls[path] = f"{base.rstrip('/')}{path}{question}{query}"
        return url

    def _headers(self, extra: Mapping[str, str] | None) -> CIMultiDictProxy[str]:
        if self._prepared is None or extra:
            from verifiers.clients.transport import prepared

            plain = {"Content-Type": "application/json", "User-Agent": "verifiers", **self._fixed_headers()}
            auth = {} if self.api_key is None else self._auth(self.api_key)
            if extra:
                return prepared(plain, auth, self.headers, extra)
            self._prepared = prepared(plain, auth, self.headers)
        return self._prepared

    def _deadline(self, *wanted: Any) -> float:
        stated = [seconds for seconds in wanted if seconds is not None]
        if not stated:
            return self.timeout_s
        if not all(isinstance(seconds, (int, float)) for seconds in stated):
            raise RequestRefusedError(f"a timeout must be a number of seconds, not {stated[-1]!r}")
        return float(min(stated))

    # --- messages without secrets ---------------------------------------------------------------------------------

    def _shown(self, text: str, call: Call) -> str:
        keys = [*call.secrets, *secrets_in(self.headers, [self.base_url])]
        return redact(text, [*keys, self.api_key] if self.api_key else keys)

    def _say(self, failure: Failure, call: Call) -> str:
        text = self._shown(failure.text, call)
        text = text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}…"
        is_keyless = failure.is_unauthorized and not secrets_in(call.headers, [call.url])
        return f"{text} ({NO_KEY_SENT})" if is_keyless else text


def _text(body: bytes) -> str:
    return body[:_READ_CHARS].decode("utf-8", "replace")


def _open_pool() -> Pool:
    from verifiers.clients.transport import Pool

    return Pool()


async def _close_pool(pool: Pool) -> None:
    await pool.close()


_pools: PerLoop[Pool] = PerLoop(_open_pool, _close_pool)
