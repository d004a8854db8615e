"""The URL of an environment server → an environment that runs and is scored there."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from verifiers import calls
from verifiers.clients import wire
from verifiers.clients.activity import note_reply
from verifiers.clients.asking_for import asked_for
from verifiers.clients.secrets import hide_in_url
from verifiers.envs.calling import Answerer
from verifiers.envs.environment import Environment
from verifiers.envs.remote.parcels import (
    attached,
    detached,
    error_fields,
    read_request,
    read_score,
    score_fields,
    sendable,
)
from verifiers.envs.run_steps import Player
from verifiers.errors import (
    AccessRefusedError,
    BadReplyError,
    ConnectionFailedError,
    GraderError,
    InfraError,
    RequestRefusedError,
    wrap,
)
from verifiers.escapes import contained
from verifiers.foreign import limits
from verifiers.rubrics import Rubric
from verifiers.rubrics.score import Score
from verifiers.store.plain import plain, to_json
from verifiers.types import Row, SamplingArgs, State

if TYPE_CHECKING:
    import aiohttp

PROTOCOL = 1
SILENCE_S = 60.0  # a connection without data for so long is considered lost
PAGE = 500
LONGEST_PAUSE_S = 15.0


class RemoteEnv(Environment):
    """An environment behind ``vf env-serve``, used like any other. Rollouts run and are scored on the server.

    The model is called from here, so its key stays here, and it may be a model in this process. With ``direct=True``
    the server itself calls an HTTP endpoint, which it must be able to reach, and gets its key. If the server cannot be
    reached for ``patience_s``, the rollouts that wait for it fail. The constructor asks the server for its description.
    """

    def __init__(
        self, url: str, *, api_key: str | None = None, direct: bool = False, patience_s: float = 120.0, **kwargs: Any
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{hide_in_url(url)!r} is not the URL of an environment server, such as http://host:8765")
        self.url = url.rstrip("/")
        self.direct, self.patience_s = direct, patience_s
        self._api_key = api_key or os.environ.get("VERIFIERS_ENV_KEY") or None
        self._connections = _Connections()
        about = calls.run(self._describe)
        self._weights = [float(weight) for weight in about["weights"]]
        self._has_group_rewards = bool(about["has_group_rewards"])
        self._at_once = int(about["limits"]["at_once"]) + int(about["limits"]["waiting"])
        splits = about["splits"]
        super().__init__(
            dataset=self._split("train", splits),
            eval_dataset=self._split("eval", splits),
            system_prompt=about["system_prompt"],
            few_shot=about["few_shot"] or None,
            rubric=_rubric(about["rewards"], self._weights),
            sampling_args=about["sampling_args"],
            message_type=about["message_type"],
            max_seq_len=about["max_seq_len"],
            score_rollouts=about["score_rollouts"],
            env_id=about["env_id"],
            env_args=about["env_args"],
            **kwargs,
        )
        self.env_id = about["env_id"] or about["name"]

    # --- description and rows -------------------------------------------------------------------------------------

    async def _describe(self) -> dict[str, Any]:
        try:
            about = await self._get("/environment")
        finally:
            await self._connections.close()
        if about.get("protocol") != PROTOCOL:
            raise ValueError(
                f"{self._shown} uses protocol version {about.get('protocol')!r}, but this library uses {PROTOCOL}; "
                "install the same version of verifiers on both sides"
            )
        return about

    def _split(self, name: str, splits: Mapping[str, int]) -> Callable[[], list[Row]] | None:
        if name not in splits:
            return None
        return lambda: calls.run(lambda: self._read_rows(name, splits[name]))

    async def _read_rows(self, split: str, count: int) -> list[Row]:
        rows: list[Row] = []
        try:
            while len(rows) < count:
                page = (await self._get(f"/rows?split={split}&start={len(rows)}&count={PAGE}"))["rows"]
                if not page:
                    raise BadReplyError(f"{self._shown} declared {count} rows but sent only {len(rows)}")
                rows += page
        finally:
            await self._connections.close()
        return rows

    @property
    def _shown(self) -> str:
        return f"the environment server at {hide_in_url(self.url)}"

    @property
    def has_group_rewards(self) -> bool:
        return self._has_group_rewards

    def player(self, *, is_scored: bool) -> Player:
        if [float(weight) for weight in self.rubric.weights] != self._weights:
            raise ValueError("the weights of a remote environment cannot be changed here; set them on its server")
        return self if is_scored else _Unscored(self)

    def set_kwargs(self, **kwargs: Any) -> None:
        """Raises, because setting attributes here would not change the server's environment."""
        if kwargs:
            raise ValueError(f"{sorted(kwargs)} cannot be set on a remote environment; set them on its server")

    def set_max_seq_len(self, max_seq_len: int | None) -> None:
        if max_seq_len != self.max_seq_len:
            raise ValueError(f"a remote environment's max_seq_len ({self.max_seq_len}) must be set on its server")

    # --- rollouts -------------------------------------------------------------------------------------------------

    async def run_row(self, row: Row, answerer: Answerer, sampling_args: SamplingArgs) -> State:
        return await self.play_there(row, answerer, sampling_args, is_scored=True)

    async def _play_row(self, row: Row, answerer: Answerer, sampling_args: SamplingArgs) -> State:
        return await self.play_there(row, answerer, sampling_args, is_scored=False)

    async def play_there(self, row: Row, answerer: Answerer, sampling_args: SamplingArgs, *, is_scored: bool) -> State:
        """Run one rollout on the server. Raises only cancellation."""
        terms = self._terms(answerer.model, sampling_args, is_scored)
        if self.direct:
            terms["endpoint"] = _endpoint(answerer)
        body = to_json({"row": plain(row), "name": asked_for(), "terms": terms})
        try:
            async with await self._connections.slot(self._at_once):
                state: State = await self._until_it_works(lambda: self._play_once(body, answerer))
                return state
        except BaseException as error:  # the server, or a foreign client
            return self.failed_state(row, answerer, sampling_args, contained(error))

    def _terms(self, model: str, sampling: SamplingArgs, is_scored: bool) -> dict[str, Any]:
        now = limits.get()
        chosen = {"reward_timeout_s": now.reward_s, "hook_timeout_s": now.hook_s}
        given = {name: value for name, value in chosen.items() if f"{name.split('_')[0]}_s" in now.chosen}
        return {"model": model, "sampling": plain(sampling), "is_scored": is_scored, **given}

    async def _play_once(self, body: bytes, answerer: Answerer) -> State:
        answering: set[asyncio.Task[None]] = set()
        failures: list[Exception] = []

        def ended(task: asyncio.Task[None]) -> None:
            answering.discard(task)
            if not task.cancelled() and isinstance(error := task.exception(), Exception):
                failures.append(error)

        try:
            async for event in self._lines("/rollouts", body):
                if failures:
                    raise failures[0]
                if event.get("event") == "ask":
                    task = asyncio.create_task(self._answer(event["id"], event["request"], answerer))
                    answering.add(task)
                    task.add_done_callback(ended)
                elif event.get("event") == "done":
                    state = attached(event["state"], event["score"], answerer)
                    if self.direct and (used := state.peek_usage()) is not None:
                        note_reply(used.completion_tokens)
                    return state
            raise _LostError(f"{self._shown} closed the stream before the rollout was done")
        finally:
            for task in answering:
                task.cancel()

    async def _answer(self, number: str, asked: Any, answerer: Answerer) -> None:
        """Call the model for the server, and send it the reply."""
        try:
            request = read_request(asked)
            if self.timeout is not None:
                request = replace(request, timeout_s=self.timeout)
            completion = await answerer.client.complete(request)
            if completion.usage is not None:
                note_reply(completion.usage.completion_tokens)
            answer = {"completion": plain(sendable(completion))}
        except BaseException as error:  # a foreign client
            answer = {"error": error_fields(wrap(contained(error), InfraError, "the client"))}
        body = to_json(answer)
        try:
            await self._until_it_works(lambda: self._post(f"/answers/{number}", body))
        except RequestRefusedError as error:
            if getattr(error, "status", None) != 404:  # 404: the rollout has ended, and its stream says how
                raise

    # --- scores ---------------------------------------------------------------------------------------------------

    async def score_alone(self, state: State) -> Score:
        """The score that the server sent with the rollout; other rollouts are sent to the server to be scored."""
        if hasattr(state, "remote_score"):
            score: Score = state.remote_score
            del state.remote_score
            return score
        (score,) = await self._scored([state], None)
        return score

    async def add_group_scores(self, states: Sequence[State], scores: Sequence[Score]) -> None:
        if not states:
            return
        for score, new in zip(scores, await self._scored(states, scores), strict=True):
            score.reward, score.metrics, score.error = new.reward, new.metrics, new.error

    async def _scored(self, states: Sequence[State], scores: Sequence[Score] | None) -> list[Score]:
        given = None if scores is None else [score_fields(score) for score in scores]
        terms = self._terms(str(states[0].get("model") or ""), {}, True)
        body = to_json({"states": [detached(state)[0] for state in states], "scores": given, "terms": terms})
        made = await self._until_it_works(lambda: self._post("/scores", body))
        return [read_score(one) for one in made["scores"]]

    # --- HTTP -----------------------------------------------------------------------------------------------------

    async def _until_it_works(self, attempt: Callable[[], Any]) -> Any:
        """Retry while the server is full, and for up to ``patience_s`` while it cannot be reached."""
        since: float | None = None
        tries = 0
        while True:
            try:
                return await attempt()
            except _LostError as error:
                tries += 1
                since = None if error.is_full else since or time.monotonic()
                if since is not None and time.monotonic() - since >= self.patience_s:
                    raise ConnectionFailedError(f"{error} (for {self.patience_s:g} s)") from error
                pause_s = max(error.retry_after_s, min(0.1 * 2**tries, LONGEST_PAUSE_S))
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))

    async def _get(self, path: str) -> dict[str, Any]:
        return _one([line async for line in self._lines(path, None)])

    async def _post(self, path: str, body: bytes) -> dict[str, Any]:
        return _one([line async for line in self._lines(path, body)])

    async def _lines(self, path: str, body: bytes | None) -> AsyncIterator[dict[str, Any]]:
        """The JSON lines of a reply. Raises `_LostError` if a retry may help."""
        import aiohttp

        headers = {} if self._api_key is None else {"Authorization": f"Bearer {self._api_key}"}
        silence = aiohttp.ClientTimeout(total=None, sock_connect=30.0, sock_read=SILENCE_S)
        session = await self._connections.session()
        try:
            async with session.request(
                "GET" if body is None else "POST", self.url + path, data=body, headers=headers, timeout=silence
            ) as response:
                if response.status != 200:
                    raise self._refusal(response.status, response.headers, await response.read())
                async for line in _split_lines(response.content.iter_any()):
                    yield self._decoded(line)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _LostError(f"{self._shown} cannot be reached: {type(error).__name__}: {error}") from None

    def _decoded(self, line: bytes) -> dict[str, Any]:
        try:
            value = wire.decode(line)
        except ValueError as error:
            raise BadReplyError(f"{self._shown} sent invalid JSON: {error}") from None
        if not isinstance(value, dict):
            raise BadReplyError(f"{self._shown} sent {line[:200]!r}, which is not an object")
        return value

    def _refusal(self, status: int, headers: Mapping[str, str], body: bytes) -> Exception:
        try:
            reason = str(wire.decode(body)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            reason = body[:200].decode("utf-8", "replace")
        message = f"{self._shown} answered {status}: {reason}"
        if status in (429, 502, 503, 504):
            wait = headers.get("Retry-After", "")
            return _LostError(message, is_full=status == 429, retry_after_s=float(wait) if wait.isdigit() else 0.0)
        if status in (401, 403):
            return AccessRefusedError(f"{message}; pass api_key=, or set VERIFIERS_ENV_KEY")
        error = RequestRefusedError(message)
        error.status = status  # type: ignore[attr-defined]
        return error

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_connections": _Connections()}


class _LostError(ConnectionFailedError):
    """The server is full, stopping, or cannot be reached; a retry may help."""

    def __init__(self, message: str, *, is_full: bool = False, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.is_full, self.retry_after_s = is_full, retry_after_s


class _Unscored:
    """Runs rollouts on the server without scoring them."""

    def __init__(self, env: RemoteEnv) -> None:
        self._env = env
        self.score_alone, self.add_group_scores = env.score_alone, env.add_group_scores

    async def run_row(self, row: Row, answerer: Answerer, sampling_args: SamplingArgs) -> State:
        return await self._env.play_there(row, answerer, sampling_args, is_scored=False)


class _Connections:
    """The HTTP session of each event loop, and a semaphore that limits the rollouts sent to what the server accepts."""

    def __init__(self) -> None:
        self._sessions: calls.PerLoop[Any] = calls.PerLoop(_open_session, _close_session)
        self._slots: calls.PerLoop[dict[int, asyncio.Semaphore]] = calls.PerLoop(dict)

    async def session(self) -> aiohttp.ClientSession:
        session: aiohttp.ClientSession = await self._sessions.get()
        return session

    async def slot(self, count: int) -> asyncio.Semaphore:
        held = await self._slots.get()
        return held.setdefault(count, asyncio.Semaphore(count))

    async def close(self) -> None:
        await self._sessions.close()


async def _split_lines(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Split a stream into lines of any length (aiohttp's ``readline`` limits their length)."""
    held: list[bytes] = []
    async for part in parts:
        *ended, rest = part.split(b"\n")
        for end in ended:
            yield b"".join([*held, end])
            held = []
        held.append(rest)
    if last := b"".join(held):
        yield last


def _open_session() -> Any:
    import aiohttp

    connector = aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(connector=connector)


async def _close_session(session: Any) -> None:
    await session.close()


def _one(lines: list[dict[str, Any]]) -> dict[str, Any]:
    if len(lines) != 1:
        raise BadReplyError(f"the environment server sent {len(lines)} lines instead of one")
    return lines[0]


def _endpoint(answerer: Answerer) -> dict[str, Any]:
    """The settings of an HTTP endpoint, including its key, for a server that calls it directly."""
    from verifiers.clients.anthropic import AnthropicClient
    from verifiers.clients.http import HTTPClient
    from verifiers.clients.responses import ResponsesClient

    kinds = {HTTPClient: "openai", AnthropicClient: "anthropic", ResponsesClient: "responses"}
    client: Any = answerer.client
    if type(client) not in kinds:
        raise RequestRefusedError(
            f"direct=True needs an HTTP endpoint that the server can reach; a {type(client).__name__} is only in this "
            "process"
        )
    return {
        "kind": kinds[type(client)],
        "base_url": client.base_url,
        "api_key": client.api_key,
        "headers": client.headers,
        "timeout_s": client.timeout_s,
        "max_retries": client.max_retries,
    }


def _rubric(names: Sequence[str], weights: Sequence[float]) -> Rubric:
    """A rubric with names and weights only. The functions are on the server."""
    functions: list[Callable[..., Any]] = []
    for name in names:

        def elsewhere(completion: Any) -> float:
            raise GraderError("a remote environment is scored on its server")

        elsewhere.__name__ = name
        functions.append(elsewhere)
    return Rubric(functions, weights=list(weights))
