"""Every way to name a model gives it with its tokenizer, and every way to go wrong is one sentence."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.engine import tiny  # noqa: E402
from tests.engine.support import gguf_files as files  # noqa: E402
from verifiers.engine.files import models, weights  # noqa: E402
from verifiers.engine.files.smollm2 import PullError  # noqa: E402
from verifiers.engine.local_model import LocalModel  # noqa: E402

SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 320}
LLAMA_LIKE = SMALL | {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA_LIKE,
    "mistral": LLAMA_LIKE,
    "qwen2": LLAMA_LIKE,
    "qwen3": LLAMA_LIKE,
    "smollm3": LLAMA_LIKE | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "gemma": LLAMA_LIKE,
    "gemma2": LLAMA_LIKE,
    "gemma3_text": LLAMA_LIKE,
    "gpt_neox": SMALL | {"intermediate_size": 64},
    "gpt2": {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 320, "n_positions": 64},
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def random_model(kind: str = "llama", **options: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(FAMILIES[kind] | options))).eval()


def saved(folder: Path, kind: str = "llama", template: str | None = tiny.CHATML) -> Path:
    random_model(kind).save_pretrained(folder)
    tiny.tokenizer(template).save_pretrained(folder)
    return folder


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(torch.arange(3, 20)[None]).logits


# --- what works -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_folder_of_every_family_loads_exactly(kind: str, tmp_path: Path) -> None:
    model, tokenizer = models.load(str(saved(tmp_path, kind)), device="cpu", dtype="float32")
    assert torch.equal(logits(model), logits(random_model(kind)))
    assert not model.training
    assert tokenizer.decode(tokenizer("the answer")["input_ids"]) == "the answer"


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_a_gguf_loads_as_a_model_that_trains_and_saves(kind: str, tmp_path: Path) -> None:
    original = files.tiny_model(kind)
    path = files.write_model(tmp_path / "m.gguf", original)
    model, tokenizer = models.get_model_and_tokenizer(str(path), device="cpu")
    torch.testing.assert_close(logits(model), logits(original), rtol=1e-5, atol=1e-5)
    assert all(parameter.requires_grad for parameter in model.parameters())
    model(torch.arange(9)[None], labels=torch.arange(9)[None]).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    again, same = models.load(tmp_path / "saved", dtype=torch.float32)
    assert torch.equal(logits(again), logits(model))
    assert same("hello 12")["input_ids"] == tokenizer("hello 12")["input_ids"]


def test_a_step_on_a_loaded_model_leaves_its_file_alone(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    before = hashlib.sha256((folder / "model.safetensors").read_bytes()).digest()
    model = models.get_model(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert hashlib.sha256((folder / "model.safetensors").read_bytes()).digest() == before


def test_a_model_to_train_is_float32_on_a_cpu_and_what_was_asked_for_otherwise(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    assert models.get_model(folder, device="cpu").dtype == torch.float32
    assert models.get_model(folder, model_kwargs={"torch_dtype": torch.bfloat16}, device="cpu").dtype == torch.bfloat16
    assert models.get_model(folder, dtype="bf16", attn_implementation="eager").config._attn_implementation == "eager"
    assert models.load(folder, device="cpu")[0].dtype == torch.float32  # to sample from, too: what C takes


def test_a_loaded_model_stays_itself_and_its_tokenizer_is_found(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    model = models.get_model(folder)
    same, tokenizer = models.load(model.train())
    assert same is model
    assert model.training
    assert tokenizer.chat_template == tiny.CHATML
    own = tiny.tokenizer()
    assert models.load(random_model(), own)[1] is own
    assert models.get_model(model) is model
    assert models.get_tokenizer(model)("2 + 2")["input_ids"] == tokenizer("2 + 2")["input_ids"]


def test_an_adapter_on_a_model_is_the_model(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(models.get_model(saved(tmp_path)), peft.LoraConfig(target_modules=["q_proj"]))
    assert models.load(model)[0] is model


def test_a_folder_is_told_from_a_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "owner" / "name")
    assert models.find("owner/name") == Path("owner/name")
    assert models.find("owner/other") == "owner/other"


def test_loading_shows_no_progress_bar(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = saved(tmp_path)
    capfd.readouterr()
    models.load(folder)
    assert capfd.readouterr() == ("", "")


# --- what does not --------------------------------------------------------------------------------------------------


def test_a_folder_that_lacks_something_is_named_with_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty has no config\.json"):
        models.load(tmp_path / "empty")
    random_model().save_pretrained(tmp_path / "mute")
    with pytest.raises(ValueError, match=r"mute has no tokenizer"):
        models.load(tmp_path / "mute")
    weightless = saved(tmp_path / "weightless")
    (weightless / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"weightless' could not be loaded: .*model\.safetensors"):
        models.load(weightless)


def test_a_model_without_a_chat_template_is_loaded_for_those_who_do_not_chat(tmp_path: Path) -> None:
    _, tokenizer = models.load(saved(tmp_path / "plain", template=None))
    assert tokenizer.chat_template is None


def test_weights_that_are_broken_or_not_all_there_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = saved(tmp_path / "torn") / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="torn' could not be loaded"):
        models.load(tmp_path / "torn")
    file.write_bytes(whole)
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"torn is incomplete: it lacks 1 weights of its model, such as .*up_proj"):
        models.load(tmp_path / "torn")


@pytest.mark.parametrize("dtype", ["int8", "bool", "float8_e4m3fn"])
def test_weights_in_few_bits_without_a_word_on_how_to_read_them_are_refused(tmp_path: Path, dtype: str) -> None:
    from safetensors.torch import load_file, save_file

    file, live = saved(tmp_path / "few") / "model.safetensors", random_model()
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**load_file(file), name: load_file(file)[name].to(getattr(torch, dtype))}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=f"few' has '{name}' as .*, without a rule to convert it"):
        models.load(tmp_path / "few")
    before = {key: value.clone() for key, value in live.state_dict().items()}
    with pytest.raises(ValueError, match="without a rule to convert it"):
        weights.load_into(live, tmp_path / "few")
    assert all(torch.equal(value, before[key]) for key, value in live.state_dict().items())


@pytest.mark.parametrize(
    "index", ["{", "{}", "[]", '{"weight_map": []}', '{"weight_map": null}', '{"weight_map": {"lm_head.weight": 1}}']
)
def test_an_index_that_is_damaged_is_refused_in_one_sentence_by_name(index: str, tmp_path: Path) -> None:
    folder, live = saved(tmp_path / "sharded"), random_model()
    (folder / "model.safetensors").unlink()
    (folder / weights.INDEX).write_text(index)
    with pytest.raises(ValueError, match="sharded' could not be loaded: "):
        models.load(folder)
    with pytest.raises(ValueError, match=f"{weights.INDEX}' is not an index of safetensors files: "):
        weights.load_into(live, folder)


def test_a_tokenizers_configuration_that_is_damaged_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (saved(tmp_path / "odd") / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"the tokenizer .*odd' could not be loaded: AttributeError: 'list' object"):
        models.load(tmp_path / "odd")


@pytest.mark.parametrize("name", ["._model.safetensors", "consolidated.safetensors", weights.INDEX])
def test_files_beside_those_of_a_model_are_not_read(name: str, tmp_path: Path) -> None:
    folder, model = saved(tmp_path), random_model()
    (folder / name).write_text('{"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}')
    assert torch.equal(models.get_model(folder).lm_head.weight, model.lm_head.weight)
    weights.load_into(model, folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    (folder / weights.INDEX).unlink(missing_ok=True)
    assert torch.equal(models.get_model(folder).lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"quantization_config": {"quant_method": "of-tomorrow"}}, "quantised by 'of-tomorrow', which this release"),
        ({"intermediate_size": 40}, r"has 'model.layers.0.mlp.down_proj.weight' with shape .* its config.json"),
        ({"hidden_act": "of-tomorrow"}, "no model can be built from its configuration: KeyError: 'of-tomorrow'"),
        ({"rms_norm_eps": "much"}, "could not be loaded: .*'rms_norm_eps' expected float"),
        ({"num_attention_heads": 0}, "could not be loaded: ZeroDivisionError"),
        ({"quantization_config": 5}, "could not be loaded: AttributeError"),
    ],
)
def test_a_configuration_that_is_not_that_of_the_weights_is_named(tmp_path: Path, changed: Any, said: str) -> None:
    config = saved(tmp_path / "other") / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changed}))
    with pytest.raises(ValueError, match=said):
        LocalModel(tmp_path / "other").load()


def test_weights_that_a_model_has_no_place_for_are_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = saved(tmp_path / "short") / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_hidden_layers": 1}))
    models.load(tmp_path / "short")
    assert "weights that its model does not use, such as 'model.layers.1." in caplog.text


@pytest.mark.parametrize("kind", ["bert", "t5", "roberta", "vit"])
def test_a_model_that_does_not_write_is_refused_before_its_weights_are_read(kind: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"a {kind} model, which does not generate text"):
        models.load(tmp_path)


def test_a_model_type_from_the_future_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama99"}))
    with pytest.raises(ValueError, match=r"could not be loaded: .*llama99"):
        models.load(tmp_path)


@pytest.mark.parametrize("name", ["./nowhere", "/no/such", "~/no-such-model", "a/b/c", "missing.gguf", Path("nowhere")])
def test_a_path_that_leads_nowhere_is_not_looked_up_on_the_hub(name: Any) -> None:
    with pytest.raises(FileNotFoundError, match="there is no model at"):
        models.load(name)


@pytest.mark.timeout(20)
def test_a_hub_name_that_cannot_be_had_is_told_quickly() -> None:
    with pytest.raises(ValueError, match=r"the model 'owner/nothing' .* Hugging Face cannot be reached"):
        models.load("owner/nothing")


def test_what_is_no_model_at_all_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ValueError, match="is a file"):
        models.load(tmp_path / "notes.txt")
    for nothing in (None, 7, ""):
        with pytest.raises(TypeError, match="a model must be a name"):
            models.load(nothing)
    with pytest.raises(ValueError, match="Linear has no configuration"):
        models.load(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="pass its tokenizer"):
        models.load(random_model())


def test_options_that_cannot_be_honoured_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    with pytest.raises(ValueError, match="no dtype 'int8'"):
        models.load(folder, dtype="int8")
    with pytest.raises(ValueError, match="no device 'tpu9'"):
        models.load(folder, device="tpu9")
    with pytest.raises(ValueError, match="already loaded"):
        models.load(random_model(), tiny.tokenizer(), dtype="float32")
    with pytest.warns(UserWarning, match="use_liger has no effect"):
        models.get_model(folder, use_liger=True)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="no GPU"):
            models.load(folder, device="cuda")


def test_smollm2_offline_and_not_yet_downloaded_says_how_to_download_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERIFIERS_CACHE", str(tmp_path))
    for name in ("smollm2", "local"):
        with pytest.raises(PullError, match="vf models pull smollm2"):
            models.load(name)


def test_smollm2_is_used_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERIFIERS_CACHE", str(tmp_path))
    saved(tmp_path / "models" / "smollm2")
    assert models.get_tokenizer("local").chat_template == tiny.CHATML


def test_what_will_not_fit_is_refused_before_any_weights_are_read(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"not weights: reading them would be another error")
    from verifiers.engine.local_model import LocalModel
    from verifiers.engine.plan import WillNotFitError

    with pytest.raises(WillNotFitError, match="free"):
        LocalModel(str(folder), rows=10**9).load()
