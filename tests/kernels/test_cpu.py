"""C that is compiled on the spot: the same numbers as PyTorch's, on every kind of processor, and never in the way."""

from __future__ import annotations

import math
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.engine.support.exact import VOCABULARY, assert_exact, prompt_of, random_model  # noqa: E402
from verifiers.engine import model_runner  # noqa: E402
from verifiers.engine.sequence import Sampling  # noqa: E402
from verifiers.errors import ModelError  # noqa: E402
from verifiers.kernels import sampling  # noqa: E402
from verifiers.kernels.cpu import binding, build, private, threads  # noqa: E402
from verifiers.kernels.cpu import model as cpu_model  # noqa: E402
from verifiers.kernels.sampling import SamplingColumns  # noqa: E402

needs_compiler = pytest.mark.skipif(build.find_compiler() is None, reason="there is no C compiler here")
ADD_ONE = "#include <stdint.h>\nint64_t add_one(int64_t x) { return x + 1; }\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of one's own; what was compiled before is not known."""
    monkeypatch.setenv("VERIFIERS_CACHE", str(tmp_path / "cache"))
    build.library.cache_clear()
    yield tmp_path
    build.library.cache_clear()


def source(folder: Path, text: str = ADD_ONE) -> Path:
    path = folder / "some.c"
    path.write_text(text)
    return path


# --- compiling --------------------------------------------------------------------------------------------------------


@needs_compiler
def test_a_file_is_compiled_once_and_again_when_it_or_its_header_changes(folder: Path) -> None:
    (folder / "one.h").write_text("enum { ONE = 1 };")
    text = '#include <stdint.h>\n#include "one.h"\nint64_t add_one(int64_t x) { return x + ONE; }\n'
    found = build.library(source(folder, text))
    assert found is not None
    assert found.add_one(41) == 42
    built = list((folder / "cache" / "compiled").iterdir())
    assert len(built) == 1
    build.library.cache_clear()
    assert build.library(source(folder, text)) is not None
    assert list((folder / "cache" / "compiled").iterdir()) == built
    (folder / "one.h").write_text("enum { ONE = 2 };")
    build.library.cache_clear()
    changed = build.library(source(folder, text))
    assert changed is not None
    assert changed.add_one(41) == 43


def test_without_a_compiler_there_is_no_library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CC", raising=False)
    assert build.find_compiler() is None
    assert build.library(source(folder)) is None


def test_it_can_be_switched_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERIFIERS_COMPILE", "0")
    assert build.library(source(folder)) is None
    assert not (folder / "cache").exists()


@needs_compiler
def test_what_does_not_compile_is_done_without_and_said(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "verifiers.kernels")
    assert build.library(source(folder, "int main(void) { return nothing_like_it; }")) is None
    assert "nothing_like_it" in caplog.text
    assert not list((folder / "cache" / "compiled").iterdir())


EVIL = "#include <stdint.h>\nint64_t add_one(int64_t x) { return 666; }\n"


def evil_library(folder: Path) -> Path:
    """A library of a stranger's, with the function that is asked for."""
    (folder / "evil.c").write_text(EVIL)
    words = ["cc", "-shared", "-fPIC", str(folder / "evil.c"), "-o", str(folder / "evil.so")]
    subprocess.run(words, check=True)
    return folder / "evil.so"


def built_in(folder: Path) -> Path:
    """The library that was compiled into the cache."""
    assert build.library(source(folder)) is not None
    build.library.cache_clear()
    (built,) = (folder / "cache" / "compiled").iterdir()
    return built


