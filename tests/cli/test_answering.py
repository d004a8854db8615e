"""Who answers: the registry first, then the fake, then a model here, then an endpoint; a key goes where it belongs."""

from __future__ import annotations

import sys

import click
import pytest

from verifiers.cli.answering import Wanted, find_model

REGISTRY = """
[[endpoint]]
endpoint_id = "local"
model = "mine"
url = "http://localhost:8000/v1"

[[endpoint]]
endpoint_id = "pair"
model = "mine"
url = "http://localhost:8000/v1"

[[endpoint]]
endpoint_id = "pair"
model = "mine"
url = "http://localhost:8001/v1"

[[endpoint]]
endpoint_id = "hosted"
model = "theirs"
url = "https://api.example.com/v1"
key = "THEIR_KEY"
"""


@pytest.fixture
def registry(folder):
    path = folder / "endpoints.toml"
    path.write_text(REGISTRY)
    return str(path)


def test_a_name_of_the_registry_wins_over_ours(registry):
    found = find_model(Wanted(model="local", endpoints_path=registry))
    assert (found.model, found.where) == ("mine", "at http://localhost:8000/v1")


def test_flags_reach_an_endpoint_of_the_registry(registry, monkeypatch):
    monkeypatch.setenv("OTHER_KEY", "sk-1")
    wanted = Wanted(
        model="hosted", endpoints_path=registry, api_key_var="OTHER_KEY", headers={"X-Title": "a"}, max_retries=1
    )
    client = find_model(wanted).open()
    assert (client.api_key, client.headers, client.max_retries) == ("sk-1", {"X-Title": "a"}, 1)


def test_replicas_are_one_client(registry):
    client = find_model(Wanted(model="pair", endpoints_path=registry)).open()
    assert client.base_url == "http://localhost:8000/v1,http://localhost:8001/v1"


def test_a_key_that_is_not_set_is_named(registry):
    with pytest.raises(click.UsageError, match="THEIR_KEY, which is not set"):
        find_model(Wanted(model="hosted", endpoints_path=registry))


def test_a_url_is_asked_for_whatever_is_named_and_is_not_given_the_key_of_openai(registry, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-openai")
    for model in ("local", "fake", "./folder", "org/name"):
        found = find_model(Wanted(model=model, endpoints_path=registry, api_base_url="https://else.example.com/v1"))
        assert (found.model, found.open().api_key) == (model, None)
    assert find_model(Wanted(model="gpt-5-mini")).open().api_key == "sk-openai"


def test_a_near_miss_is_named():
    with pytest.raises(click.UsageError, match="did you mean -m fake"):
        find_model(Wanted(model="fke"))


def test_org_and_name_is_a_model_here_unless_an_endpoint_is_named(monkeypatch):
    monkeypatch.setenv("OPENAI_BASE_URL", "http://localhost:8000/v1")
    assert find_model(Wanted(model="org/name")).where == "at http://localhost:8000/v1"
    assert find_model(Wanted(model="local")).where == "in this process"


@pytest.mark.parametrize("model", ["local", "smollm2", "org/name", "tiny.gguf", "./tiny"])
def test_a_model_here_without_its_extra_is_one_sentence_with_the_command(model, folder, monkeypatch):
    (folder / "tiny").mkdir()
    (folder / "tiny.gguf").touch()
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(click.ClickException, match=r"pip install 'verifiers\[local\]'"):
        find_model(Wanted(model=model))


def test_a_path_where_nothing_is_is_named():
    with pytest.raises(click.UsageError, match=r"there is no model at \./nothing"):
        find_model(Wanted(model="./nothing"))
