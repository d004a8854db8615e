"""``vf doctor``: it ends with something to run, on a machine with everything and on one with nothing."""

from __future__ import annotations

import json
import sys
import textwrap

import pytest

from verifiers.cli import doctor


def test_it_says_what_is_there_and_what_to_run_next(run):
    shown = run("doctor", "--no-probe").stdout
    for part in (
        "verifiers  0.",
        "machine    ",
        "libraries  ",
        "extras     ",
        "keys       none is set",
        "sandbox    not tried",
        "here       ",
    ):
        assert part in shown
    assert "vf eval arithmetic -m fake" in shown


def test_it_is_one_json_object_for_a_script_and_shows_no_key(run):
    result = run("doctor", "--no-probe", "--json", env={"OPENAI_API_KEY": "sk-secret"})
    found = json.loads(result.stdout)
    assert found["keys"]["OPENAI_API_KEY"] is True
    assert found["memory_bytes"]["total"] > 0
    assert "sk-secret" not in result.stdout


def test_extras_that_are_not_installed_are_named_with_the_command():
    extras = {"math": {"math-verify": None}, "data": {"datasets": "5.0", "pyarrow": None}, "openai": {"openai": "2.1"}}
    assert doctor._describe_extras(extras) == [
        "libraries  datasets 5.0, openai 2.1",
        "extras     openai",
        "missing    math, data (pyarrow): pip install 'verifiers[NAME]'",
    ]


@pytest.mark.parametrize("version", [None, "2.13.0"])
def test_it_fits_one_screen_with_nothing_and_with_everything_installed(version, monkeypatch, run):
    """As wide as 80 columns, the advice included."""
    monkeypatch.setattr(doctor, "_version", lambda package: version)
    found = doctor.examine(with_probe=False)
    monkeypatch.setattr(doctor, "fitted", lambda lines, indent=13: wrapped(lines, indent))
    assert len(doctor.describe(found)) < 24


def wrapped(lines, indent):
    return [part for line in lines for part in textwrap.wrap(line, 80, subsequent_indent=" " * indent)]


def test_a_torch_that_does_not_start_is_a_line_and_not_a_crash(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so is missing')\n")
    (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{sys.path[0]}:{doctor.Path(doctor.__file__).parents[2]}")
    found = doctor.run_probe()
    assert found == {"error": "torch does not start: ImportError: libcudart.so is missing"}
    assert doctor._describe_engine(found) == ["engine     torch does not start: ImportError: libcudart.so is missing"]


def test_what_was_measured_is_told():
    engine = {
        "torch": "2.13.0",
        "device": "cuda",
        "threads": 8,
        "gpu": "H200",
        "gpus": 1,
        "gpu_bytes": 2**37,
        "dtype": "bfloat16",
        "rows": 256,
        "tokens_per_s": {"float32": 10_000, "bfloat16": 90_000},
        "is_compiled": False,
    }
    first, second, third = doctor._describe_engine(engine)
    assert first == "engine     torch 2.13.0 on 1 × H200, 128.0 GiB, 8 threads, bfloat16"
    assert "up to 90,000 tokens/s" in second
    assert "cc, gcc or clang" in third
    assert "in C" in doctor._describe_engine(engine | {"is_compiled": True})[-1]


def test_how_well_code_is_held_here_is_found_out_by_trying():
    found = doctor.sandbox_level()
    assert found["level"] in ("full", "reduced", "none")
    assert doctor._describe_sandbox(found).startswith(found["level"])
    assert doctor._describe_sandbox({"level": "none", "reasons": ["no namespaces"]}).endswith("(no namespaces)")


def test_a_folder_without_environments_is_told_how_to_make_one(run, folder):
    (folder / "environments").unlink()
    assert "vf init my-env" in run("doctor", "--no-probe").stdout


def test_with_a_model_it_says_which_backend_runs_it_and_why_not_a_quicker_one(run, tmp_path):
    pytest.importorskip("torch")
    from tests.engine.support.exact import random_model
    from tests.engine.tiny import tokenizer

    slower = "batched, in PyTorch (not in C: an activation other than SiLU)"
    for family, said in (("Llama", "batched, in C"), ("Qwen3", "batched, in C"), ("Gemma", slower)):
        random_model(family, vocab_size=320).save_pretrained(tmp_path / family)
        tokenizer().save_pretrained(tmp_path / family)
        shown = json.loads(run("doctor", str(tmp_path / family), "--json").stdout)
        assert shown["sampled"] == said or "no C compiler" in shown["sampled"]
        assert shown["learns"].startswith("in ")
    refused = run("doctor", str(tmp_path / "nothing"), code=1)
    assert "cannot be run here" in refused.output
