"""Checkpoints that cannot be written, and places that are no ordinary folder: one sentence, and nothing left behind."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from transformers import AutoModelForCausalLM

import verifiers as vf
from tests.trainers import making
from verifiers.trainers import checkpoints
from verifiers.trainers.checkpoints import CheckpointError
from verifiers.trainers.distributed.shards import FOLDER, export_checkpoint

ROOT = Path(__file__).resolve().parent.parent.parent

SAVE_UNTIL_FULL = """
import os, signal, resource, subprocess, sys
from pathlib import Path
from tests.trainers import making

folder = Path(sys.argv[1])
how = sys.argv[2]
if how == "a full file system":
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(folder)], check=True)
trainer = making.trainer(folder, max_steps=2, save_steps=1)
if how == "a limit on files":
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY))
else:
    (folder / "ballast").write_bytes(b"x" * 1_900_000)
try:
    trainer.train()
except OSError as error:
    print(type(error).__name__, error, sep=": ")
print(sorted(path.name for path in (folder / "run" / "checkpoints").glob("*")))
print(sorted(path.name for path in (folder / "run" / "checkpoints").glob(".*")))
"""


pytestmark = pytest.mark.timeout(400)  # processes that import torch, beside whatever else the machine does


def in_a_process(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *arguments]
    if "a full file system" in arguments or "mounted" in arguments:
        command = ["unshare", "-rm", *command]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)


def can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    words = ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


needs_mounts = pytest.mark.skipif(not can_mount(), reason="this machine lets nobody mount a file system of their own")


@pytest.mark.parametrize("how", ["a limit on files", pytest.param("a full file system", marks=needs_mounts)])
def test_a_disk_that_is_full_while_a_checkpoint_is_saved_is_one_sentence_and_leaves_no_parts(
    how: str, tmp_path: Path
) -> None:
    done = in_a_process(SAVE_UNTIL_FULL, str(tmp_path), how)
    assert done.returncode == 0, done.stderr
    said, whole, parts = done.stdout.splitlines()[-3:]
    reason = "File too large" if how == "a limit on files" else "No space left on device"
    assert said.startswith("CheckpointError: ")
    assert f"this checkpoint was not saved: {reason}; earlier ones are unchanged" in said
    assert (whole, parts) == ("[]", "[]")


class TooLarge:
    """A model whose state does not fit into memory a second time."""

    def save_pretrained(self, path: Path) -> None:
        Path(path, "half.safetensors").write_bytes(b"half")
        raise self.error

    def __init__(self, error: Exception) -> None:
        self.error = error


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory"),
    ],
    ids=["python's", "torch's"],
)
def test_too_little_memory_for_a_checkpoint_is_one_sentence_and_leaves_no_parts(
    error: Exception, tmp_path: Path
) -> None:
    trainer = making.trainer(tmp_path)
    with pytest.raises(CheckpointError, match="not saved: there is too little memory"):
        checkpoints.save(
            tmp_path / "checkpoints",
            step=1,
            model=TooLarge(error),
            tokenizer=None,
            weights=trainer.weights,
            state={},
            keep=None,
        )
    assert os.listdir(tmp_path / "checkpoints") == []
    with pytest.raises(CheckpointError, match="this model was not saved: there is too little memory"):
        checkpoints.save_model(TooLarge(error), None, tmp_path / "model")
    assert os.listdir(tmp_path) == ["checkpoints"]


SAVE_TWICE = """
import os, signal, sys
from pathlib import Path
from tests.trainers import making

class Killing:
    def save_pretrained(self, path):
        os.kill(os.getpid(), signal.SIGKILL)

