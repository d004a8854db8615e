"""A foreign client object → a client: anything with ``.chat.completions.create``, sync or async."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from weakref import WeakValueDictionary

from verifiers import deadlines, errors
from verifiers.calls import Hook, PerLoop, is_async_callable, maybe_await
from verifiers.clients.access import Access
from verifiers.clients.protocol import Completion, Request
from verifiers.clients.reading import is_overlong, read_response
from verifiers.clients.retries import is_access, words_of
from verifiers.clients.secrets import redact, secrets_in
from verifiers.escapes import contained
from verifiers.messages import has_audio
from verifiers.signatures import signature_of
from verifiers.types import MessageType

DEFAULT_TIMEOUT_S = 3600.0
STALE_CONNECTIONS = 100


class SDKClient:
    """Calls the object it is given, and converts its results and exceptions to our types.

    The object needs ``.chat.completions.create`` (or ``.completions.create``); ``base_url`` and ``api_key`` are read if
    present. A sync ``create`` runs in a worker thread. Only the object itself retries.

    >>> from verifiers.clients.fake import FakeClient
    >>> import asyncio
    >>> client = SDKClient(FakeClient("4"))
    >>> asyncio.run(client.complete(Request(model="m", prompt="2+2=", message_type="completion"))).text
    '4'
    """

    def __init__(self, sdk: Any, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        if not (find_create(sdk, "chat") or find_create(sdk, "completion")):
            raise TypeError(f"a {type(sdk).__name__} has neither .chat.completions.create nor .completions.create")
        self.sdk = sdk
        self.timeout_s = timeout_s
        self._accesses: PerLoop[dict[str, Access]] = PerLoop(dict)
        self._in_thread = Hook(_call, may_share=False)  # a quick call says nothing about the next one

    @property
    def base_url(self) -> str:
        url = getattr(self.sdk, "base_url", None)
        return "" if url is None else str(url).rstrip("/")

    @property
    def api_key(self) -> str | None:
        key = getattr(self.sdk, "api_key", None)
        return key if isinstance(key, str) else None

    async def complete(self, request: Request) -> Completion:
        create = find_create(self.sdk, request.message_type)
        if create is None:
            raise errors.RequestRefusedError(
                f"a {type(self.sdk).__name__} does not support {request.message_type} requests"
            )
        timeout_s = self.timeout_s if request.timeout_s is None else request.timeout_s
        access = (await self._accesses.get()).setdefault(request.model, Access())
        await access.enter()
        has_answered = False
        try:
            completion = await self._complete(create, request, timeout_s)
            has_answered = True
        except errors.AccessRefusedError as error:
            has_answered = True
            if access.refuse(str(error)):
                raise errors.AccessRefusedError(access.said) from error.__cause__
            raise errors.RequestRefusedError(str(error)) from error.__cause__
        except errors.Error:
            access.open()
            raise
        finally:
            if not has_answered:
                access.left()
        access.open()
        return completion

    async def _complete(self, create: Callable[..., Any], request: Request, timeout_s: float) -> Completion:
        failure: errors.Error
        deadline = deadlines.current().within(timeout_s)
        try:
            with deadline:
                response = await self._call(create, arguments(create, request))
                return read_response(response, request.message_type)
        except errors.Error:
            raise
        except BaseException as raised:  # whatever the foreign object raises
            error = contained(raised)
            if deadline.is_over and isinstance(error, TimeoutError):
                failure = errors.DeadlineError(f"no reply within {timeout_s:g} s")
            else:
                failure = translate(error, self._secrets(request))
        raise failure  # outside the except block: the foreign exception may contain the key and must not be its context

    def _secrets(self, request: Request) -> list[str]:
        headers: dict[str, str] = {}
        for source in (getattr(self.sdk, "_custom_headers", None), request.sampling.get("extra_headers")):
            if isinstance(source, Mapping):
                headers |= {str(name): str(value) for name, value in source.items()}
        found = secrets_in(headers, [self.base_url])
        return [self.api_key, *found] if self.api_key else found

    async def _call(self, create: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        if not is_async_callable(inspect.unwrap(create)):
            return await self._in_thread(create, kwargs)
        await _close_with_loop(self.sdk)
        for _ in range(STALE_CONNECTIONS):
            try:
                return await maybe_await(create, **kwargs)
            except Exception as error:  # whatever the foreign object raises
                if not _is_stale(error):
                    raise
        return await maybe_await(create, **kwargs)


def _call(create: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    return create(**kwargs)


def find_create(sdk: Any, message_type: MessageType) -> Callable[..., Any] | None:
    """The method of a client object for chat or completion requests; None if it has none."""
    holder = getattr(sdk, "chat", None) if message_type == "chat" else sdk
    create = getattr(getattr(holder, "completions", None), "create", None)
    return create if callable(create) else None


def arguments(create: Callable[..., Any], request: Request) -> dict[str, Any]:
    """The keyword arguments of a call. Arguments that ``create`` does not have go into ``extra_body``.

    >>> arguments(print, Request(model="m", prompt=[], sampling={"max_tokens": 8, "seed": None}))
    {'model': 'm', 'messages': [], 'max_completion_tokens': 8}
    """
    sampling = {name: value for name, value in request.sampling.items() if value is not None}
    if request.message_type == "completion":
        kwargs: dict[str, Any] = {"model": request.model, "prompt": request.prompt}
    else:
        kwargs = {"model": request.model, "messages": request.prompt}
        if "max_tokens" in sampling:
            limit = sampling.pop("max_tokens")
            sampling.setdefault("max_completion_tokens", limit)
        if "modalities" not in sampling and has_audio(request.prompt):
            sampling["modalities"] = ["text"]
    if request.tools:
        kwargs["tools"] = request.tools
    known = _parameters(create)
    if known is None or "extra_body" not in known:
        return {**kwargs, **sampling}
    extra = {name: value for name, value in sampling.items() if name not in known}
    if extra:
        sampling = {name: value for name, value in sampling.items() if name in known}
        sampling["extra_body"] = {**extra, **(sampling.get("extra_body") or {})}
    return {**kwargs, **sampling}


def _parameters(create: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    """The parameters of a function; None if it takes ``**kwargs`` or has no signature."""
    try:
        parameters = signature_of(create).parameters
    except (TypeError, ValueError):
        return None
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return None if takes_any else parameters


# --- async objects that are used in several event loops -----------------------------------------------------------


async def _close_with_loop(sdk: Any) -> None:
    """Close an object's idle connections when this loop ends, because another loop cannot use them."""
    http = getattr(sdk, "_client", None)
    if type(http).__module__.partition(".")[0] in ("openai", "httpx", "httpx2"):
        (await _https_of_loop.get())[id(http)] = http


