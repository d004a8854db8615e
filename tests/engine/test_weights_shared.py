"""The engine samples from the very weights that are trained: after an update, the next token is from the new ones."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.engine.support.exact import assert_exact, logits_of, prompt_of, random_model  # noqa: E402
from tests.engine.tiny import tokenizer  # noqa: E402
from verifiers.engine.local_model import LocalModel  # noqa: E402
from verifiers.engine.sequence import Sampling  # noqa: E402
from verifiers.kernels.cpu import threads as cpu_threads  # noqa: E402

WAY = Sampling(max_tokens=20, seed=1)
PROMPT = prompt_of(40)


@pytest.fixture(autouse=True, params=["plain", "laid out later"])
def one_thread(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(cpu_threads, "PARAMETERS_PER_THREAD", 1 if request.param == "laid out later" else 1 << 60)


def train(model: Any, lr: float = 0.3, **how: Any) -> None:
    """One step towards a text."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=lr, **how)
    ids = torch.tensor([prompt_of(30, seed=8)])
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def differ(model: Any, other: Any) -> bool:
    ids = prompt_of(5)
    return not torch.allclose(logits_of(model, PROMPT, ids), logits_of(other, PROMPT, ids), atol=1e-2)


def change(model: Any) -> None:
    train(model)


def change_in_one(model: Any) -> None:
    train(model, fused=True)


def change_each(model: Any) -> None:
    train(model, foreach=False)


