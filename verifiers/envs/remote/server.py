"""An environment → an HTTP service that runs and scores its rollouts for any caller.

A rollout is one POST request. Its reply is a stream of lines: requests to the model, and finally the scored state. The
caller answers these requests (`/answers`), or names an endpoint that this server can reach.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

from aiohttp import web

from verifiers.clients import wire
from verifiers.clients.hosts import check_guarded
from verifiers.clients.protocol import Client, Completion, Request
from verifiers.clients.resolve import http_client
from verifiers.clients.server_access import lost_client, refusal
from verifiers.clients.server_thread import ServerThread
from verifiers.envs.calling import Answerer
from verifiers.envs.remote.host import CallersClient, Host, Terms
from verifiers.envs.remote.parcels import attached, detached, read_completion, read_error, read_score, score_fields
from verifiers.errors import DeadlineError, Error, RequestRefusedError
from verifiers.foreign import guarded_tasks
from verifiers.store.plain import plain, to_json

if TYPE_CHECKING:
    from verifiers.envs.environment import Environment

logger = logging.getLogger("verifiers.envs")

PROTOCOL = 1
RETRY_AFTER_S = 1
ALIVE_S = 10.0  # between two keep-alive events of a stream, so that both sides notice a lost connection
MOST_ROWS = 500  # per page


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """Limits: concurrent rollouts, waiting rollouts, seconds per rollout, and bytes per request."""

    at_once: int = 64
    waiting: int = 1024
    deadline_s: float | None = 3600.0
    body_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        if self.at_once < 1 or self.waiting < 0 or self.body_bytes < 1:
            raise ValueError(f"at_once and body_bytes must be 1 or more and waiting 0 or more; got {self}")
        if self.deadline_s is not None and not self.deadline_s > 0:
            raise ValueError(f"deadline_s={self.deadline_s!r} must be above 0, or None for no limit")


class ServedEnvironment:
    """The HTTP endpoints of one environment; `app` creates the aiohttp application."""

    def __init__(
        self,
        env: Environment,
        *,
        limits: ServerLimits,
        api_key: str | None = None,
        host: str = "127.0.0.1",
        allow_hosts: Sequence[str] = (),
    ) -> None:
        self.env, self.limits = env, limits
        self.api_key, self.bound, self.allow_hosts = api_key, host, tuple(allow_hosts)
        self.is_stopping = False
        self.waiting = self.playing = self.done = 0
        self._asked: dict[str, asyncio.Future[Completion]] = {}
        self._host: Host | None = None

    def app(self) -> web.Application:
        app = web.Application(client_max_size=self.limits.body_bytes, middlewares=[self._guard])
        app.cleanup_ctx.append(self._alive)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/environment", self._environment),
                web.get("/rows", self._rows),
                web.post("/rollouts", self._rollouts),
                web.post("/answers/{number}", self._answers),
                web.post("/scores", self._scores),
            ]
        )
        return app

    async def _alive(self, app: web.Application) -> AsyncIterator[None]:
        with guarded_tasks():
            self._host = Host(self.env, at_once=self.limits.at_once)
            yield
            await self.env._close()

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        found = refusal(request, api_key=self.api_key, host=self.bound, allow_hosts=self.allow_hosts)
        if found is not None:
            return _refused(found.status, found.code, found.message)
        try:
            return await handler(request)
        except web.HTTPRequestEntityTooLarge:
            most = self.limits.body_bytes
            return _refused(413, "too_large", f"the request is larger than the limit of {most} bytes (--max-body-mb)")
        except web.HTTPException as error:
            return _refused(error.status, "invalid_request", f"{request.method} {request.path}: {error.reason}")
        except RequestRefusedError as error:
            return _refused(400, "invalid_request", str(error))
        except Exception as error:
            if (nobody := lost_client(request, error)) is not None:
                return nobody
            logger.exception("%s %s failed", request.method, request.path)
            return _refused(500, "internal_error", f"{type(error).__name__}: {error}")

    # --- description and rows -------------------------------------------------------------------------------------

    async def _health(self, http: web.Request) -> web.Response:
        status = "stopping" if self.is_stopping else "ok"
        counts = {"playing": self.playing, "waiting": self.waiting, "done": self.done}
        shown = {"status": status, "environment": self._name(), **counts, "at_once": self.limits.at_once}
        return _reply(shown, status=503 if self.is_stopping else 200)

    def _name(self) -> str:
        return self.env.env_id or type(self.env).__name__

    async def _environment(self, http: web.Request) -> web.Response:
        env, rubric = self.env, self.env.rubric
        return _reply(
            {
                "protocol": PROTOCOL,
                "name": self._name(),
                "env_id": env.env_id,
                "env_args": env.env_args,
                "message_type": env.message_type,
                "system_prompt": env.system_prompt,
                "few_shot": list(env._format.few_shot),
                "sampling_args": env.sampling_args,
                "max_seq_len": env.max_seq_len,
                "score_rollouts": env.score_rollouts,
                "has_group_rewards": env.has_group_rewards,
                "rewards": list(map(str, rubric._get_reward_func_names())),
                "weights": list(map(float, rubric._get_reward_weights())),
                "splits": await asyncio.to_thread(self._splits),
                "limits": asdict(self.limits),
            }
        )

    def _splits(self) -> dict[str, int]:
        found = {"train": self.env.dataset, "eval": self.env.eval_dataset}
        return {name: len(rows) for name, rows in found.items() if rows is not None}

    async def _rows(self, http: web.Request) -> web.Response:
        rows = {"train": self.env.dataset, "eval": self.env.eval_dataset}.get(http.query.get("split", "train"))
        if rows is None:
            raise RequestRefusedError(f"there is no split {http.query.get('split')!r:.100}; there are {self._splits()}")
        try:
            start, count = int(http.query.get("start", 0)), int(http.query.get("count", MOST_ROWS))
        except ValueError:
            start = count = -1
        if min(start, count) < 0:
            raise RequestRefusedError("start and count must be whole numbers, 0 or more")
        page = await asyncio.to_thread(lambda: rows[start : start + min(count, MOST_ROWS)].to_list())
        return _reply({"rows": plain(page)})

    # --- rollouts -------------------------------------------------------------------------------------------------

    async def _rollouts(self, http: web.Request) -> web.StreamResponse:
        if self.is_stopping:
            return _refused(503, "stopping", "this server is stopping")
        if self.waiting >= self.limits.waiting and self.playing >= self.limits.at_once:
            return _refused(429, "queue_full", f"{self.playing} rollouts are running and {self.waiting} are waiting")
        self.waiting += 1
        is_waiting = True

        def begin() -> None:
            nonlocal is_waiting
            if is_waiting:
                is_waiting = False
                self.waiting -= 1
                self.playing += 1

        try:
            body = await _body(http)
            row, terms = self._row(body), _terms(body)
            stream = _Lines(http)
            await stream.start()
            await self._play(stream, row, body.get("name"), terms, begin)
            return await stream.end()
        finally:
            if is_waiting:
                self.waiting -= 1
            else:
                self.playing -= 1
                self.done += 1

    def _row(self, body: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return self.env.formatted(_mapping(body, "row"))
        except (TypeError, ValueError) as error:
            raise RequestRefusedError(f"'row' is not valid: {error}") from error

    async def _play(
        self, stream: _Lines, row: dict[str, Any], name: str | None, terms: Terms, begin: Callable[[], None]
    ) -> None:
        assert self._host is not None

        async def ask(request: Request) -> Completion:
            number = secrets.token_urlsafe(16)
            future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
            self._asked[number] = future
            try:
                await stream.send({"event": "ask", "id": number, "request": plain(request)})
                return await future
            finally:
                self._asked.pop(number, None)

        alive = asyncio.create_task(stream.keep_alive())
        try:
            async with asyncio.timeout(None) as limit:

                def on_begin() -> None:
                    begin()
                    if self.limits.deadline_s is not None:
                        limit.reschedule(asyncio.get_running_loop().time() + self.limits.deadline_s)

                state, score = await self._host.play(row, name, terms, ask, on_begin)
        except TimeoutError:
            late = DeadlineError(f"the rollout exceeded this server's limit of {self.limits.deadline_s:g} s")
            client = CallersClient(ask, terms.model)
            state, score = self.env.failed_state(row, Answerer(client, client, terms.model), {}, late), None
        finally:
            alive.cancel()
        fields, scored = detached(state, score)
        await stream.send({"event": "done", "state": fields, "score": scored})

    async def _answers(self, http: web.Request) -> web.Response:
        body = await _body(http)
        future = self._asked.get(http.match_info["number"])
        if future is None or future.done():
            return _refused(404, "not_asked", "no rollout waits for this answer")
        if "completion" in body:
            future.set_result(read_completion(body["completion"]))
        else:
            error = read_error(body.get("error"))
            future.set_exception(error if isinstance(error, Error) else Error("the caller sent no answer"))
        return _reply({"status": "ok"})

    async def _scores(self, http: web.Request) -> web.Response:
        assert self._host is not None
        body = await _body(http)
        terms, given = _terms(body), body.get("scores")
        if not _are_mappings(states := body.get("states")):
            raise RequestRefusedError("'states' is missing: a list of finished rollouts")
        if given is not None and not (_are_mappings(given) and len(given) == len(states)):
            raise RequestRefusedError("'scores' must be a list with one score per state")
        here = [attached(fields, None, None) for fields in states]
        if given is None:
            scores = list(await asyncio.gather(*(self._host.score(state, terms) for state in here)))
        else:
            try:
                scores = [read_score(one) for one in given]
            except (KeyError, TypeError, ValueError) as error:
                raise RequestRefusedError(f"a score must have a reward and metrics: {error!r}") from error
            await self._host.score_together(here, scores, terms)
        return _reply({"scores": [score_fields(one) for one in scores]})


class _Lines:
    """A reply of JSON lines."""

    def __init__(self, http: web.Request) -> None:
        self._http = http
        self._response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        self._writing = asyncio.Lock()

    async def start(self) -> None:
        await self._response.prepare(self._http)

    async def send(self, event: Mapping[str, Any]) -> None:
        async with self._writing:
            await self._response.write(to_json(event) + b"\n")

    async def keep_alive(self) -> None:
        with suppress(ConnectionError):
            while True:
                await asyncio.sleep(ALIVE_S)
                await self.send({"event": "alive"})

    async def end(self) -> web.StreamResponse:
        await self._response.write_eof()
        return self._response


def _reply(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=to_json(body), status=status, content_type="application/json")


def _refused(status: int, code: str, message: str) -> web.Response:
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status in (429, 503) else None
    body = to_json({"error": {"code": code, "message": message}})
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


async def _body(http: web.Request) -> dict[str, Any]:
    try:
        body = wire.decode(await http.read())
    except ValueError as error:
        raise RequestRefusedError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestRefusedError("the body is not a JSON object")
    return body


def _mapping(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = body.get(name)
    if not isinstance(value, Mapping):
        raise RequestRefusedError(f"{name!r} is missing, or not an object")
    return value


def _are_mappings(value: Any) -> TypeGuard[list[Mapping[str, Any]]]:
    return isinstance(value, list) and all(isinstance(one, Mapping) for one in value)


_TERMS = ("model", "sampling", "is_scored", "reward_timeout_s", "hook_timeout_s")


def _terms(body: Mapping[str, Any]) -> Terms:
    """The terms in a request. Unknown names are refused."""
    given = dict(_mapping(body, "terms"))
    endpoint = given.pop("endpoint", None)
    if unknown := set(given) - set(_TERMS):
        raise RequestRefusedError(f"'terms' has unknown {sorted(unknown)}; it may have endpoint, {', '.join(_TERMS)}")
    if not isinstance(given.get("model"), str):
        raise RequestRefusedError("'terms' needs the name of a model")
    if not isinstance(given.get("sampling", {}), Mapping):
        raise RequestRefusedError(f"'sampling' must be an object, not {given['sampling']!r:.100}")
    for name in ("reward_timeout_s", "hook_timeout_s"):
        seconds = given.get(name)
        if seconds is not None and not (isinstance(seconds, int | float) and seconds > 0):
            raise RequestRefusedError(f"{name!r} must be a number of seconds above 0, not {seconds!r:.100}")
    return Terms(**given, client=None if endpoint is None else _client(endpoint))


def _client(endpoint: Any) -> Client:
    try:
        headers = tuple(sorted((endpoint.pop("headers", None) or {}).items()))
        return http_client(**endpoint, headers=headers)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RequestRefusedError(f"the endpoint cannot be used: {type(error).__name__}: {error}") from error


# --- the server ---------------------------------------------------------------------------------------------------


class EnvServer(ServerThread):
    """Serves an environment from a separate thread: ``with EnvServer(env) as server: vf.RemoteEnv(server.url)``.

    Listening beyond this machine without an ``api_key`` requires ``insecure=True``.
    """

    def __init__(
        self,
        env: Environment,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        api_key: str | None = None,
        allow_hosts: Sequence[str] = (),
        insecure: bool = False,
        limits: ServerLimits | None = None,
    ) -> None:
        super().__init__(host=host, port=port)
        check_guarded(host, api_key, insecure, can="run the environment")
        self.served = ServedEnvironment(
            env, limits=limits or ServerLimits(), api_key=api_key, host=host, allow_hosts=allow_hosts
        )

    @property
    def url(self) -> str:
        return self.root

    def make_runner(self) -> web.AppRunner:
        # Cancelling the handler when its caller disconnects ends the rollout.
        return web.AppRunner(self.served.app(), access_log=None, handler_cancellation=True, shutdown_timeout=0.1)

    def drain(self, grace_s: float) -> bool:
        """Accept no more rollouts and wait for the running ones. Returns whether all of them ended."""
        self.served.is_stopping = True
        end = time.monotonic() + grace_s
        while self.served.playing + self.served.waiting and time.monotonic() < end:
            time.sleep(0.02)
        return not self.served.playing + self.served.waiting


def serve(
    server: EnvServer, *, grace_s: float, on_ready: Callable[[str], None], on_stop: Callable[[int], None]
) -> None:
    """Serve until the process is interrupted, then wait for running rollouts; a second interrupt ends at once."""
    with server:
        on_ready(server.url)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            on_stop(server.served.playing + server.served.waiting)
            with suppress(KeyboardInterrupt):
                server.drain(grace_s)
