"""A sampler in another process: weights after each update, versions on every token, and servers that come and go."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import verifiers as vf  # noqa: E402
from tests.engine import tiny  # noqa: E402
from tests.trainers import making, serving  # noqa: E402
from tests.trainers.serving import Server, Vllm, until  # noqa: E402
from verifiers.clients.protocol import Request  # noqa: E402
from verifiers.engine.server.server import LocalServer  # noqa: E402
from verifiers.errors import EndpointDownError  # noqa: E402
from verifiers.trainers.distributed import weight_sender  # noqa: E402

SAMPLING = {"max_tokens": 4, "logprobs": True, "ignore_eos": True}
ASKED = Request(model="", prompt=[{"role": "user", "content": "hello"}], sampling=SAMPLING)


@contextmanager
def served(tokenizer: Any = None, *, port: int = 0, **kwargs: Any) -> Iterator[Any]:
    tokenizer = tokenizer or tiny.tokenizer()
    local = vf.LocalModel(tiny.model(tokenizer, **kwargs), tokenizer, name="tiny", rows=16)
    with LocalServer(local, port=port) as server:
        yield server
    local.close()


def ratios(report: Any) -> list[float]:
    """The mean of each step; a step whose rollouts all earned the same, which nobody can seed elsewhere, has none."""
    return [line.get("ratio_mean", 1.0) for line in report.steps]


# --- one server ------------------------------------------------------------------------------------------------------


def test_a_training_with_a_sampler_elsewhere_is_on_policy_at_every_step(tmp_path):
    with served(seed=9) as server:  # other weights: it gets the trainer's before the first step
        report = making.trainer(tmp_path, client=vf.Samplers(server.url), max_steps=3).train()
    assert ratios(report) == pytest.approx([1.0] * 3, abs=1e-4)
    assert [line["clip_fraction"] for line in report.steps] == [0.0] * 3
    assert [line["staleness_max"] for line in report.steps] == [0, 0, 0]


def test_vllms_endpoints_are_asked_in_vllms_order_with_vllms_bodies(tmp_path):
    """A stand-in that refuses what vLLM 0.32 would; the real one is in tests/integrations/test_vllm_real.py."""
    with Vllm(seed=9) as server:
        report = making.trainer(tmp_path, client=vf.Samplers(server.url), max_steps=2).train()
    assert ratios(report) == pytest.approx([1.0] * 2, abs=1e-4)
    assert [line["staleness_max"] for line in report.steps] == [0, 0]
    one_update = [
        "/pause?mode=keep",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/reset_prefix_cache?reset_running_requests=true",
        "/resume",
    ]
    assert server.asked == ["/init_weight_transfer_engine", *one_update * 3]
    assert server.versions == ["0", "1", "2"]


def test_a_vllm_says_of_each_token_which_weights_made_it_also_where_they_change_in_its_midst():
    """Of the versions that a reply can be from it says the true ones, which are not the oldest."""
    tokenizer = tiny.tokenizer()
    asked = replace(ASKED, sampling={**SAMPLING, "max_tokens": 300})
    with Vllm() as server:
        samplers = vf.Samplers(server.url)
        model = tiny.model(tokenizer)
        samplers.start(model, tokenizer, 4)

        async def across(version: int) -> Any:
            before = server.engine.tokens
            reply = asyncio.create_task(samplers.complete(asked))
            while server.engine.tokens < before + 20:
                await asyncio.sleep(0)
            with samplers.lock, torch.no_grad():
                next(model.parameters()).mul_(1.01)
            await asyncio.to_thread(samplers.send, version)
            return (await reply).tokens

        for version in range(5, 25):  # on a busy machine the reply may have ended before the update
            spans = asyncio.run(across(version)).weight_versions
            assert [spans[0].start, *(span.end for span in spans)] == [0, *(span.start for span in spans[1:]), 300]
            if len(spans) == 2:
                break
        assert [span.version for span in spans] == [str(version - 1), str(version)]
        samplers.close()


def test_a_plain_vllm_does_not_say_and_a_reply_counts_as_of_the_weights_when_it_was_asked_for(tmp_path, caplog):
    with Vllm(says_versions=False) as server:
        ahead = {"num_batches_ahead": 1, "max_staleness": 2, "max_steps": 4, "batch_size": 8}
        report = making.trainer(tmp_path, client=vf.Samplers(server.url), **ahead).train()
    assert 1 <= max(line["staleness_max"] for line in report.steps) <= 2
    assert [line["across_updates"] for line in report.steps] == [0.0] * 4
    assert caplog.text.count("does not report the weight version of tokens") == 1


def test_versions_are_kept_with_the_trajectory_and_no_token_is_older_than_the_bound(tmp_path):
    learned: list[Any] = []
    with Vllm(seed=9) as server:
        ahead = {"num_batches_ahead": 1, "max_staleness": 2, "max_steps": 5, "batch_size": 8}
        made = making.trainer(tmp_path, client=vf.Samplers(server.url), **ahead)
        step = made.train_step

        def noting(batch: Any) -> Any:
            learned.extend((made.step, state["trajectory"]) for state in batch.states)
            return step(batch)

        made.train_step = noting
        report = made.train()
    assert len(learned) == 40
    for updates, turns in learned:
        for tokens in (turn["tokens"] for turn in turns):
            spans = tokens["weight_versions"]
            assert sum(span.end - span.start for span in spans) == len(tokens["completion_ids"])
            assert all(0 <= updates - int(span.version) <= 2 for span in spans)
    assert 1 <= max(line["staleness_max"] for line in report.steps) <= 2


def test_adapters_are_trained_with_a_sampler_elsewhere(tmp_path):
    pytest.importorskip("peft")
    lora = vf.lora_defaults(r=4)
    with served() as server:
        made = making.trainer(tmp_path, client=vf.Samplers(server.url), peft_config=lora, learning_rate=0.05)
        report = made.train()
    assert ratios(report) == pytest.approx([1.0] * 3, abs=1e-3)


def test_adapters_on_weights_in_4_bits_are_trained_with_a_sampler_elsewhere(tmp_path):
    """The sampler holds the weights as they are computed with, adapters added."""
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    asked = {"peft_config": vf.lora_defaults(r=4), "load_in_4bit": True, "learning_rate": 0.05}
    with served() as server:
        report = making.trainer(tmp_path, client=vf.Samplers(server.url), **asked).train()
    assert ratios(report) == pytest.approx([1.0] * 3, abs=1e-3)


def test_batches_ahead_of_a_sampler_elsewhere_stay_within_the_bound(tmp_path):
    def differs(completion: Any) -> float:
        """No two replies are likely to earn the same: every step learns, so older weights give another ratio."""
        return float(sum(place * ord(letter) for place, letter in enumerate(completion[-1]["content"])) % 997)

    env = making.environment(rubric=vf.Rubric([differs]))
    settings: dict[str, Any] = {"num_batches_ahead": 1, "max_staleness": 2, "max_steps": 5, "batch_size": 8}
    with served() as server:
        report = making.trainer(tmp_path, client=vf.Samplers(server.url), env=env, **settings).train()
    assert max(line["staleness_max"] for line in report.steps) in (1, 2)
    assert any(line["ratio_max"] > 1.01 for line in report.steps[1:])


# --- what cannot be trained with: one sentence, before the first step -----------------------------------------------


def refused(tmp_path: Path, *servers: str, **kwargs: Any) -> str:
    with pytest.raises(ValueError) as caught:
        making.trainer(tmp_path, client=vf.Samplers(*servers), **kwargs).train()
    assert not (tmp_path / "run").exists()  # nothing was begun
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("layers", "said"), [(1, "has another model"), (3, "parameters have not arrived")])
def test_a_sampler_of_another_model_is_refused(tmp_path, layers, said):
    with served(layers=layers) as server:
        assert said in refused(tmp_path, server.url)


def test_a_sampler_with_another_tokenizer_is_refused(tmp_path):
    with served(tiny.tokenizer(tiny.CHATML.replace("<|im_start|>", "<|im_end|>"))) as server:
        assert "has another tokenizer or chat template" in refused(tmp_path, server.url)


def test_a_sampler_that_keeps_its_own_weights_is_refused(tmp_path):
    """It says that it has taken them; its logprobs say otherwise."""
    with Vllm(seed=9, takes_weights=False) as server:
        assert "samples from other weights than it was sent" in refused(tmp_path, server.url)


def spans(*named: tuple[Any, Any, Any]) -> list[dict[str, Any]]:
    return [dict(zip(("version", "start", "end"), one, strict=True)) for one in named]


OTHERS = [spans((name, 0, 8)) for name in ("1", "-1", "0.0", "default", "", "00000000000000000000", "9" * 5000)]
NO_SPANS: list[Any] = [
    spans(("0", 0, 7)),
    spans(("0", 0, 9)),
    spans(("0", 0, 5), ("0", 6, 8)),  # a gap
    spans(("0", 0, 6), ("0", 4, 6)),  # as many as there are tokens, some of them twice
    spans(("0", 0, 9), ("0", 9, 8)),
    spans(("0", 1, 9)),
    spans(("0", 0, 8), ("0", 8, 8)),
    spans(("0", 0, 8.0)),
    spans(("0", False, 8)),
    spans((0, 0, 8)),
    [{"version": "0"}],
    ["0"],
    "0",
    {"0": 8},
]


@pytest.mark.parametrize("lies", [*OTHERS, *NO_SPANS])
def test_a_sampler_that_says_what_cannot_be_of_its_weights_is_refused(tmp_path, lies):
    with Vllm() as server:
        server.lies = lies
        said = refused(tmp_path, server.url)
    assert ("the server answered with weights of version" in said) is (lies in OTHERS)
    assert ("do not cover each of its 8 tokens" in said) is (lies in NO_SPANS)
    assert len(said) < 1000


@pytest.mark.parametrize(
    ("version", "config", "said"),
    [
        ({"version": "0.11.2"}, {"backend": "nccl"}, "is vLLM 0.11.2, which cannot be sent weights"),
        ({"version": "0.32.0"}, None, "does not receive weights with gloo or NCCL"),
        ({"version": "0.32.0"}, {"backend": "ipc"}, "does not receive weights with gloo or NCCL"),
        (None, None, "is an endpoint that takes no weights"),
    ],
)
def test_a_vllm_that_does_not_fit_is_refused(tmp_path, version, config, said):
    with Vllm(version=version, config=config) as server:
        assert said in refused(tmp_path, server.url)


@pytest.mark.skipif(torch.cuda.is_available(), reason="here NCCL is there")
def test_a_sampler_that_takes_nccl_only_is_refused_by_a_trainer_without_a_card(tmp_path):
    with Vllm(config={"backend": "nccl"}) as server:
        assert "receives weights with NCCL, but this trainer is not on CUDA" in refused(tmp_path, server.url)


def test_a_sampler_that_is_not_there_is_refused(tmp_path):
    assert "is the server at http://127.0.0.1:9 running?" in refused(tmp_path, "http://127.0.0.1:9/v1")


def test_a_server_of_another_kind_that_answers_anything_with_a_page_is_refused(tmp_path):
    class Pages(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>")

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Pages) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        said = refused(tmp_path, f"http://127.0.0.1:{server.server_port}/v1")
        server.shutdown()
    assert "is an endpoint that takes no weights" in said


def test_a_server_that_never_answers_is_refused_soon(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_sender, "INFO_S", 0.5)  # 30 s
    with socket.create_server(("127.0.0.1", 0)) as silent:
        said = refused(tmp_path, f"http://127.0.0.1:{silent.getsockname()[1]}/v1")
    assert "GET /version: no complete reply within 0.5 s" in said


def test_a_port_in_use_is_one_sentence_before_the_model_is_loaded(tmp_path):
    with served() as server:
        port = server.url.removesuffix("/v1").rsplit(":", 1)[1]
        ended = serving.start("-m", "verifiers", "serve", "local", "--port", port)
        assert f"cannot listen on 127.0.0.1:{port}" in ended.communicate(timeout=200)[1]
        assert ended.returncode == 1


# --- several servers --------------------------------------------------------------------------------------------------


def test_requests_go_to_the_least_busy_and_a_dead_server_is_passed_over(tmp_path):
    tokenizer = tiny.tokenizer()
    with served() as one, served() as other:
        samplers = vf.Samplers(one.url, other.url, patience_s=30)
        samplers.start(tiny.model(tokenizer), tokenizer, 4)

        async def many() -> list[Any]:
            return await asyncio.gather(*(samplers.complete(ASKED) for _ in range(24)))

        before = [reply.tokens.weight_versions[0].version for reply in asyncio.run(many())]
        assert set(before) == {"4"}
        one.stop()
        assert len(asyncio.run(many())) == 24  # all of them from the other
        samplers.close()


def test_a_server_that_comes_back_gets_the_newest_weights_before_any_request(tmp_path):
    tokenizer = tiny.tokenizer()
    listed = tmp_path / "samplers.txt"
    with served() as first:
        listed.write_text(f"{first.url}  # the first\n")
        samplers = vf.Samplers(listed, patience_s=60)
        samplers.start(tiny.model(tokenizer), tokenizer, 0)
        samplers.send(1)
        with served(seed=9) as second:  # added to the file while the training runs
            listed.write_text(f"{first.url}\n{second.url}\n")
            samplers.send(2)
            until(lambda: sum(one.is_up for one in samplers._samplers.values()) == 2)

            async def many() -> list[Any]:
                return await asyncio.gather(*(samplers.complete(ASKED) for _ in range(16)))

            found = asyncio.run(many())
            assert {reply.tokens.weight_versions[0].version for reply in found} == {"2"}
        samplers.close()


def test_a_server_that_two_trainings_send_weights_to_is_given_up_by_one_of_them_with_that_as_the_reason(tmp_path):
    tokenizer = tiny.tokenizer()
    with served() as server:
        first, second = (vf.Samplers(server.url, patience_s=3) for _ in range(2))
        first.start(tiny.model(tokenizer, seed=1), tokenizer, 5)
        first.send(6)
        second.start(tiny.model(tokenizer, seed=2), tokenizer, 3)  # another training goes on, with the same server
        first.send(7)
        try:
            with pytest.raises(
                EndpointDownError, match=r"another trainer sends weights to it \(it has version 3, but was"
            ):
                asyncio.run(first.complete(ASKED))
            assert asyncio.run(second.complete(ASKED)).tokens.weight_versions[0].version == "3"
        finally:
            first.close()
            second.close()


def test_what_comes_back_in_the_place_of_a_server_is_checked_as_it_was(monkeypatch):
    from verifiers.trainers.distributed import samplers as module

    monkeypatch.setattr(module, "HEALTH_CHECK_S", 0.05)
    tokenizer = tiny.tokenizer()
    with served() as first:
        samplers = vf.Samplers(first.url, patience_s=1)
        samplers.start(tiny.model(tokenizer), tokenizer, 1)
        port = int(first.url.removesuffix("/v1").rsplit(":", 1)[1])
        first.stop()
    until(lambda: not any(one.is_up for one in samplers._samplers.values()))
    other = tiny.tokenizer(tiny.CHATML.replace("<|im_start|>", "<|im_end|>"))
    with served(other, port=port):
        until(lambda: any("another tokenizer" in one.reason for one in samplers._samplers.values()))
        with pytest.raises(EndpointDownError, match="it has another tokenizer or chat template"):
            asyncio.run(samplers.complete(ASKED))
    samplers.patience_s = 60
    with served(seed=9, port=port):  # it gets the newest weights, and answers
        spans = asyncio.run(samplers.complete(ASKED)).tokens.weight_versions
        assert [tuple(span) for span in spans] == [("1", 0, 4)]
        samplers.send(2)
        assert asyncio.run(samplers.complete(ASKED)).tokens.weight_versions[0].version == "2"
    samplers.close()


@pytest.mark.parametrize("name", ["default", "3", "6", "-5"])
def test_a_server_that_has_other_weights_all_of_a_sudden_gets_the_newest_before_anything_is_learned(name, caplog):
    """It was started anew, say, and nobody has noticed: what it answers is asked once more."""
    tokenizer = tiny.tokenizer()
    with Vllm() as server:
        samplers = vf.Samplers(server.url, patience_s=60)
        samplers.start(tiny.model(tokenizer), tokenizer, 4)
        samplers.send(5)
        server.engine.name_weights(name)
        if not name.isdecimal():
            reply = asyncio.run(samplers.complete(ASKED))
            assert [tuple(span) for span in reply.tokens.weight_versions] == [("5", 0, 4)]
            assert server.versions == ["4", "5", "5"]
        else:
            samplers.patience_s = 1
            with pytest.raises(EndpointDownError):
                asyncio.run(samplers.complete(ASKED))
            until(lambda: any("another trainer" in one.reason for one in samplers._samplers.values()))
            with pytest.raises(EndpointDownError, match=f"another trainer sends weights to it .it has version {name}"):
                asyncio.run(samplers.complete(ASKED))
        samplers.close()
    assert (
        f"gets no requests for now: the server answered with weights of version '{name}'; expected version 5"
        in caplog.text
    )


def test_what_a_server_says_wrong_of_its_weights_is_asked_of_another_and_one_that_goes_on_is_given_up():
    tokenizer = tiny.tokenizer()
    with served() as good, Vllm() as bad:
        both, alone = vf.Samplers(bad.url, good.url, patience_s=60), vf.Samplers(bad.url, patience_s=3)
        both.start(tiny.model(tokenizer), tokenizer, 2)
        bad.lies = spans(("1", 0, 4))

        async def many() -> list[Any]:
            return await asyncio.gather(*(both.complete(ASKED) for _ in range(6)))

        assert {reply.tokens.weight_versions for reply in asyncio.run(many())} == {(("2", 0, 4),)}
        both.close()
        bad.lies = None
        alone.start(tiny.model(tokenizer), tokenizer, 2)
        bad.lies = spans(("1", 0, 4))
        with pytest.raises(EndpointDownError, match=r"no sampler is up .*do not cover each of its 8 tokens"):
            asyncio.run(alone.complete(ASKED))
        alone.close()


@pytest.mark.parametrize("how", ["is_broken", "hangs"])
def test_what_a_server_fails_at_or_never_answers_is_asked_of_another(monkeypatch, how):
    from verifiers.trainers.distributed import samplers as module

    monkeypatch.setattr(module, "HEALTH_CHECK_S", 0.05)
    tokenizer = tiny.tokenizer()
    with served() as good, Vllm() as bad:
        samplers = vf.Samplers(bad.url, good.url, patience_s=60)
        samplers.start(tiny.model(tokenizer), tokenizer, 2)
        setattr(bad, how, True)

        async def many() -> list[Any]:
            return await asyncio.gather(*(samplers.complete(ASKED) for _ in range(6)))

        assert len(asyncio.run(many())) == 6
        samplers.close()


def test_without_any_server_requests_wait_and_then_say_so():
    samplers = vf.Samplers("http://127.0.0.1:9/v1", patience_s=0.2)
    with pytest.raises(EndpointDownError, match=r"no sampler is up"):
        asyncio.run(samplers.complete(ASKED))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: vf.Samplers(), "at least one server"),
        (lambda: vf.Samplers("http://a/v1", patience_s=0), "patience_s"),
        (lambda: vf.Samplers("ftp://a/v1"), "base_url must look like"),
    ],
)
def test_samplers_that_make_no_sense_are_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()


# --- real processes, killed ------------------------------------------------------------------------------------------

SCRIPT = """
import sys, pathlib
import verifiers as vf
from tests.trainers import making, test_samplers
folder, servers, how = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
client = vf.Samplers(*servers.split(","), patience_s=400) if servers else None
made = making.trainer(folder, env=test_samplers.environment(folder), client=client, max_steps=10, save_steps=1,
                      batch_size=8, num_batches_ahead=1, max_staleness=3, save_total_limit=2)