def replace_data(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data + torch.randn_like(parameter) * 0.1


def replace_parameters(model: Any) -> None:
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                setattr(module, name, torch.nn.Parameter(parameter.detach() + 0.1 * torch.randn_like(parameter)))


def load_others(model: Any) -> None:
    model.load_state_dict(random_model(seed=5).state_dict())


def write_in_place(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)


CHANGES = [change, change_in_one, change_each, replace_data, replace_parameters, load_others, write_in_place]


@pytest.mark.parametrize("update", CHANGES, ids=lambda update: update.__name__)
def test_after_an_update_the_next_token_comes_from_the_new_weights(start: Any, update: Callable[[Any], None]) -> None:
    model = random_model()
    engine = start(model)
    first = engine.generate([PROMPT], WAY)[0]
    assert engine.generate([PROMPT], WAY)[0].reused == 39
    old = copy.deepcopy(model)
    update(model)
    assert differ(model, old)
    second = engine.generate([PROMPT], WAY)[0]
    assert second.reused == 0  # the keys it could have reused are those of the old weights
    assert second.weights[0] > first.weights[0]
    assert_exact(model, second, WAY)
    assert engine.generate([PROMPT], WAY)[0].reused == 39


def test_an_update_in_the_middle_of_a_reply_shows_in_its_weights_and_leaves_no_keys_behind(start: Any) -> None:
    model = random_model()
    engine = start(model)
    has_changed = False
    while not has_changed:  # a reply may end before this thread has its turn: then the next one is changed
        future, drawn = engine.submit(PROMPT, Sampling(max_tokens=110, seed=1))[0], engine.tokens
        while engine.tokens < drawn + 10 and not future.done():
            time.sleep(0.0005)
        with engine.lock:
            if not future.done():
                write_in_place(model)
                has_changed = True
    answer = future.result(20)
    assert answer.weights[1] == answer.weights[0] + 1
    after = engine.generate([PROMPT], WAY)[0]
    assert after.reused == 0
    assert_exact(model, after, WAY)


def test_weights_written_to_without_the_lock_are_noticed_before_a_prompt_reuses_any_keys(start: Any) -> None:
    model = random_model()
    engine, answers = start(model), list[Any]()

    def change(token: int, logprob: float) -> bool:
        if not answers:
            write_in_place(model)
            answers.append(engine.submit(PROMPT, WAY)[0])
        return answers[0].done()

    engine.generate([PROMPT], WAY)
    engine.submit([5, 6, 7], Sampling(max_tokens=110, seed=1), on_token=change)[0].result(60)
    assert answers[0].result(60).reused == 0
    assert_exact(model, answers[0].result(), WAY)


def test_forget_covers_what_no_version_counter_shows(start: Any) -> None:
    model = random_model()
    engine = start(model)
    engine.generate([PROMPT], WAY)
    with engine.lock:
        for parameter in model.parameters():
            parameter.data.mul_(1.3)  # `.data` has a counter of its own
        engine.forget()
    answer = engine.generate([PROMPT], WAY)[0]
    assert answer.reused == 0
    assert_exact(model, answer, WAY)


def test_training_goes_on_as_if_nothing_had_been_sampled(start: Any) -> None:
    model, twin = random_model(), random_model()
    engine = start(model)
    for step in range(3):
        engine.generate([PROMPT], Sampling(max_tokens=12, seed=step), n=3)
        for one in (model, twin):
            one.train()
            train(one, lr=0.01)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
        assert model.training


# --- adapters -------------------------------------------------------------------------------------------------------


@pytest.fixture
def adapted() -> Any:
    peft = pytest.importorskip("peft")
    targets = ["q_proj", "v_proj", "up_proj"]
    config = peft.LoraConfig(r=4, target_modules=targets, lora_dropout=0.3, init_lora_weights=False)
    return peft.get_peft_model(random_model(), config).eval()


def test_adapters_are_honoured_and_trained(start: Any, adapted: Any) -> None:
    engine = start(adapted)
    base = random_model()
    for _ in range(3):
        answer = engine.generate([PROMPT], WAY)[0]
        assert answer.reused == 0
        assert_exact(adapted, answer, WAY)
        assert differ(adapted, base)
        train(adapted, lr=0.05)


def test_adapters_that_are_switched_off_are_not_heard_and_their_keys_are_dropped(start: Any, adapted: Any) -> None:
    engine = start(adapted)
    with_them = engine.generate([PROMPT], WAY)[0]
    with adapted.disable_adapter():
        without = engine.generate([PROMPT], WAY)[0]
        assert without.reused == 0
        assert_exact(random_model(), without, WAY)
    again = engine.generate([PROMPT], WAY)[0]
    assert again.reused == 0
    assert again.ids == with_them.ids
    assert_exact(adapted, again, WAY)


def test_keys_of_adapters_that_counted_more_or_less_are_dropped(start: Any, adapted: Any) -> None:
    """Scaling changes no tensor: it is a number of the layer's own."""
    engine = start(adapted)
    engine.generate([PROMPT], WAY)
    layers = [one for one in adapted.modules() if hasattr(one, "scale_layer")]
    for scaled in (layers, layers[-1:]):  # all of them, then one far from the first
        for one in scaled:
            one.scale_layer(5.0)
        answer = engine.generate([PROMPT], WAY)[0]
        assert answer.reused == 0
        assert_exact(adapted, answer, WAY)
    assert engine.generate([PROMPT], WAY)[0].reused > 0


def test_merged_adapters_give_the_same_tokens(start: Any, adapted: Any) -> None:
    engine = start(adapted)
    apart = engine.generate([PROMPT], WAY)[0]
    adapted.merge_adapter()
    merged = engine.generate([PROMPT], WAY)[0]
    assert merged.reused == 0
    assert_exact(adapted, merged, WAY, within=1e-3)
    adapted.unmerge_adapter()
    assert merged.ids == apart.ids
    assert engine.generate([PROMPT], WAY)[0].reused == 0


def test_local_model_merges_for_a_while(adapted: Any) -> None:
    with LocalModel(adapted, tokenizer(vocabulary=97), rows=2, name="tiny") as local:
        engine = local.engine
        apart = engine.generate([PROMPT], WAY)[0]
        with local.merge_adapters():
            merged = engine.generate([PROMPT], WAY)[0]
        after = engine.generate([PROMPT], WAY)[0]
    assert apart.ids == merged.ids == after.ids
    assert after.reused == 0
    assert merged.logprobs == pytest.approx(apart.logprobs, abs=1e-3)


def test_adapters_added_to_a_model_that_is_being_sampled_from(start: Any) -> None:
    peft = pytest.importorskip("peft")
    model = random_model()
    engine = start(model)
    engine.generate([PROMPT], WAY)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).eval()
    answer = engine.generate([PROMPT], WAY)[0]
    assert answer.reused == 0
    assert_exact(adapted, answer, WAY)
    train(adapted, lr=0.1)
    answer = engine.generate([PROMPT], WAY)[0]
    assert answer.reused == 0
    assert_exact(adapted, answer, WAY)
