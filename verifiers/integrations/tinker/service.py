"""A Tinker client's requests on one model: sessions, trainings, samplers and saved weights."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from verifiers.engine.local_model import LocalModel
from verifiers.errors import RequestRefusedError
from verifiers.integrations.tinker.adapters import Adapters, LoraShape, Snapshot
from verifiers.integrations.tinker.custom_losses import CustomLoss
from verifiers.integrations.tinker.data import TrainingRequest, Written, forward_backward_output
from verifiers.integrations.tinker.drawing import Drawing
from verifiers.integrations.tinker.futures import Futures, Pending
from verifiers.integrations.tinker.learner import Learner, read_adam
from verifiers.integrations.tinker.losses import check_loss
from verifiers.integrations.tinker.samples import SampleRequest
from verifiers.integrations.tinker.scoring import Scoring
from verifiers.integrations.tinker.store import Place, Store, check_name, read_ttl
from verifiers.integrations.tinker.turns import Turns

SILENT_S = 3600.0  # a session ends after this time without a heartbeat; clients send one every 10 seconds
MOST_COUNTED = 1 << 63  # bound on the sequence numbers of clients
SAMPLER_KINDS = ("snapshot", "inflight")
MOST_UNSAVED = 64  # samplers per session with unsaved weights, which are in memory; the oldest are dropped


class NotHereError(RequestRefusedError):
    """A request names something that does not exist on this server."""


@dataclass(eq=False, slots=True)
class Session:
    """One client; its trainings and samplers are dropped when it ends."""

    id: str
    seen: float = field(default_factory=time.monotonic)
    models: set[str] = field(default_factory=set)
    samplers: set[str] = field(default_factory=set)
    unsaved: list[str] = field(default_factory=list)
    losses: dict[str, CustomLoss] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sampler:
    """The weights of a sampling session."""

    snapshot: Snapshot | None
    path: str | None = None
    follows: str | None = None  # the training whose newest weights for "inflight" samplers it uses


class Service:
    """The model, and the clients' trainings and samplers. Methods are called from the server's event loop."""

    def __init__(
        self,
        base: Any,
        tokenizer: Any,
        *,
        name: str,
        tokenizer_id: str | None,
        folder: str | Path,
        rows: int,
        length: int,
    ) -> None:
        self.name, self.store = name, Store(folder)
        self.adapters = Adapters(base)
        self.local = LocalModel(self.adapters.model, tokenizer, name=name, rows=rows, length=length)
        self.ready = self.local.load()
        self.tokenizer_id = tokenizer_id
        with self.ready.engine.lock:
            self.scoring = Scoring(self.adapters.model)
        self.turns = Turns(self._activate)
        self.drawing = Drawing(self.ready, self.scoring, self.turns)
        self.futures = Futures()
        self.sessions: dict[str, Session] = {}
        self.samplers: dict[str, Sampler] = {}
        self._by_paths: dict[str, tuple[int, Sampler]] = {}  # with the modification time of the checkpoint
        self.models: dict[str, Session] = {}
        self._learners: dict[str, Learner] = {}

    def close(self) -> None:
        self.local.close()
        self.turns.close()

    @property
    def length(self) -> int:
        return self.ready.engine.length

    # --- sessions -------------------------------------------------------------------------------------------------

    def open_session(self) -> str:
        for one in [one for one in self.sessions.values() if time.monotonic() - one.seen > SILENT_S]:
            self.end_session(one.id)
        session = Session(uuid.uuid4().hex)
        self.sessions[session.id] = session
        return session.id

    def session(self, session_id: Any) -> Session:
        found = self.sessions.get(str(session_id))
        if found is None:
            raise NotHereError(f"there is no session {session_id!r:.80}; it has ended, or the server was restarted")
        found.seen = time.monotonic()
        return found

    def end_session(self, session_id: str) -> None:
        session = self.sessions.pop(session_id, None)
        if session is None:
            return
        for sampler in session.samplers:
            self.samplers.pop(sampler, None)
        for model_id in session.models:
            self.models.pop(model_id, None)
            self._alone(partial(self._drop, model_id))
        self.futures.forget(session_id)

    # --- trainings ------------------------------------------------------------------------------------------------

    def create_model(self, body: Mapping[str, Any]) -> Pending:
        session = self.session(body.get("session_id"))
        self.check_base(body.get("base_model"))
        model_id, lora = f"{session.id}:train:{number_of(body, 'model_seq_id')}", body.get("lora_config")
        check_optimizer(body.get("optimizer_config") or {})
        shape, seed = LoraShape.read(lora), lora.get("seed") if isinstance(lora, Mapping) else None
        if seed is not None and type(seed) is not int:
            raise RequestRefusedError(f"seed must be an integer, not {seed!r:.80}")
        make = partial(Learner, self.adapters, self.scoring, shape, seed)
        return self._create("create_model", body, session, model_id, shape, make)

    def _create(
        self, kind: str, body: Mapping[str, Any], session: Session, model_id: str, shape: LoraShape,
        make: Callable[[], Learner], **told: Any,
    ) -> Pending:  # fmt: skip
        """Add a training. A repeated request gives the same one."""
        if known := self.futures.known(("create", model_id)):
            return known
        self.store.add_run(model_id, base_model=self.name, shape=shape, metadata=body.get("user_metadata"))
        session.models.add(model_id)
        self.models[model_id] = session

        def run() -> dict[str, Any]:
            self._learners[model_id] = make()
            return {"type": kind, "model_id": model_id, **told}

        return self._submit(kind, run, session, ("create", model_id), model_id=model_id)

    def check_base(self, name: Any) -> None:
        if name != self.name:
            raise NotHereError(f"this server has no model {name!r:.200}; it has {self.name!r}")

    def session_of(self, model_id: Any) -> Session:
        found = self.models.get(str(model_id))
        if found is None:
            raise NotHereError(f"there is no training {model_id!r:.200}; it was unloaded, or the server was restarted")
        found.seen = time.monotonic()
        return found

    def unload(self, model_id: str) -> Pending:
        session = self.session_of(model_id)
        del self.models[model_id]
        session.models.discard(model_id)

        return self._submit("unload_model", partial(self._drop, model_id), session, None)

    def _drop(self, model_id: str) -> dict[str, Any]:
        if (learner := self._learners.pop(model_id, None)) is not None:
            learner.close()
        return {"type": "unload_model", "model_id": model_id}

    def learn(self, request: TrainingRequest) -> Pending:
        session = self.session_of(request.model_id)
        key = (request.model_id, request.seq_id)
        if request.seq_id is not None and (known := self.futures.known(key)):
            return known
        request.check(vocabulary=self.ready.vocabulary, length=self.length)
        custom = None
        if request.loss_fn == "custom":
            custom = session.losses.get(str(request.config.get("loss_id")))
            if custom is None:
                raise NotHereError(f"there is no custom loss {request.config.get('loss_id')!r:.80} in this session")
        else:
            if request.loss_fn == "stable_reinforce":
                request = replace(
                    request, data=[self.drawing.with_recorded(i, one) for i, one in enumerate(request.data)]
                )
            for i, one in enumerate(request.data):
                check_loss(request.loss_fn, one.inputs, request.config, f"datum {i}")

        def run() -> Written:
            return forward_backward_output(*self._learner(request.model_id).learn(request, custom))

        wanted = key if request.seq_id is not None else None
        return self._submit("forward_backward", run, session, wanted, model_id=request.model_id)

    def optim_step(self, body: Mapping[str, Any]) -> Pending:
        model_id = body.get("model_id")
        session, given = self.session_of(model_id), body.get("adam_params") or body.get("optimizer_params") or {}
        if not isinstance(given, Mapping) or given.get("type", "adam") not in ("adam", "adamw"):
            raise RequestRefusedError(
                f"the only optimizer of this server is adamw; a step needs adam_params, not {given!r:.80}"
            )
        read_adam(given)
        return self._in_order(
            "optim_step", body, session, lambda one: {"type": "optim_step", "metrics": one.step(given)}
        )

    # --- saving and loading ---------------------------------------------------------------------------------------

    def save(self, body: Mapping[str, Any]) -> Pending:
        place = Place(run=str(body.get("model_id")), kind="weights", name=check_name(body.get("path")))
        session, ttl_s = self.session_of(body.get("model_id")), read_ttl(body.get("ttl_seconds"))

        def run(one: Learner) -> dict[str, Any]:
            self._write(place, one, body, ttl_s, state=one.state())
            return {"type": "save_weights", "path": str(place)}

        return self._in_order("save_weights", body, session, run)

    def save_for_sampler(self, body: Mapping[str, Any]) -> Pending:
        session, ttl_s = self.session_of(body.get("model_id")), read_ttl(body.get("ttl_seconds"))
        if body.get("path") is not None:
            name = check_name(body["path"])
            place = Place(run=str(body["model_id"]), kind="sampler_weights", name=name)

            def keep(one: Learner) -> dict[str, Any]:
                self._write(place, one, body, ttl_s)
                return {"type": "save_weights_for_sampler", "path": str(place)}

            return self._in_order("save_weights_for_sampler", body, session, keep)
        sampler_id = f"{session.id}:sample:{number_of(body, 'sampling_session_seq_id')}"

        kind, model_id = body.get("kind", "snapshot"), str(body["model_id"])
        if kind not in SAMPLER_KINDS:
            raise RequestRefusedError(f"kind must be {' or '.join(SAMPLER_KINDS)}, not {kind!r:.80}")

        def snapshot(one: Learner) -> dict[str, Any]:
            sampler = Sampler(one.snapshot(), follows=model_id if kind == "inflight" else None)
            self._add_sampler(session, sampler_id, sampler)
            if sampler.follows is not None:
                self.samplers |= {name: sampler for name, known in self.samplers.items() if known.follows == model_id}
            session.unsaved.append(sampler_id)
            while len(session.unsaved) > MOST_UNSAVED:
                self.samplers.pop(session.unsaved.pop(0), None)
            return {"type": "save_weights_for_sampler", "sampling_session_id": sampler_id}

        return self._in_order("save_weights_for_sampler", body, session, snapshot)

    def _write(self, place: Place, one: Learner, body: Mapping[str, Any], ttl_s: int | None, state: Any = None) -> None:
        self.store.save(
            place,
            one.snapshot(),
            self.adapters.config_of(one.shape),
            state=state,
            ttl_s=ttl_s,
            overwrite=bool(body.get("overwrite")),
            metadata=body.get("user_metadata"),
        )

    def load(self, body: Mapping[str, Any]) -> Pending:
        """Load saved weights into a training, or, if the request names a session instead, into a new training."""
        if body.get("model_id") is None and body.get("session_id") is not None:
            return self._create_from(body)
        session, place = self.session_of(body.get("model_id")), Place.read(body.get("path"))

        def run(one: Learner) -> dict[str, Any]:
            self.place(str(place))  # checked only now, because an earlier request may still have been saving it
            state = self.store.load_state(place) if body.get("optimizer") else None
            one.restore(self.store.load(place), state)
            return {"type": "load_weights", "path": str(place), "model_id": body.get("model_id")}

        return self._in_order("load_weights", body, session, run)

    def _create_from(self, body: Mapping[str, Any]) -> Pending:
        session = self.session(body["session_id"])
        model_id, place = f"{session.id}:train:{number_of(body, 'model_seq_id')}", self.place(body.get("path"))
        check_optimizer(body.get("optimizer_config") or {})
        if body.get("base_model") is not None:
            self.check_base(body["base_model"])
        shape = LoraShape.read(self.store.run(place.run)["lora"])

        def make() -> Learner:
            learner = Learner(self.adapters, self.scoring, shape, None)
            try:
                learner.restore(self.store.load(place), self.store.load_state(place) if body.get("optimizer") else None)
            except BaseException:
                learner.close()
                raise
            return learner

        return self._create("load_weights", body, session, model_id, shape, make, path=str(place))

    def place(self, path: Any) -> Place:
        """An existing checkpoint of this model."""
        place = Place.read(path)
        self.store.find(place)
        base = self.store.run(place.run)["base_model"]
        if base != self.name:
            raise RequestRefusedError(f"{place} was trained on {base!r:.200}, but this server has {self.name!r}")
        return place

    # --- sampling -------------------------------------------------------------------------------------------------

    def open_sampler(self, body: Mapping[str, Any]) -> str:
        session, path = self.session(body.get("session_id")), body.get("model_path")
        if path is None:
            self.check_base(body.get("base_model"))
        snapshot = None if path is None else self.store.load(self.place(path))
        sampler_id = f"{session.id}:sample:{number_of(body, 'sampling_session_seq_id')}"
        self._add_sampler(session, sampler_id, Sampler(snapshot, path))
        return sampler_id

    def _add_sampler(self, session: Session, sampler_id: str, sampler: Sampler) -> None:
        session.samplers.add(sampler_id)
        self.samplers[sampler_id] = sampler

    def sampler(self, sampler_id: Any) -> Sampler:
        found = self.samplers.get(str(sampler_id))
        if found is None:
            raise NotHereError(
                f"there is no sampling session {sampler_id!r:.200}; old ones with unsaved weights are dropped"
            )
        return found

    def sample(self, body: Mapping[str, Any]) -> Pending:
        sampler_id, seq_id = body.get("sampling_session_id"), body.get("seq_id")
        sampler = self._sampler_of(body)
        session = str(sampler_id).partition(":")[0]
        if session in self.sessions:
            self.sessions[session].seen = time.monotonic()
        key = None if seq_id is None or sampler_id is None else ("sample", sampler_id, number_of(body, "seq_id"))
        if key is not None and (known := self.futures.known(key)):
            return known
        drawn = self.drawing.draw(SampleRequest.read(body, self.ready), sampler.snapshot)
        pending = self.futures.add("sample", drawn.future, key=key, owner=session, sample_sequence_ids=drawn.names)
        pending.cancel = drawn.cancel
        return pending

    def _sampler_of(self, body: Mapping[str, Any]) -> Sampler:
        """The sampler of a request, by session or, from older clients, by path or base model."""
        if body.get("sampling_session_id") is not None:
            return self.sampler(body["sampling_session_id"])
        if body.get("model_path") is not None:
            return self._by_path(str(body["model_path"]))
        self.check_base(body.get("base_model"))
        return Sampler(None)

    def _by_path(self, path: str) -> Sampler:
        place = self.place(path)
        stamp = self.store.stamp(place)
        if self._by_paths.get(path, (0, None))[0] != stamp:
            self._by_paths[path] = stamp, Sampler(self.store.load(place), path)
            while len(self._by_paths) > MOST_UNSAVED:
                del self._by_paths[next(iter(self._by_paths))]
        return self._by_paths[path][1]

    def _activate(self, key: tuple[Snapshot | None]) -> None:
        with self.ready.engine.lock:
            self.adapters.use_snapshot(key[0])

    # --- submitting jobs ------------------------------------------------------------------------------------------

    def _alone(self, run: Callable[[], Any]) -> Future[Any]:
        def locked() -> Any:
            with self.ready.engine.lock:
                return run()

        return self.turns.submit(locked)

    def _submit(self, kind: str, run: Callable[[], Any], session: Session, key: Any, **told: Any) -> Pending:
        return self.futures.add(kind, self._alone(run), key=key, owner=session.id, **told)

    def settled(self, kind: str, session: Session, result: Any) -> Pending:
        """A request that is already done."""
        done: Future[Any] = Future()
        done.set_result(result)
        return self.futures.add(kind, done, owner=session.id)

    def _in_order(
        self, kind: str, body: Mapping[str, Any], session: Session, run: Callable[[Learner], dict[str, Any]]
    ) -> Pending:
        """Submit a job on a training. A repeated request gives the same job."""
        model_id, seq_id = str(body.get("model_id")), body.get("seq_id")
        key = None if seq_id is None else (model_id, number_of(body, "seq_id"))
        if key is not None and (known := self.futures.known(key)):
            return known
        return self._submit(kind, lambda: run(self._learner(model_id)), session, key, model_id=model_id)

    def _learner(self, model_id: str) -> Learner:
        found = self._learners.get(model_id)
        if found is None:
            raise NotHereError(f"the training {model_id!r} could not be created, or was unloaded")
        return found


def check_optimizer(given: Any) -> None:
    """Raise unless this is the configuration of the one optimizer that there is."""
    kind = given.get("type", "adamw") if isinstance(given, Mapping) else given
    if kind != "adamw":
        raise RequestRefusedError(f"the only optimizer of this server is adamw, not {kind!r:.80}")


def number_of(body: Mapping[str, Any], name: str) -> int:
    """A client's sequence number."""
    value = body.get(name)
    if type(value) is not int or not 0 <= value < MOST_COUNTED:
        raise RequestRefusedError(f"{name} must be an integer from 0, not {value!r:.80}")
    return value