folder = Path(sys.argv[1])
trainer = making.trainer(folder, max_steps=1)
trainer.save_model(folder / "model")
trainer.train()
trainer.tokenizer = Killing()
trainer.save_model(folder / "model")
"""


def test_a_kill_while_a_model_is_saved_over_another_leaves_that_one_whole(tmp_path: Path) -> None:
    making.trainer(tmp_path).save_model(tmp_path / "untrained")
    done = in_a_process(SAVE_TWICE, str(tmp_path))
    assert done.returncode == -9, done.stderr
    written = {one.name: one.read_bytes() for one in (tmp_path / "model").iterdir()}
    assert written == {one.name: one.read_bytes() for one in (tmp_path / "untrained").iterdir()}


def test_a_checkpoint_that_a_kill_left_unfinished_is_removed_by_the_next_one(tmp_path: Path) -> None:
    root = tmp_path / "run" / "checkpoints"
    making.trainer(tmp_path, max_steps=1, save_steps=1).train()
    (root / ".step-000002.12345" / "tokenizer").mkdir(parents=True)
    (root / ".step-000002.12345" / "model.safetensors").write_bytes(b"half of it")
    making.trainer(tmp_path, max_steps=2, save_steps=1).train(resume=True)
    assert sorted(os.listdir(root)) == ["step-000001", "step-000002"]


KILLED_AS_IT_MOVES = """
import os, shutil, signal, sys
from pathlib import Path
from tests.trainers import making

def killed(hook):
    def moved(*args, **how):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return hook(*args, **how)
    return moved

root, further = Path(sys.argv[1]), sys.argv[2]
trainer = making.trainer(root, max_steps=1)
trainer.save_model(root / "untrained")
trainer.train()
trainer.save_model(root / "trained")
for folder in (root / "untrained", root / "trained"):
    (folder / further).parent.mkdir(exist_ok=True)
    (folder / further).write_text("mine")
for n in range(30):
    left = n
    shutil.copytree(root / "untrained", root / f"{n}" / "model")
    if not (pid := os.fork()):
        for name in ("replace", "rename", "unlink", "link", "rmdir"):
            setattr(os, name, killed(getattr(os, name)))
        trainer.save_model(root / f"{n}" / "model")
        os._exit(0)
    if not os.waitpid(pid, 0)[1]:
        break
