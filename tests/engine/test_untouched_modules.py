"""A model that PyTorch runs, its layers replaced while it samples: afterwards its modules are as they were."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.engine.support.exact import assert_exact, prompt_of, random_model  # noqa: E402
from verifiers.engine.engine import Engine  # noqa: E402
from verifiers.engine.sequence import Sampling  # noqa: E402

WAY = Sampling(max_tokens=30, seed=1)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def model() -> Any:
    return random_model("Gemma", attention_bias=True)  # not one that is run in C


@pytest.fixture
def engine(model: Any) -> Iterator[Engine]:
    made = Engine(model, rows=4, length=128)
    yield made
    made.close()


def test_the_module_is_untouched_afterwards(model: Any, engine: Engine) -> None:
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    state = copy.deepcopy(model.state_dict())
    engine.generate([prompt_of(5)], WAY)
    for name, module in model.named_modules():
        assert vars(module).keys() == before[name].keys(), name
        assert "forward" not in vars(module)
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(type(parameter) is torch.nn.Parameter for parameter in model.parameters())


def test_the_module_can_still_be_copied_saved_and_trained(model: Any, engine: Engine) -> None:
    engine.generate([prompt_of(5)], WAY)
    twin = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    ids = torch.tensor([prompt_of(12)])
    with torch.no_grad():
        assert torch.equal(twin(input_ids=ids).logits, loaded(input_ids=ids).logits)
    model(input_ids=ids, labels=ids).loss.backward()
    twin(input_ids=ids, labels=ids).loss.backward()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert one.grad is not None
        assert torch.equal(one.grad, other.grad)


def test_a_forward_put_there_by_someone_else_is_called_and_stays(model: Any, engine: Engine) -> None:
    layer = model.model.layers[0].mlp.up_proj
    calls = []
    own = layer.forward

    def hooked(x: Any) -> Any:  # as accelerate's hooks do it
        calls.append(x.shape)
        return own(x)

    layer.forward = hooked
    engine.generate([prompt_of(5)], WAY)
    assert len(calls) >= 29
    assert vars(layer)["forward"] is hooked


def test_an_optimizer_step_is_sampled_from_at_once(model: Any, engine: Engine) -> None:
    engine.generate([prompt_of(20)], WAY)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    ids = torch.tensor([prompt_of(20)])
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    answer = engine.generate([prompt_of(20)], WAY)[0]
    assert answer.reused == 0
    assert_exact(model, answer, WAY)


def test_a_forward_that_raises_leaves_the_module_untouched(model: Any, engine: Engine) -> None:
    engine.generate([prompt_of(5)], WAY)
    handle = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.generate([prompt_of(5)], WAY)
    handle.remove()
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]
