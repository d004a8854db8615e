"""A read-only web server for the viewer's pages; it refuses requests from other pages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from verifiers.clients.hosts import is_loopback, is_own_host
from verifiers.clients.server_thread import ServerThread
from verifiers.viewer import assets
from verifiers.viewer.cards import Summaries, env_of, run_card, safe_card
from verifiers.viewer.comparing import VERDICTS, compare, compare_many
from verifiers.viewer.figures import run_figures, run_page, shares_page
from verifiers.viewer.library import Library, Run
from verifiers.viewer.records import rollout_page
from verifiers.viewer.rows import Query, neighbours, page

BUDGET_S = 0.25  # for reading or searching per request; the page then shows partial results
LIST_BUDGET_S = 0.3  # for reading runs whose metadata has no results
MAX_GROUP = 64  # rollouts side by side
MAX_COMPARED = 8  # runs compared at once, the number that stays open

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}

Answer = Callable[[web.Request], Any]


class ViewerServer(ServerThread):
    """``with ViewerServer(Library()) as server: print(server.url)``."""

    def __init__(self, library: Library, *, host: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__(host=host, port=port)
        self.library = library
        self.summaries = Summaries()
        self._files = assets.load()

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        return is_loopback(self.host)

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::", "") else self.host
        return f"http://[{host}]:{self.port}/" if ":" in host else f"http://{host}:{self.port}/"

    def make_runner(self) -> web.BaseRunner:
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/", self._file)
        app.router.add_get("/static/{name}", self._file)
        answers: dict[str, Answer] = {
            "/api/runs": self._runs,
            "/api/runs/{run}": self._run,
            "/api/runs/{run}/stamp": self._stamp,
            "/api/runs/{run}/figures": self._figures,
            "/api/runs/{run}/rollouts": self._rollouts,
            "/api/runs/{run}/rollouts/{number}": self._rollout,
            "/api/runs/{run}/group": self._group,
            "/api/runs/{run}/training": self._training,
            "/api/runs/{run}/shares": self._shares,
            "/api/find": self._find_rollout,
            "/api/compare": self._compare_many,
            "/api/compare/{a}/{b}": self._compare,
            "/api/compare/{a}/{b}/example": self._compare_example,
        }
        for path, answer in answers.items():
            app.router.add_get(path, _in_a_thread(answer))
        return web.AppRunner(app, access_log=None)

    # --- access control -------------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Refuse requests from other sites, including by DNS rebinding."""
        try:
            if not is_own_host(request.headers.get("Host", ""), self.host):
                raise web.HTTPForbidden(text="this server can only be used at the URL that `vf view` printed\n")
            is_foreign = request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin")
            if is_foreign and request.path != "/":  # a link to the first page is harmless
                raise web.HTTPForbidden(text="this server answers only requests from its own pages\n")
            response = await handler(request)
        except web.HTTPException as error:
            error.headers.update(HEADERS)
            raise
        response.headers.update(HEADERS)
        return response

    # --- answers --------------------------------------------------------------------------------------------------

    async def _file(self, request: web.Request) -> web.Response:
        name = request.match_info.get("name", "index.html")
        if name not in self._files:
            raise web.HTTPNotFound(text="there is no such file\n")
        text, kind = self._files[name]
        return web.Response(body=text, content_type=kind, charset="utf-8")

    def _runs(self, request: web.Request) -> dict[str, Any]:
        deadline = time.monotonic() + LIST_BUDGET_S
        cards = [safe_card(run, partial(self._card, run, deadline)) for run in self.library.runs()]
        return {"runs": cards, "roots": [str(root) for root in self.library.roots]}

    def _card(self, light: Run, deadline: float) -> dict[str, Any]:
        """A line of the list; reads the run's rollouts if necessary, while there is time."""
        run, summary = light, self.summaries.get(light)
        if summary is None and time.monotonic() < deadline and not run.is_training and run.results_path.is_file():
            run = self.library.get(light.id) or light
            run.index.refresh(LIST_BUDGET_S / 4)
            self.summaries.keep(run)
            summary = self.summaries.get(run)
        return run_card(run, summary)

    def _run(self, request: web.Request) -> dict[str, Any]:
        run = self._find(request)
        run.index.refresh(BUDGET_S)
        run.metrics.refresh()
        return run_page(run)

    def _stamp(self, request: web.Request) -> dict[str, Any]:
        run = self._find(request)
        return {"stamp": run.stamp(), "is_live": run.is_live, "share_read": run.index.share_read}

    def _figures(self, request: web.Request) -> dict[str, Any]:
        run = self._find(request)
        run.index.refresh(BUDGET_S)
        found: dict[str, Any] = run.kept.get(
            ("figures", run.index.version), lambda: run_figures(run.index, run.read_metadata()[0].get("until"))
        )
        return found

    def _rollouts(self, request: web.Request) -> dict[str, Any]:
        run = self._find(request)
        query = Query.parse(request.query)
        run.index.refresh(BUDGET_S)
        return page(run, query, budget_s=BUDGET_S)

    def _rollout(self, request: web.Request) -> dict[str, Any]:
        run = self._find(request)
        number = self._number(request, run)
        return {
            "rollout": rollout_page(run, number),
            "around": neighbours(run, Query.parse(request.query), number),
            "group": run.index.group(run.index.key(number)[0]),
        }

    def _number(self, request: web.Request, run: Run) -> int:
        text = request.match_info["number"]
        if not (text.isascii() and text.isdigit() and len(text) < 16):
            raise ValueError(f"{text[:40]!r} is not the number of a rollout")
        while int(text) >= len(run.index) and not run.index.refresh(BUDGET_S):
            pass
        if int(text) >= len(run.index):
            raise LookupError(f"this run has {len(run.index):,} rollouts, but no number {text}")
        return int(text)

    def _group(self, request: web.Request) -> dict[str, Any]:
        run = self._find(request)
        run.index.refresh()
        return _group_of(run, _example(request))

    def _training(self, request: web.Request) -> dict[str, Any]:
        run = self._find(request)
        run.metrics.refresh()
        bounds = {name: _step(request, name) for name in ("first", "last")}
        return run.metrics.page(**bounds)

    def _shares(self, request: web.Request) -> dict[str, Any]:
        run = self._find(request)
        run.index.refresh(BUDGET_S)
        run.metrics.refresh()
        return shares_page(run)

    def _find_rollout(self, request: web.Request) -> dict[str, Any]:
        """Resolve a permanent link: the run by its folder name, the rollout by example and repeat."""
        name, env_id = request.query.get("run", ""), request.query.get("env")
        found = [run for run in self.library.runs() if run.path.name == name]
        run = next((run for run in found if env_id is None or env_of(run) == env_id), None)
        if run is None:
            raise LookupError(f"there is no run {name[:80]!r} in the folders of this viewer")
        run = self.library.get(run.id) or run
        if "example" not in request.query:
            return {"run": run.id, "number": None}
        run.index.refresh()
        repeat = Query.parse({"start": request.query.get("rollout", "0")}).start
        numbers = run.index.group(_example(request))
        number = next((number for number in numbers if run.index.repeats[number] == repeat), None)
        if number is None:
            raise LookupError(
                "this run has no such rollout; the run may have been made again since the link was created"
            )
        return {"run": run.id, "number": number}

    def _compare_many(self, request: web.Request) -> dict[str, Any]:
        ids = request.query.get("runs", "").split(",")
        if not 2 <= len(ids) <= MAX_COMPARED:
            raise ValueError(f"runs= must have 2 to {MAX_COMPARED} runs, not {len(ids)}")
        runs = [self._named(run_id) for run_id in ids]
        for run in runs:
            run.index.refresh()
        metric = request.query.get("metric", "reward")
        key = ("compare", metric, *((run.id, run.index.version) for run in runs))
        found = runs[0].kept.get(key, lambda: compare_many(runs, metric))
        return {**found, "runs": [run_card(run) for run in runs]}

    def _compare(self, request: web.Request) -> dict[str, Any]:
        a, b = self._find(request, "a"), self._find(request, "b")
        for run in (a, b):
            run.index.refresh()
        metric = request.query.get("metric", "reward")
        key = ("compare", metric, a.index.version, b.id, b.index.version)
        found: dict[str, Any] = a.kept.get(key, lambda: compare(a, b, metric))
        query = Query.parse({name: request.query[name] for name in ("start", "n") if name in request.query})
        verdict = request.query.get("verdict")
        if verdict is not None and verdict not in VERDICTS:
            raise ValueError(f"verdict={verdict!r} must be one of {', '.join(VERDICTS)}")
        rows = [row for row in found["rows"] if verdict is None or row["verdict"] == verdict]
        return {
            "a": run_card(a),
            "b": run_card(b),
            **found,
            "total": len(rows),
            "rows": rows[query.start : query.start + query.n],
        }

    def _compare_example(self, request: web.Request) -> dict[str, Any]:
        example = _example(request)
        sides = {}
        for side in ("a", "b"):
            run = self._find(request, side)
            run.index.refresh()
            sides[side] = _group_of(run, example)["rollouts"]
        return {"example_id": example, **sides}

    def _find(self, request: web.Request, name: str = "run") -> Run:
        return self._named(request.match_info[name])

    def _named(self, run_id: str) -> Run:
        run = self.library.get(run_id)
        if run is None:
            raise LookupError("there is no such run; it may have been moved or deleted")
        return run


def _group_of(run: Run, example: int | str) -> dict[str, Any]:
    numbers = run.index.group(example)
    return {
        "example_id": example,
        "total": len(numbers),
        "rollouts": [rollout_page(run, number) for number in numbers[:MAX_GROUP]],
    }


def _example(request: web.Request) -> int | str:
    """The example id of a request, which is JSON, so that 7 and "7" are different examples."""
    try:
        return msgspec.json.decode(request.query.get("example", ""), type=int | str)
    except (msgspec.DecodeError, UnicodeEncodeError):
        raise ValueError("example= must be an example id as JSON: a number, or a text in quotes") from None


def _step(request: web.Request, name: str) -> float | None:
    return Query.parse({"step": request.query[name]}).step if name in request.query else None


def _in_a_thread(answer: Answer) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Handle requests in a worker thread, because reading files blocks; invalid ones get an error of one sentence."""

    async def handle(request: web.Request) -> web.Response:
        status = 200
        try:
            found = await asyncio.to_thread(answer, request)
        except LookupError as error:
            status, found = 404, {"problem": str(error.args[0])}
        except ValueError as error:
            status, found = 400, {"problem": str(error)}
        return web.Response(body=msgspec.json.encode(found), status=status, content_type="application/json")

    return handle
