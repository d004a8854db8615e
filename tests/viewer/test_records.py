"""Turns with their tokens: ids and logprobs as saved, and the text of each where a tokenizer is at hand."""

from __future__ import annotations

import pytest

from tests.viewer import making
from verifiers.viewer.library import run_id_of


def test_tokens_have_their_logprobs_and_their_text(ask, root):
    pytest.importorskip("tokenizers")
    path = making.tool_run(root)
    first, second = ask(f"runs/{run_id_of(path)}/rollouts/0")["rollout"]["turns"]
    assert len(second["ids"]) == len(second["logprobs"]) == len(second["pieces"])
    assert "".join(second["pieces"]) == making.ANSWER
    assert first["prompt_tokens"] == 10


def test_without_a_tokenizer_the_ids_are_there(ask, root):
    path = making.tool_run(root)
    (path / "checkpoints" / "step-000001" / "tokenizer.json").unlink()
    turn = ask(f"runs/{run_id_of(path)}/rollouts/0")["rollout"]["turns"][0]
    assert turn["pieces"] is None
    assert turn["ids"]


def test_a_broken_tokenizer_costs_the_text_and_not_the_page(ask, root):
    path = making.tool_run(root)
    (path / "checkpoints" / "step-000001" / "tokenizer.json").write_text("{")
    assert ask(f"runs/{run_id_of(path)}/rollouts/0")["rollout"]["turns"][0]["pieces"] is None


def test_a_run_without_its_trajectory_has_no_turns(ask, make_run, make_record):
    run = make_run(make_record())
    assert ask.run(run, "/rollouts/0")["rollout"]["turns"] == []
