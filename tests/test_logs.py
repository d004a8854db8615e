"""Log lines and samples of rollouts in a terminal: shown on request, and never obeyed as control characters."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

import verifiers as vf
from verifiers.logs import printable


@pytest.fixture(autouse=True)
def _restore_logger() -> Iterator[None]:
    logger = logging.getLogger("verifiers")
    handlers, level = list(logger.handlers), logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


def test_importing_and_building_configures_no_logging() -> None:
    vf.SingleTurnEnv(dataset=[{"question": "x"}])
    assert logging.getLogger("verifiers").handlers == []


def test_setting_up_twice_logs_once_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    vf.setup_logging("INFO")
    vf.setup_logging("debug", log_format="%(levelname)s:%(message)s")
    logging.getLogger("verifiers.envs").debug("hello %d", 3)
    out, err = capsys.readouterr()
    assert (out, err) == ("", "DEBUG:hello 3\n")


def test_a_handler_of_the_users_own_is_left_alone() -> None:
    logger = logging.getLogger("verifiers")
    mine = logging.NullHandler()
    logger.addHandler(mine)
    vf.setup_logging(logging.WARNING)
    assert mine in logger.handlers
    assert logger.level == logging.WARNING


@given(st.text())
def test_printable_text_has_no_control_characters_but_newline_and_tab(text: str) -> None:
    shown = printable(text)
    assert all(ord(c) >= 32 or c in "\n\t" for c in shown)
    assert "\x7f" not in shown
    assert "\x9b" not in shown


def test_text_that_would_reorder_a_line_is_shown_as_what_it_is() -> None:
    for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A)):
        assert printable(f"reward {chr(code)}0.1") == f"reward \\u{code:04x}0.1"


def test_a_sample_shows_prompt_reply_and_reward_and_obeys_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    prompts = [[{"role": "user", "content": "2+2?"}], "plain [red]text[/red]"]
    completions = [[{"role": "assistant", "content": "four \x1b[2J"}], "c"]
    vf.print_prompt_completions_sample(prompts, completions, [1.0, None], step=7, num_samples=2)
    out = capsys.readouterr().out
    assert "\x1b[2J" not in out
    assert "step 7" in out
    assert "four" in out
    assert "1.000" in out
    assert "[red]text[/red]" in out


def test_the_classic_order_of_arguments_works_too(capsys: pytest.CaptureFixture[str]) -> None:
    vf.print_prompt_completions_sample(["p", "q"], ["c", "d"], [None, vf.ServerError("down")], [0.5, 0.0], 3, 2)
    out = capsys.readouterr().out
    assert "0.500" in out
    assert "failed: down" in out
    assert "step 3" in out


def test_images_are_shown_as_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    parts = [{"type": "text", "text": "what is"}, {"type": "image_url", "image_url": {"url": "data:AAAA"}}]
    vf.print_prompt_completions_sample([[{"role": "user", "content": parts}]], ["a cat"], [1.0])
    out = capsys.readouterr().out
    assert "[image]" in out
    assert "AAAA" not in out