step = made.train_step
def noting(batch):
    figures = step(batch)
    with open(folder / "learned.jsonl", "a") as file:
        file.write(f"{made.step} {[state['example_id'] for state in batch.states]}\\n")
    return figures
made.train_step = noting
made.train(resume=how == "resume")
"""


@vf.cpu_bound
def graded(completion: Any, info: Any) -> float:
    """Scored in a worker process, which says who it is."""
    folder = Path(info["folder"])
    (folder / f"worker-{os.getpid()}").touch()
    return making.share_of_e(completion)


def environment(folder: Path) -> Any:
    rows = [{"question": f"say {i}", "answer": str(i), "info": {"folder": str(folder)}} for i in range(40)]
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([graded]))


class Training:
    """A trainer in a process of its own."""

    def __init__(self, folder: Path, servers: str = "", how: str = "new") -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.process = serving.start("-c", SCRIPT, str(folder), servers, how)

    def after(self, steps: int) -> None:
        """Wait until so many steps have been made."""
        path = self.folder / "run" / "metrics.jsonl"
        until(lambda: path.exists() and path.read_text().count('"loss"') >= steps, self.process)

    def end(self) -> None:
        said = self.process.communicate(timeout=serving.START_S)[1]
        assert self.process.returncode == 0, said

    def check_counted_once(self) -> None:
        """Each step is there once, and no row was learned from twice by what the model is now."""
        lines = [json.loads(line) for line in (self.folder / "run" / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines if "loss" in line] == list(range(1, 11))
        assert max(line["staleness_max"] for line in lines if "loss" in line) <= 3
        learned = {}
        for line in (self.folder / "learned.jsonl").read_text().splitlines():
            step, _, examples = line.partition(" ")
            learned[int(step)] = json.loads(examples)  # a step that was made again counts as it was made last
        groups = [one for examples in learned.values() for one in sorted(set(examples))]
        assert len(learned) == 10
        assert len(groups) == len(set(groups))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_sampler_that_is_killed_is_done_without_and_one_that_joins_takes_part(tmp_path):
    model = serving.save_model(tmp_path / "model")
    with Server(model) as first, Server(model) as second:
        training = Training(tmp_path / "a", f"{first.url},{second.url}")
        training.after(2)
        port = first.port
        first.kill()
        training.after(4)
        with Server(model, port) as third:  # in its place: it gets the newest weights, then requests
            assert third.url
            second.kill()
            training.end()
    training.check_counted_once()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_trainer_that_is_killed_goes_on_with_the_same_sampler(tmp_path):
    with Server(serving.save_model(tmp_path / "model")) as server:
        killed = Training(tmp_path / "a", server.url)
        killed.after(4)
        killed.process.send_signal(signal.SIGKILL)
        killed.process.communicate()
        resumed = Training(tmp_path / "a", server.url, "resume")
        resumed.end()
    resumed.check_counted_once()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_worker_of_the_environment_that_is_killed_costs_its_own_rollouts_at_most(tmp_path):
    training = Training(tmp_path / "a")
    training.after(2)
    worker = int(next((tmp_path / "a").glob("worker-*")).name.removeprefix("worker-"))
    os.kill(worker, signal.SIGKILL)
    training.end()
    training.check_counted_once()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_one_server_samples_ahead_for_two_processes_that_each_hold_a_part_of_the_model(tmp_path):
    asked = {"length": 2, "alphabet": "abc", "use_tags": False, "system_prompt": "Go.", "num_eval_examples": 4}
    model, run = serving.save_model(tmp_path / "model"), tmp_path / "run"
    words = ["train", "reverse-text", "-m", str(model), "-a", json.dumps(asked), "--output-dir", str(run)]
    words += ["--batch-size", "8", "--group-size", "4", "--max-new-tokens", "4", "--max-steps", "4"]
    words += ["--num-batches-ahead", "1", "--learning-rate", "1e-4", "--launch", "fsdp2", "--processes", "2"]
    with Server(serving.save_model(tmp_path / "other", seed=5)) as server:
        training = serving.start("-m", "verifiers", *words, "--sampler", server.url)
        said = training.communicate(timeout=3 * serving.START_S)[1]
        assert training.returncode == 0, said
        with urlopen(f"{server.url.removesuffix('/v1')}/weight_info") as told:
            assert json.load(told)["weight_version"] == "4"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["staleness_max"] for line in steps] == [0, 1, 1, 1]
    assert [line.get("ratio_mean", 1.0) for line in steps] == pytest.approx([1.0] * 4, abs=0.05)
