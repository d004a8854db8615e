"""The service → the endpoints that Tinker's SDK calls. Results are protobuf if the client accepts it, else JSON."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from aiohttp import web

from verifiers import errors
from verifiers.clients.hosts import is_own_host
from verifiers.clients.server_access import key_of, lost_client
from verifiers.dialects.http import json_reply, read_body
from verifiers.integrations.tinker import wire
from verifiers.integrations.tinker.custom_losses import CustomLoss
from verifiers.integrations.tinker.data import TrainingRequest, Written, read_json, read_protobuf
from verifiers.integrations.tinker.futures import Pending, failure
from verifiers.integrations.tinker.service import NotHereError, Service, number_of
from verifiers.integrations.tinker.store import KINDS, Place, as_time, read_ttl

logger = logging.getLogger("verifiers.integrations.tinker")

MOST_BYTES = 256 << 20  # per request; the SDK sends data in parts of 5 MB
API = "/api/v1"
# Tells the SDK to send uncompressed JSON or protobuf, and the requests of a training one after another.
CLIENT_CONFIG = {
    "pjwt_auth_enabled": False,
    "credential_default_source": "api_key",
    "parallel_fwdbwd_chunks": False,
    "proto_compress_fwdbwd": False,
    "use_pyqwest_transport": False,
    "create_model_via_load_weights": False,
    "sample_use_retrieve_futures": False,
    "custom_loss_server_side": True,
    "sample_join_sampling_session": True,
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Endpoints:
    """All endpoints over one service; `app` is what aiohttp runs."""

    def __init__(
        self, service: Service, *, api_key: str | None = None, host: str = "127.0.0.1", allow_hosts: Sequence[str] = ()
    ) -> None:
        self.service = service
        self.api_key, self.host, self.allow_hosts = api_key, host, tuple(allow_hosts)
        self._joined = 0

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MOST_BYTES, middlewares=[self._guard])
        service = self.service
        posts: dict[str, Handler] = {
            "client/config": _saying(CLIENT_CONFIG),
            "client/dynamic_config": _saying({"refresh_interval_sec": 300}),
            "telemetry": _saying({"status": "accepted"}),
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "sessions/{session_id}/finish": self._finish,
            "create_model": self._submitting(service.create_model),
            "unload_model": self._submitting(lambda body: service.unload(str(body.get("model_id")))),
            "get_info": self._info,
            "weights_info": self._weights_info,
            "forward": self._learn,
            "forward_backward": self._learn,
            "optim_step": self._submitting(service.optim_step),
            "save_weights": self._submitting(service.save),
            "load_weights": self._submitting(service.load),
            "save_weights_for_sampler": self._submitting(service.save_for_sampler),
            "create_custom_loss": self._create_custom_loss,
            "create_sampling_session": self._create_sampling_session,
            "join_sampling_session": self._join,
            "asample": self._submitting(service.sample),
            "retrieve_future": self._retrieve,
            "cancel_future": self._cancel,
        }
        app.add_routes(web.post(f"{API}/{path}", handler) for path, handler in posts.items())
        checkpoint = "training_runs/{run}/checkpoints/{kind}/{name}"
        app.add_routes(
            [
                web.get(f"{API}/healthz", _saying({"status": "ok"})),
                web.get(f"{API}/get_server_capabilities", self._capabilities),
                web.get(f"{API}/samplers/{{sampler_id}}", self._sampler),
                web.get(f"{API}/training_runs", self._runs),
                web.get(f"{API}/training_runs/{{run}}", self._run),
                web.get(f"{API}/training_runs/{{run}}/checkpoints", self._checkpoints),
                web.get(f"{API}/checkpoints", self._all_checkpoints),
                web.delete(f"{API}/{checkpoint}", self._delete),
                web.put(f"{API}/{checkpoint}/ttl", self._keep_for),
            ]
        )
        return app

    # --- every request --------------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        http = request
        try:
            if (refusal := self._refusal(http)) is not None:
                return refusal
            return await handler(http)
        except web.HTTPException as error:
            return _error(error.status, f"{http.method} {http.path}: {error.reason}; this server has no such endpoint")
        except NotHereError as error:
            return _error(404, str(error))
        except errors.RequestRefusedError as error:
            return _error(400, str(error))
        except errors.Error as error:
            return _error(503, str(error))
        except Exception as error:
            if (nobody := lost_client(http, error)) is not None:
                return nobody
            logger.exception("%s %s failed", http.method, http.path)
            return _error(500, f"{type(error).__name__}: {error}")

    def _refusal(self, http: web.Request) -> web.Response | None:
        named = http.headers.get("Host")
        if named is not None and not is_own_host(named, self.host, self.allow_hosts):
            return _error(421, f"the Host {named!r:.200} is not a name of this server; allow it with --allow-host NAME")
        if self.api_key is not None and http.path != f"{API}/healthz":
            given = http.headers.get("X-API-Key") or key_of(http) or ""
            if not hmac.compare_digest(given.encode(errors="surrogateescape"), self.api_key.encode()):
                return _error(401, "the API key is wrong or missing: set TINKER_API_KEY to the server's key")
        elif http.method != "GET" and "Origin" in http.headers:  # without a key, any web page could send this
            return _error(403, "web pages need a server with an API key")
        return None

    def _submitting(self, submit: Callable[[Mapping[str, Any]], Pending]) -> Handler:
        async def handle(http: web.Request) -> web.Response:
            return json_reply(submit(await read_body(http)).told)

        return handle

    # --- sessions -------------------------------------------------------------------------------------------------

    async def _create_session(self, http: web.Request) -> web.Response:
        return json_reply({"type": "create_session", "session_id": self.service.open_session()})

    async def _heartbeat(self, http: web.Request) -> web.Response:
        self.service.session((await read_body(http)).get("session_id"))
        return json_reply({"type": "session_heartbeat"})

    async def _finish(self, http: web.Request) -> web.Response:
        self.service.end_session(http.match_info["session_id"])
        return web.Response(status=204)

    async def _capabilities(self, http: web.Request) -> web.Response:
        served = {
            "model_name": self.service.name,
            "max_context_length": self.service.length,
            "trainable": True,
            "sampleable": True,
        }
        return json_reply({"supported_models": [served]})

    # --- training -------------------------------------------------------------------------------------------------

    async def _learn(self, http: web.Request) -> web.Response:
        if http.headers.get("Content-Encoding", "identity") != "identity":
            raise errors.RequestRefusedError("the body is compressed, which this server does not support")
        request: TrainingRequest
        if http.content_type == wire.PROTOBUF:
            request = read_protobuf(await http.read())
        else:
            request = read_json(await read_body(http), forward_only=http.path.endswith("/forward"))
        return json_reply(self.service.learn(request).told)

    async def _create_custom_loss(self, http: web.Request) -> web.Response:
        body = await read_body(http)
        session, loss = self.service.session(body.get("session_id")), CustomLoss.read(body)
        loss_id = f"{session.id}:loss:{number_of(body, 'custom_loss_seq_id')}"
        session.losses[loss_id] = loss
        done = {"type": "create_custom_loss", "loss_id": loss_id}
        return json_reply(self.service.settled("create_custom_loss", session, done).told)

    async def _info(self, http: web.Request) -> web.Response:
        model_id = (await read_body(http)).get("model_id")
        self.service.session_of(model_id)
        lora = self.service.store.run(str(model_id))["lora"]
        model = self.service.adapters.model
        data = {
            "arch": model.config.model_type,
            "model_name": self.service.name,
            "tokenizer_id": self.service.tokenizer_id,
        }
        body = {"type": "get_info", "model_id": model_id, "model_data": data, "model_name": self.service.name}
        return json_reply({**body, "is_lora": True, "lora_rank": lora["rank"]})

    async def _weights_info(self, http: web.Request) -> web.Response:
        place = self.service.place((await read_body(http)).get("tinker_path"))
        run = self.service.store.run(place.run)
        lora = dict(run["lora"])
        return json_reply({"base_model": run["base_model"], "is_lora": True, "lora_rank": lora.pop("rank"), **lora})

    # --- sampling -------------------------------------------------------------------------------------------------

    async def _create_sampling_session(self, http: web.Request) -> web.Response:
        sampler_id = self.service.open_sampler(await read_body(http))
        return json_reply({"type": "create_sampling_session", "sampling_session_id": sampler_id})

    async def _join(self, http: web.Request) -> web.Response:
        self.service.sampler((await read_body(http)).get("sampling_session_id"))
        self._joined += 1
        return json_reply({"type": "join_sampling_session", "client_counter": self._joined})

    async def _sampler(self, http: web.Request) -> web.Response:
        sampler_id = http.match_info["sampler_id"]
        path = self.service.sampler(sampler_id).path
        return json_reply({"sampler_id": sampler_id, "base_model": self.service.name, "model_path": path})

    # --- futures --------------------------------------------------------------------------------------------------

    async def _retrieve(self, http: web.Request) -> web.Response:
        request_id = str((await read_body(http)).get("request_id"))
        try:
            found = await self.service.futures.result(request_id)
        except KeyError:
            return _error(
                410, f"there is no request {request_id!r:.80}; it was fetched long ago, or its session has ended"
            )
        except TimeoutError:
            waiting = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
            return web.json_response(waiting, status=408)
        except Exception as error:  # the outcome of the request
            if not isinstance(error, errors.Error | ValueError):
                logger.exception("request %s failed", request_id)
            return json_reply(failure(error))
        if not isinstance(found, Written):
            return json_reply(found)
        if found.protobuf is not None and wire.PROTOBUF in http.headers.get("Accept", ""):
            return web.Response(body=found.protobuf(), content_type=wire.PROTOBUF)
        return json_reply(found.json())

    async def _cancel(self, http: web.Request) -> web.Response:
        self.service.futures.cancel(str((await read_body(http)).get("request_id")))
        return web.Response(status=204)

    # --- saved weights --------------------------------------------------------------------------------------------

    async def _runs(self, http: web.Request) -> web.Response:
        runs = [self._described(run) for run in self.service.store.runs()]
        return json_reply({"training_runs": runs, "cursor": _cursor(len(runs))})

    async def _run(self, http: web.Request) -> web.Response:
        return json_reply(self._described(http.match_info["run"]))

    def _described(self, run: str) -> dict[str, Any]:
        told, saved = self._known_run(run), self.service.store.checkpoints(run)
        last = {kind: next((one for one in saved if one["checkpoint_type"] == kind), None) for kind in KINDS.values()}
        return {
            "training_run_id": run,
            "base_model": told["base_model"],
            "model_owner": "local",
            "is_lora": True,
            "lora_rank": told["lora"]["rank"],
            "last_request_time": saved[0]["time"] if saved else as_time(told["began"]),
            "last_checkpoint": last["training"],
            "last_sampler_checkpoint": last["sampler"],
            "user_metadata": told["user_metadata"],
        }

    def _known_run(self, run: str) -> dict[str, Any]:
        try:
            return self.service.store.run(run)
        except errors.RequestRefusedError as error:
            raise NotHereError(str(error)) from error

    async def _checkpoints(self, http: web.Request) -> web.Response:
        self._known_run(http.match_info["run"])
        return json_reply({"checkpoints": self.service.store.checkpoints(http.match_info["run"])})

    async def _all_checkpoints(self, http: web.Request) -> web.Response:
        store = self.service.store
        found = [one for run in store.runs() for one in store.checkpoints(run)]
        return json_reply({"checkpoints": found, "cursor": _cursor(len(found))})

    async def _delete(self, http: web.Request) -> web.Response:
        self.service.store.delete(_place(http))
        return web.Response(status=204)

    async def _keep_for(self, http: web.Request) -> web.Response:
        self.service.store.keep_for(_place(http), read_ttl((await read_body(http)).get("ttl_seconds")))
        return web.Response(status=204)


def _place(http: web.Request) -> Place:
    run, kind, name = (http.match_info[part] for part in ("run", "kind", "name"))
    return Place.read(f"tinker://{run}/{kind}/{name}")


def _cursor(count: int) -> dict[str, int]:
    return {"offset": 0, "limit": count, "total_count": count}


def _saying(body: Mapping[str, Any]) -> Handler:
    async def handle(http: web.Request) -> web.Response:
        return json_reply(body)

    return handle


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": message, "detail": message}, status=status)