async def _close_pools(https: WeakValueDictionary[int, Any]) -> None:
    for http in list(https.values()):
        for transport in (getattr(http, "_transport", None), *getattr(http, "_mounts", {}).values()):
            pool: Any = getattr(transport, "_pool", None)
            if type(pool).__module__.startswith("httpcore"):  # these reopen on their next use
                await pool.aclose()


_https_of_loop: PerLoop[WeakValueDictionary[int, Any]] = PerLoop(WeakValueDictionary, _close_pools)


def _is_stale(error: Exception) -> bool:
    """Was this a connection of a closed event loop? The pool drops it, and the next one may work."""
    return any("Event loop is closed" in text for text in _chain_texts(error))


# --- errors -------------------------------------------------------------------------------------------------------


def translate(error: Exception, keys: list[str]) -> errors.Error:
    """Convert a foreign exception to one of ours, by its class name and status, without API keys.

    >>> class APITimeoutError(Exception): ...
    >>> translate(APITimeoutError("request for sk-abc123 timed out"), ["sk-abc123"]).__class__.__name__
    'DeadlineError'
    """
    kind = _kind(error)
    failure = kind(redact(f"{type(error).__name__}: {_server_message(error)}", keys))
    failure.__cause__ = _without_keys(error, keys)
    return failure


def _server_message(error: Exception) -> str:
    """The server's error message, where the SDK's exception shows the whole JSON body.

    >>> error = Exception("Error code: 400 - {'error': {'message': 'No such model.'}}")
    >>> error.status_code, error.body = 400, {"message": "No such model.", "code": None}
    >>> _server_message(error)
    '400 No such model.'
    """
    body, status = getattr(error, "body", None), getattr(error, "status_code", None)
    said = words_of(body) if isinstance(body, Mapping) and isinstance(status, int) else ""
    return f"{status} {said}" if said else str(error)


def _kind(error: Exception) -> type[errors.Error]:
    names = {base.__name__ for base in type(error).__mro__}
    status = getattr(error, "status_code", None)
    status = status if isinstance(status, int) else None
    if status == 429 or "RateLimitError" in names:
        return errors.RateLimitError
    if "APITimeoutError" in names or isinstance(error, TimeoutError) or type(error).__name__.endswith("Timeout"):
        return errors.DeadlineError
    if "APIConnectionError" in names or isinstance(error, OSError):
        return errors.ConnectionFailedError
    if status is not None and status >= 500:
        return errors.ServerError
    if is_overlong(str(error)):
        return errors.OverlongPromptError
    if status is not None and is_access(status, str(error)):
        return errors.AccessRefusedError
    if status is not None and status >= 400:
        return errors.RequestRefusedError
    return errors.ModelError


def _without_keys(error: BaseException, keys: list[str]) -> BaseException:
    """The exception itself, or a redacted stand-in if it or anything in its chain contains a key."""
    shown = f"{type(error).__name__}: {error}"
    if all(redact(text, keys) == text for text in _chain_texts(error)):
        return error
    return RuntimeError(redact(shown, keys))


def _chain_texts(error: BaseException) -> Iterator[str]:
    for one in errors.chain_of(error):
        yield f"{one} {one.args!r}"
