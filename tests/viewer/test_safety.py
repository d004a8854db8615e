"""Who may ask the viewer, and for what: its own pages, on this machine, for the runs it was pointed at."""

from __future__ import annotations

import re

import pytest

from verifiers.viewer import assets
from verifiers.viewer.library import run_id_of
from verifiers.viewer.server import is_own_host


@pytest.mark.parametrize(
    ("host", "bound", "is_own"),
    [
        ("127.0.0.1:8000", "127.0.0.1", True),
        ("localhost:8000", "127.0.0.1", True),
        ("[::1]:8000", "127.0.0.1", True),
        ("evil.example:8000", "127.0.0.1", False),
        ("127.0.0.1.evil.example", "127.0.0.1", False),
        ("localhost.evil.example", "127.0.0.1", False),
        ("192.168.0.7:8000", "127.0.0.1", False),
        ("192.168.0.7:8000", "0.0.0.0", True),
        ("evil.example", "0.0.0.0", False),
        ("viewer.lan:80", "viewer.lan", True),
        ("", "127.0.0.1", False),
        ("[", "127.0.0.1", False),
        ("user@127.0.0.1", "127.0.0.1", True),
    ],
)
def test_only_names_of_this_machine_are_answered(host, bound, is_own):
    assert is_own_host(host, bound) is is_own


def test_a_name_that_was_rebound_to_this_machine_gets_nothing(ask):
    for path in ("/", "/api/runs", "/static/app.js"):
        status, _, body = ask.raw(path, headers={"Host": f"evil.example:{ask.server.port}"})
        assert (status, b"can only be used at the URL" in body) == (403, True)


def test_a_page_of_another_site_gets_nothing(ask):
    for site in ("cross-site", "same-site"):
        assert ask.raw("/api/runs", headers={"Sec-Fetch-Site": site})[0] == 403
    assert ask.raw("/api/runs", headers={"Sec-Fetch-Site": "same-origin"})[0] == 200
    assert ask.raw("/", headers={"Sec-Fetch-Site": "cross-site"})[0] == 200, "a link to the first page is harmless"


def test_every_answer_forbids_scripts_of_others_sniffing_framing_and_storing(ask, make_run, make_record):
    make_run(make_record())
    for path in ("/", "/api/runs", "/api/runs/nope", "/static/app.js", "/static/nope", "/nope"):
        headers = ask.raw(path)[1]
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "unsafe" not in policy
        assert "require-trusted-types-for 'script'" in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert headers["Cache-Control"] == "no-store"
        assert "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_there_is_nothing_to_send_to_it(ask, method):
    assert ask.raw("/api/runs", method=method)[0] == 405


@pytest.mark.parametrize(
    "path",
    [
        "/static/../server.py",
        "/static/..%2fserver.py",
        "/static/%2e%2e/server.py",
        "/static//etc/passwd",
        "/static/..\\server.py",
        "/../../etc/passwd",
        "/api/runs/..%2f..%2f..",
        "/api/runs/%2fetc",
        "/api/runs/../../etc/passwd",
        "/api/compare/..%2f/..%2f",
    ],
)
def test_no_path_leads_out(ask, path):
    status, _, body = ask.raw(path)
    assert status in (403, 404)
    assert b"root:" not in body
    assert b"import" not in body


def test_a_run_is_known_by_an_id_and_only_under_the_roots(ask, make_run, make_record, tmp_path, root):
    run = make_run(make_record())
    outside = tmp_path / "elsewhere" / "sums--m" / "secret"
    outside.parent.mkdir(parents=True)
    run.path.rename(outside)
    assert "no such run" in ask(f"runs/{run_id_of(outside)}", code=404)["problem"]


# --- the pages themselves -------------------------------------------------------------------------------------------


def test_no_script_of_ours_can_turn_text_into_markup_or_code():
    unsafe = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|"
        r"createContextualFragment|srcdoc|\.setAttribute\(\"on|XMLHttpRequest|WebSocket|https?://(?!www\.w3\.org/)"
    )
    found = [
        f"{path.name}: {match[0]}"
        for path in assets.FOLDER.iterdir()
        for match in unsafe.finditer(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_every_module_is_in_the_one_script_after_those_it_imports():
    assert {path.name for path in assets.FOLDER.glob("*.js")} == set(assets.MODULES)
    texts = {name: (assets.FOLDER / name).read_text(encoding="utf-8") for name in assets.MODULES}
    for name, text in texts.items():
        for names, other in re.findall(r'^import \{([^}]*)\} from "\./([\w.]+)";', text, flags=re.MULTILINE):
            assert assets.MODULES.index(other) < assets.MODULES.index(name)
            for imported in re.findall(r"\w+", names):
                assert re.search(rf"^export (async )?(function|const|class) {imported}\b", texts[other], re.MULTILINE)
                assert len(re.findall(rf"\b{imported}\b", text)) > 1, f"{name} does not use {imported}"


def test_names_at_the_top_of_modules_are_all_different_so_that_one_script_can_hold_them():
    script = assets.one_script()
    names = re.findall(r"^(?:async )?(?:function|const|let|class) (\w+)", script, flags=re.MULTILINE)
    assert sorted(names) == sorted(set(names))
    assert not re.search(r"^(import|export) ", script, flags=re.MULTILINE)
    assert "</script" not in script
    assert "</style" not in assets.style()