@needs_compiler
@pytest.mark.parametrize("which", ["cache/compiled", "cache", "."])
def test_nothing_is_run_from_or_put_into_a_folder_that_others_can_change(
    which: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor from one in a folder that others can change: they would swap it for their own."""
    evil, built = evil_library(folder), built_in(folder)
    built.unlink()  # rather than written over: it is mapped into this process
    built.write_bytes(evil.read_bytes())
    (folder / which).chmod(0o777)
    found = build.library(source(folder))
    assert found is not None
    assert found.add_one(41) == 42
    assert f"{folder / which} can be written by others".replace("/.", "") in caplog.text.replace("/.", "")
    assert built.read_bytes() == evil.read_bytes()
    (folder / which).chmod(0o700)


@needs_compiler
@pytest.mark.parametrize("how", ["written by all", "written by the group", "a link", "of another user", "no library"])
def test_a_library_that_another_could_have_written_is_compiled_again(how: str, folder: Path) -> None:
    evil, built = evil_library(folder), built_in(folder)
    built.unlink()
    if how == "a link":
        built.symlink_to(evil)
    else:
        built.write_bytes(b"no library" if how == "no library" else evil.read_bytes())
        built.chmod({"written by all": 0o777, "written by the group": 0o775}.get(how, 0o755))
    if how == "of another user" or (how == "written by the group" and os.geteuid() == 0):
        if os.geteuid() != 0:
            pytest.skip("only root gives files away")
        os.chown(built, 65534 if how == "of another user" else -1, 65534)
    found = build.library(source(folder))
    assert found is not None
    assert found.add_one(41) == 42
    assert not built.is_symlink()
    assert built.stat().st_uid == os.geteuid()
    assert built.stat().st_mode & 0o777 == 0o700


@needs_compiler
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_a_folder_that_is_swapped_after_it_was_checked_changes_nothing(folder: Path) -> None:
    evil, built = evil_library(folder), built_in(folder)
    handle = private.open_private_folder(built.parent)
    built.parent.rename(folder / "cache" / "away")
    built.parent.mkdir()
    built.write_bytes(evil.read_bytes())
    assert build._load(handle, built.name).add_one(41) == 42
    os.close(handle)


@needs_compiler
def test_libraries_that_are_loaded_one_after_another_are_not_mistaken_for_each_other(folder: Path) -> None:
    found = []
    for number in range(4):
        path = folder / f"other{number}.c"
        path.write_text(f"#include <stdint.h>\nint64_t number(void) {{ return {number}; }}\n")
        found.append(build.library(path))
    assert [library.number() for library in found if library is not None] == [0, 1, 2, 3]


UNDEFINED = """
#include <stdio.h>
#include "simd.h"
int main(void) {
    float odd[] = {NAN, -NAN, INFINITY, -INFINITY, -1e30f, 1e30f, -87.0f, -87.5f, 88.0f, 0.0f, -0.0f};
    for (unsigned i = 0; i < sizeof odd / sizeof *odd; i++) printf("%.9g\\n", exp_of(odd[i]));
    for (float x = -87.0f; x < 88.0f; x += 0.37f)
        if (fabsf(exp_of(x) / expf(x) - 1.0f) > 4e-7f) return 2;
    return 0;
}
"""


@needs_compiler
def test_the_exponential_function_does_nothing_undefined_whatever_it_is_given(folder: Path) -> None:
    (folder / "try.c").write_text(UNDEFINED)
    checks = ["-fsanitize=undefined,float-cast-overflow", "-fno-sanitize-recover=all"]
    words = ["cc", "-O2", "-I", str(Path(build.__file__).parent), *checks, str(folder / "try.c"), "-lm"]
    made = subprocess.run([*words, "-o", str(folder / "try")], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"this compiler has no sanitizer: {made.stderr.strip()[-200:]}")
    done = subprocess.run([str(folder / "try")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first = [float(line) for line in done.stdout.split()]
    assert math.isnan(first[0])
    assert math.isnan(first[1])
    assert first[3:5] == [0.0, 0.0]
    assert first[-2:] == [1.0, 1.0]


@needs_compiler
def test_processes_may_compile_the_same_at_once(folder: Path) -> None:
    path = source(folder)
    code = f"import pathlib, verifiers.kernels.cpu.build as c; print(c.library(pathlib.Path({str(path)!r})).add_one(1))"
    running = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(3)]
    assert [one.communicate(timeout=120)[0].split() for one in running] == [[b"2"]] * 3
    assert len(list((folder / "cache" / "compiled").iterdir())) == 1


@needs_compiler
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="names of instruction sets")
@pytest.mark.parametrize("instructions", ["-mno-avx512f", "-mno-avx", "-mno-fma -mno-avx512f"])
def test_tiles_of_other_processors_are_exact(
    folder: Path, start: Any, monkeypatch: pytest.MonkeyPatch, instructions: str
) -> None:
    own = build._for_this_processor
    monkeypatch.setattr(build, "_for_this_processor", lambda: [*own(), *instructions.split()])
    functions = binding.decode_functions.__wrapped__()
    for module in (cpu_model, sampling):
        monkeypatch.setattr(module, "decode_functions", lambda: functions)
    way = Sampling(max_tokens=12, seed=1, temperature=0.8)
    for family in ("Llama", "Qwen2-window"):
        model = random_model(family)
        engine = start(model)
        for future in [engine.submit(prompt_of(5 + 7 * i, seed=i), way)[0] for i in range(4)]:
            assert_exact(model, future.result(), way)


# --- a model ----------------------------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("head_dim", [6, 20, 32, 64, 128])
def test_heads_of_any_size_are_exact(start: Any, heads: tuple[int, int], head_dim: int) -> None:
    model = random_model(
        num_attention_heads=heads[0], num_key_value_heads=heads[1], head_dim=head_dim, hidden_size=44,
        intermediate_size=70, vocab_size=VOCABULARY,
    )  # fmt: skip
    engine = start(model)
    way = Sampling(max_tokens=9, seed=3)
    for future in [engine.submit(prompt_of(3 + 11 * i, seed=i), way)[0] for i in range(3)]:
        assert_exact(model, future.result(), way)


@needs_compiler
@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_threads_that_share_the_work_give_the_same_tokens(
    start: Any, monkeypatch: pytest.MonkeyPatch, parts: int
) -> None:  # fmt: skip
    model = random_model("Qwen2-window")
    way = Sampling(max_tokens=25, seed=4)
    prompts = [prompt_of(3 + 9 * i, seed=i) for i in range(4)]
    alone = start(model).generate(prompts, way)
    monkeypatch.setattr(threads, "PARAMETERS_PER_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: parts)
    engine = start(model)
    together = engine.generate(prompts, way)
    assert engine.runner.cpu._matrices.team.parts == parts
    for one, other in zip(alone, together, strict=True):
        assert one.ids == other.ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        assert_exact(model, other, way)


def failing_start(monkeypatch: pytest.MonkeyPatch, after: int) -> list[threading.Thread]:
    """Threads cannot be started any more after so many; those that were."""
    started: list[threading.Thread] = []
    own = threading.Thread.start

    def start_one(self: threading.Thread) -> None:
        if len(started) >= after:
            raise RuntimeError("can't start new thread")
        started.append(self)
        own(self)

    monkeypatch.setattr(threading.Thread, "start", start_one)
    return started


def test_a_thread_that_cannot_be_started_leaves_no_other_one_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    started = failing_start(monkeypatch, after=2)
    team = threads.ThreadTeam(4)
    assert team.parts == 1
    assert len(started) == 2
    for thread in started:  # they have ended, and spin nowhere
        thread.join(60)
        assert not thread.is_alive()
    done: list[int] = []
    team.share([lambda: done.append(1), lambda: done.append(2)])
    assert done == [1, 2]


def test_what_fails_in_one_thread_of_a_team_is_raised_and_the_team_goes_on() -> None:
    team = threads.ThreadTeam(3)
    with pytest.raises(ZeroDivisionError):
        team.share([lambda: None, lambda: 1 / 0, lambda: None])
    done: list[int] = []
    team.share([lambda: done.append(1)] * 6)
    assert done == [1] * 6


@needs_compiler
def test_long_prompts_of_a_larger_model_go_by_its_modules(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "PARAMETERS_PER_THREAD", 1)
    model = random_model()
    engine = start(model)
    way = Sampling(max_tokens=20, seed=2)
    engine.generate([prompt_of(9)], way)
    assert engine.runner.cpu.is_usable
    monkeypatch.setattr(model_runner, "MOST_SEEN_IN_C", 0)
    asked: list[int] = []
    run = engine.runner._run
    engine.runner._run = lambda ids, *more: asked.append(ids.numel()) or run(ids, *more)
    assert_exact(model, engine.generate([prompt_of(30, seed=1)], way)[0], way)
    assert asked == [30]


@needs_compiler
def test_tokens_are_the_same_one_at_a_time_and_in_bursts(start: Any) -> None:
    model = random_model()
    told: list[int] = []
    way = Sampling(max_tokens=40, seed=5, temperature=0.7)
    alone = start(model).generate([prompt_of(9)], way)[0]
    watched = start(model).submit(prompt_of(9), way, on_token=lambda token, logprob: told.append(token))[0].result()
    assert told == alone.ids == watched.ids
    assert alone.logprobs == watched.logprobs
    assert alone.raw_logprobs == watched.raw_logprobs


@needs_compiler
def test_a_burst_ends_where_a_row_does(start: Any) -> None:
    model = random_model()
    engine = start(model)
    long = Sampling(max_tokens=60, seed=5)
    ids = engine.generate([prompt_of(9)], long)[0].ids
    stopping = type(engine)(model, rows=4, length=160, stop_ids=[ids[10]])
    try:
        short = stopping.submit(prompt_of(9), long)[0]
        other = stopping.submit(prompt_of(30, seed=2), Sampling(max_tokens=13, seed=6))[0]
        first = ids.index(ids[10])
        assert short.result().ids == ids[: first + 1]
        assert short.result().finish_reason == "stop"
        assert_exact(model, other.result(), Sampling(max_tokens=13, seed=6))
    finally:
        stopping.close()


@needs_compiler
def test_numbers_that_are_none_fail_the_request_and_not_the_engine(start: Any) -> None:
    model = random_model()
    engine = start(model)
    good = {name: one.detach().clone() for name, one in model.named_parameters()}
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 3] = math.nan
    with pytest.raises(ModelError, match="not numbers"):
        engine.generate([prompt_of(9)], Sampling(max_tokens=20))
    with torch.no_grad():
        for name, one in model.named_parameters():
            one.copy_(good[name])
    way = Sampling(max_tokens=20, seed=1)
    assert_exact(model, engine.generate([prompt_of(9)], way)[0], way)


# --- drawing ----------------------------------------------------------------------------------------------------------


def columns(rows: int, temperature: float = 1.0, seed: int = 0) -> SamplingColumns:
    return SamplingColumns(
        torch.full((rows,), temperature), torch.ones(rows), torch.full((rows,), 1 << 30), torch.zeros(rows),
        torch.arange(rows) + seed, torch.arange(rows) % 7,
    )  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("vocabulary", [1, 2, 63, 64, 65, 97, 512, 9000])
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 1.7])
def test_the_same_tokens_are_drawn_as_by_pytorch(
    monkeypatch: pytest.MonkeyPatch, vocabulary: int, temperature: float
) -> None:
    logits = torch.randn(40, vocabulary, generator=torch.Generator().manual_seed(1)) * 4
    ours = sampling.sample(logits, columns(40, temperature), truncates=False)
    monkeypatch.setattr(sampling, "decode_functions", lambda: None)
    theirs = sampling.sample(logits, columns(40, temperature), truncates=False)
    assert (ours[0] == theirs[0]).float().mean() >= 0.95  # a draw may fall on the border of two
    same = ours[0] == theirs[0]
    for mine, other in zip(ours[1:], theirs[1:], strict=True):
        torch.testing.assert_close(mine[same], other[same], rtol=1e-5, atol=1e-5)


@needs_compiler
def test_draws_are_as_likely_as_the_logits_say() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.0, 0.2, 0.05])
    rows = 40_000
    drawn, logprobs, raw = sampling.sample(
        probabilities.log().expand(rows, -1), columns(rows, seed=11), truncates=False
    )  # fmt: skip
    shares = torch.bincount(drawn, minlength=5) / rows
    assert shares[2] == 0
    torch.testing.assert_close(shares, probabilities, atol=0.012, rtol=0)
    torch.testing.assert_close(logprobs, probabilities.log()[drawn], rtol=1e-5, atol=1e-5)
    assert torch.equal(logprobs, raw)


@needs_compiler
def test_what_cannot_be_is_never_drawn_and_bad_numbers_are_reported() -> None:
    logits = torch.full((3, 200), -math.inf)
    logits[0, [7, 150]] = torch.tensor([1.0, 2.0])
    logits[1, 199] = -3e38
    logits[2, 5] = math.nan
    for seed in range(50):
        drawn, logprobs, raw = sampling.sample(logits, columns(3, seed=seed), truncates=False)
        assert int(drawn[0]) in (7, 150)
        assert int(drawn[1]) == 199
        assert logprobs[1] == raw[1] == 0
        assert not torch.isfinite(raw[2])
        assert 0 <= int(drawn[2]) < 200