print(n)
"""


def test_a_kill_while_the_files_of_a_model_are_replaced_leaves_no_mix_that_can_be_loaded(tmp_path: Path) -> None:
    """A folder in the folder: these cannot be exchanged in one step."""
    kills = kills_while_replacing(tmp_path, "notes/mine.txt")
    untrained = contents(tmp_path / "untrained")
    assert kills >= len(untrained)
    was_mixed = False
    for n in range(kills):
        folder = tmp_path / f"{n}" / "model"
        if contents(folder) in (untrained, contents(tmp_path / "trained")):
            continue
        was_mixed = True
        with pytest.raises(ValueError, match=r"has no config\.json: .* saving one was interrupted"):
            vf.get_model(folder)
        with pytest.raises((OSError, ValueError), match=r"config\.json"):
            AutoModelForCausalLM.from_pretrained(folder)
    assert was_mixed
    vf.get_model(tmp_path / f"{kills}" / "model")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(one.relative_to(folder)): one.read_bytes() for one in folder.rglob("*") if one.is_file()}


def kills_while_replacing(root: Path, further: str) -> int:
    """How many times saving a model over another one was killed, each time one operation later."""
    done = in_a_process(KILLED_AS_IT_MOVES, str(root), further)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux exchanges two folders in one step")
def test_a_kill_while_a_model_is_replaced_leaves_the_old_or_the_new_one_whole(tmp_path: Path) -> None:
    kills = kills_while_replacing(tmp_path, "mine.txt")
    untrained, trained = contents(tmp_path / "untrained"), contents(tmp_path / "trained")
    found = [contents(tmp_path / f"{n}" / "model") for n in range(kills + 1)]
    assert found[0] == untrained != trained == found[-1]
    assert all(one in (untrained, trained) for one in found)


def test_a_model_saved_over_another_replaces_its_weights_and_keeps_what_is_not_of_a_model(tmp_path: Path) -> None:
    trainer, folder = making.trainer(tmp_path, max_steps=1), tmp_path / "model"
    trainer.save_model(folder)
    before = (folder / "model.safetensors").read_bytes()
    (folder / "README.md").write_text("mine")
    (folder / "notes").mkdir()
    (folder / "notes" / "one.txt").write_text("first")
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"a shard of another")
    (tmp_path / "link").symlink_to(folder)
    trainer.train()
    trainer.save_model(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (folder / "model.safetensors").read_bytes() != before
    assert ((folder / "README.md").read_text(), (folder / "notes" / "one.txt").read_text()) == ("mine", "first")
    assert not list(folder.glob("model-*"))
    assert sorted(one.name for one in tmp_path.iterdir() if one.name.startswith(".")) == []


def test_adapters_replace_a_model_in_a_folder_and_keep_the_configuration_of_something_else(tmp_path: Path) -> None:
    trainer = making.trainer(tmp_path, peft_config=vf.lora_defaults(r=4))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("of my experiment")
    making.trainer(tmp_path).save_model(tmp_path / "model")
    for _ in range(2):
        trainer.save_model(tmp_path / "mine")
        trainer.save_model(tmp_path / "model")
    assert (tmp_path / "mine" / "config.json").read_text() == "of my experiment"
    names = {one.name for one in (tmp_path / "model").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} < names
    assert not {"config.json", "model.safetensors"} & names


def test_adapters_saved_where_the_model_is_that_they_adapt_leave_it_there(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    making.trainer(tmp_path).save_model(folder)
    (folder / "README.md").write_text("mine")
    base = (folder / "model.safetensors").read_bytes()
    trainer = making.trainer(tmp_path, model=str(folder), peft_config=vf.lora_defaults(r=4))
    trainer.train()
    for _ in range(2):
        trainer.save_model(folder)
    assert (folder / "model.safetensors").read_bytes() == base
    assert (folder / "README.md").read_text() == "mine"
    tokens = torch.arange(5)[None]
    torch.testing.assert_close(vf.get_model(folder)(tokens).logits, trainer.model.eval()(tokens).logits)


def test_adapters_that_were_saved_are_trained_further(tmp_path: Path) -> None:
    making.trainer(tmp_path).save_model(tmp_path / "model")
    first = making.trainer(tmp_path, model=str(tmp_path / "model"), peft_config=vf.lora_defaults(r=4))
    first.save_model(tmp_path / "adapters")
    trainer = making.trainer(tmp_path, model=str(tmp_path / "adapters"), kl_coef=0.1)
    assert {"lora_" in name for name in trainer.weights.names} == {True}
    report = trainer.train()
    assert report.steps[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    trainer.save_model(tmp_path / "further")
    tokens = torch.arange(5)[None]
    further, before = (vf.get_model(tmp_path / name)(tokens).logits for name in ("further", "adapters"))
    torch.testing.assert_close(further, trainer.model.eval()(tokens).logits)
    assert not torch.equal(further, before)


def test_what_is_exported_holds_nothing_of_a_training(tmp_path: Path) -> None:
    making.trainer(tmp_path, steps_per_generation=2, max_steps=1, save_steps=1, kl_coef=0.1).train()
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000001"
    making.trainer(tmp_path).save_model(tmp_path / "model")
    export_checkpoint(checkpoint, tmp_path / "exported")
    names = [{one.name for one in (tmp_path / folder).iterdir()} for folder in ("exported", "model")]
    assert names[0] == names[1]


def test_a_model_is_saved_into_the_current_folder_which_stays_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, folder = making.trainer(tmp_path), tmp_path / "model"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with open("training.log", "w", buffering=1) as log:
        trainer.save_model(".")
        log.write("saved")
    assert Path.cwd() == folder
    assert (folder / "training.log").read_text() == "saved"
    assert Path("model.safetensors").is_file()


def test_files_of_others_need_no_hard_links_to_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Network folders and sticks have none."""

    def refused(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    trainer, folder = making.trainer(tmp_path), tmp_path / "model"
    folder.mkdir()
    (folder / "README.md").write_text("mine")
    monkeypatch.setattr(os, "link", refused)
    trainer.save_model(folder)
    assert (folder / "README.md").read_text() == "mine"
    assert (folder / "model.safetensors").is_file()


def test_a_file_is_not_replaced_by_a_model(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("mine")
    with pytest.raises(CheckpointError, match="this model was not saved: Not a directory"):
        making.trainer(tmp_path).save_model(tmp_path / "model")
    assert (tmp_path / "model").read_text() == "mine"
    assert [one.name for one in tmp_path.iterdir() if one.name.startswith(".")] == []


TRAIN_INTO = """
import subprocess, sys
from pathlib import Path
from tests.trainers import making

folder = Path(sys.argv[1]) / "run"
folder.mkdir()
subprocess.run(["mount", "-t", "tmpfs", "none", str(folder)], check=True)
(folder / "lost+found").mkdir()
trainer = making.trainer(folder.parent, max_steps=1, save_steps=1)
trainer.train()
print(sorted(path.name for path in folder.iterdir()))
"""


@needs_mounts
def test_an_empty_mount_point_is_an_output_dir_like_any_other(tmp_path: Path) -> None:
    """It is empty, and can be neither removed nor renamed."""
    done = in_a_process(TRAIN_INTO, str(tmp_path), "mounted")
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in ("checkpoints", "lost+found", "metadata.json", "results.jsonl"))


def as_shards(checkpoint: Path) -> Path:
    """Turn a checkpoint of one process into one that several have written; the file that holds their parts."""
    tensors = torch.load(checkpoint / "trainer.pt", weights_only=True)
    parts = {f"weights.{name}": one for name, one in zip(tensors["names"], tensors.pop("masters"), strict=True)}
    torch.save(tensors, checkpoint / "trainer.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch, about its own functions
        dcp.save(parts, checkpoint_id=checkpoint / FOLDER, no_dist=True)
    (found,) = (checkpoint / FOLDER).glob("*.distcp")
    return found


@pytest.mark.parametrize("which", ["trainer.json", "trainer.pt", "parts", ".metadata"])
def test_a_checkpoint_that_was_cut_short_is_one_sentence_and_an_earlier_one_goes_on(tmp_path: Path, which: str) -> None:
    making.trainer(tmp_path, max_steps=2, save_steps=1).train()
    folder = tmp_path / "run" / "checkpoints"
    checkpoint = folder / "step-000002"
    if which in ("parts", ".metadata"):
        parts = as_shards(checkpoint)
        damaged = parts if which == "parts" else parts.with_name(which)
    else:
        damaged = checkpoint / which
    os.truncate(damaged, 100)
    with pytest.raises(
        ValueError, match=r"step-000002 is damaged and cannot be read \(.*resume from an earlier"
    ) as caught:
        making.trainer(tmp_path, max_steps=3).train(resume=True)
    assert "\n" not in str(caught.value)
    if which in ("parts", ".metadata"):
        with pytest.raises(ValueError, match="step-000002 is damaged"):
            export_checkpoint(checkpoint, tmp_path / "exported")
    report = making.trainer(tmp_path, max_steps=3).train(resume=str(folder / "step-000001"))
    assert [step["step"] for step in report.steps] == [1, 2, 3]


@pytest.mark.parametrize("text", ["{}", "[]", '{"step": "second", "cursor": 0, "python_rng": [3, [], null]}'])
def test_a_checkpoint_whose_state_is_another_one_is_damaged_and_its_weights_are_not_taken(
    tmp_path: Path, text: str
) -> None:
    making.trainer(tmp_path, max_steps=2, save_steps=2).train()
    (tmp_path / "run" / "checkpoints" / "step-000002" / "trainer.json").write_text(text)
    trainer = making.trainer(tmp_path, max_steps=3)
    before = trainer.model.lm_head.weight.clone()
    with pytest.raises(ValueError, match="step-000002 is damaged and cannot be read"):
        trainer.train(resume=True)
    assert torch.equal(trainer.model.lm_head.weight, before)


def test_what_is_left_of_a_generation_can_be_sent_whatever_an_environment_keeps_in_its_states(tmp_path: Path) -> None:
    class Keeping(vf.SingleTurnEnv):
        async def setup_state(self, state: vf.State) -> None:
            state["lock"], state["rule"], state["seen"] = threading.Lock(), lambda text: text, {1}

    class Sending:
        def on_step_end(self, trainer: Any, metrics: Any) -> None:
            sent.append(pickle.loads(pickle.dumps(trainer.unlearned())))

    sent: list[Any] = []
    env = Keeping(dataset=making.environment().dataset, rubric=vf.Rubric([making.share_of_e]))
    making.trainer(tmp_path, env=env, steps_per_generation=2, max_steps=2, callbacks=[Sending()]).train()
    assert [None if parts is None else len(parts[0]) for parts in sent] == [1, None]
    assert sent[0][0][0]["states"][0]["seen"] == [1]
