"""Run where Tinker's SDK is installed: our trainer trains a model at a Tinker server, saves it, and resumes."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ["TINKER_API_KEY"] = "tml-local"
os.environ["TINKER_TELEMETRY"] = "0"

import verifiers as vf
from verifiers.integrations.tinker import TinkerServer, TinkerTrainer


def digits(completion: Any) -> float:
    return sum(map(str.isdigit, completion[-1]["content"])) / 4


def main(folder: Path) -> None:
    warnings.simplefilter("error", FutureWarning)  # what a later SDK removes
    model, tokenizer = vf.tiny_model("0123456789abcd", hidden_size=32)
    model.save_pretrained(folder / "tiny")
    tokenizer.save_pretrained(folder / "tiny")
    env = vf.SingleTurnEnv(dataset=[{"question": name, "answer": ""} for name in "abcd"], rubric=vf.Rubric([digits]))
    config: dict[str, Any] = {
        "batch_size": 8,
        "group_size": 4,
        "max_new_tokens": 4,
        "learning_rate": 1e-2,
        "save_steps": 1,
        "steps_per_generation": 2,
        "show_progress": False,
        "output_dir": str(folder / "run"),
    }
    with TinkerServer(str(folder / "tiny"), name="org/tiny", folder=folder / "saved") as server:
        for steps, resume in ((2, False), (3, True)):
            trainer = TinkerTrainer("org/tiny", env, {**config, "max_steps": steps}, base_url=server.url, rank=4)
            report = trainer.train(resume=resume)
        assert [step["step"] for step in report.steps] == [1, 2, 3]
        assert all(step["grad_norm"] > 0 and step["failed"] == 0 for step in report.steps), report.steps
        assert abs(report.steps[0]["ratio_mean"] - 1.0) < 1e-4, report.steps[0]
        trainer.save_model(folder / "model")
    assert '"sampler_path"' in (folder / "model" / "tinker.json").read_text()
    print("training: holds")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
