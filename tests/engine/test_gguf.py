"""GGUF files are read exactly as ggml defines them, and broken ones are refused in words."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from tests.engine.support import gguf_files as files  # noqa: E402
from verifiers.engine.files.gguf import GGUF  # noqa: E402
from verifiers.engine.files.gguf_model import config_of, state_of  # noqa: E402
from verifiers.engine.files.gguf_quants import KINDS  # noqa: E402
from verifiers.engine.files.gguf_tokenizer import tokenizer_of  # noqa: E402

# --- each type, weight by weight, as ggml's C reads it ----------------------------------------------------------------


def half(data: bytes, at: int) -> Any:
    return np.float32(np.frombuffer(data, "<f2", 1, at)[0])


def block_q4_0(b: bytes) -> list[Any]:
    nibbles = [x & 15 for x in b[2:]] + [x >> 4 for x in b[2:]]
    return [np.float32(n - 8) * half(b, 0) for n in nibbles]


def block_q4_1(b: bytes) -> list[Any]:
    nibbles = [x & 15 for x in b[4:]] + [x >> 4 for x in b[4:]]
    return [np.float32(n) * half(b, 0) + half(b, 2) for n in nibbles]


def block_q5_0(b: bytes) -> list[Any]:
    (high,) = struct.unpack_from("<I", b, 2)
    nibbles = [x & 15 for x in b[6:]] + [x >> 4 for x in b[6:]]
    return [np.float32((n | (high >> i & 1) << 4) - 16) * half(b, 0) for i, n in enumerate(nibbles)]


def block_q5_1(b: bytes) -> list[Any]:
    (high,) = struct.unpack_from("<I", b, 4)
    nibbles = [x & 15 for x in b[8:]] + [x >> 4 for x in b[8:]]
    return [np.float32(n | (high >> i & 1) << 4) * half(b, 0) + half(b, 2) for i, n in enumerate(nibbles)]


def block_q8_0(b: bytes) -> list[Any]:
    return [np.float32(q) * half(b, 0) for q in struct.unpack_from("<32b", b, 2)]


def scale_and_minimum(j: int, s: bytes) -> tuple[int, int]:
    if j < 4:
        return s[j] & 63, s[j + 4] & 63
    return (s[j + 4] & 15) | (s[j - 4] >> 6) << 4, (s[j + 4] >> 4) | (s[j] >> 6) << 4


def block_k(b: bytes, q: bytes, high: bytes | None) -> list[Any]:
    out = []
    for j in range(8):
        scale, minimum = scale_and_minimum(j, b[4:16])
        step, offset = half(b, 0) * np.float32(scale), half(b, 2) * np.float32(minimum)
        for i in range(32):
            byte = q[j // 2 * 32 + i]
            n = byte >> 4 if j % 2 else byte & 15
            if high is not None:
                n |= (high[i] >> j & 1) << 4
            out.append(step * np.float32(n) - offset)
    return out


def block_q4_k(b: bytes) -> list[Any]:
    return block_k(b, b[16:], None)


def block_q5_k(b: bytes) -> list[Any]:
    return block_k(b, b[48:], b[16:48])


def block_q6_k(b: bytes) -> list[Any]:
    low, high, scales, d = b[:128], b[128:192], struct.unpack_from("<16b", b, 192), half(b, 208)
    out = [np.float32(0)] * 256
    for part in range(2):
        for i in range(32):
            ql, qh, sc = low[part * 64 :], high[part * 32 + i], scales[part * 8 + i // 16 :]
            quarters = (ql[i] & 15, ql[i + 32] & 15, ql[i] >> 4, ql[i + 32] >> 4)
            for k, n in enumerate(quarters):
                q = (n | (qh >> 2 * k & 3) << 4) - 32
                out[part * 128 + k * 32 + i] = d * np.float32(sc[2 * k]) * np.float32(q)
    return out


QUANTS = {
    2: (18, block_q4_0, (0,)),
    3: (20, block_q4_1, (0, 2)),
    6: (22, block_q5_0, (0,)),
    7: (24, block_q5_1, (0, 2)),
    8: (34, block_q8_0, (0,)),
    12: (144, block_q4_k, (0, 2)),
    13: (176, block_q5_k, (0, 2)),
    14: (210, block_q6_k, (208,)),
}


def random_blocks(number: int, count: int) -> bytes:
    size, _, halves = QUANTS[number]
    draw = np.random.default_rng(number)
    blocks = []
    for _ in range(count):
        block = bytearray(draw.bytes(size))
        for at in halves:
            block[at : at + 2] = np.float16(draw.normal()).tobytes()
        blocks.append(bytes(block))
    return b"".join(blocks)


@pytest.mark.parametrize("number", QUANTS, ids=lambda number: KINDS[number].name)
def test_a_quantised_tensor_is_dequantised_to_the_bit(number: int, tmp_path: Path) -> None:
    size, reference, _ = QUANTS[number]
    per_block = KINDS[number].block
    stored = random_blocks(number, 6)
    path = files.write(tmp_path / "a.gguf", {}, {"w": ((3, 2 * per_block), number, stored)})
    expected = [reference(stored[i : i + size]) for i in range(0, len(stored), size)]
    with GGUF(path) as file:
        assert np.array_equal(file.read("w"), np.array(expected, np.float32).reshape(3, -1))


@pytest.mark.parametrize("number", [0, 1, *QUANTS, 30], ids=lambda number: KINDS[number].name)
def test_the_reference_package_agrees(number: int, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    stored = random_blocks(number, 4) if number in QUANTS else np.random.default_rng(0).bytes(1024)
    shape = (len(stored) // KINDS[number].layout.itemsize * KINDS[number].block,)
    path = files.write(tmp_path / "a.gguf", {}, {"w": (shape, number, stored)})
    theirs = gguf.quants.dequantize(np.frombuffer(stored, np.uint8), gguf.GGMLQuantizationType(number))
    with GGUF(path) as file:
        assert np.array_equal(file.read("w"), theirs.astype(np.float32).reshape(shape), equal_nan=True)


def test_plain_floats_of_all_widths_are_read(tmp_path: Path) -> None:
    exact = np.array([[1.5, -2.0, 0.25], [0.0, 96.0, -0.5]], np.float32)
    tensors = {
        "f32": ((2, 3), 0, exact.tobytes()),
        "f16": ((2, 3), 1, exact.astype("<f2").tobytes()),
        "bf16": ((2, 3), 30, (exact.view(np.uint32) >> 16).astype("<u2").tobytes()),
    }
    with GGUF(files.write(tmp_path / "a.gguf", {}, tensors, version=2)) as file:
        for name in tensors:
            assert np.array_equal(file.read(name), exact), name


def test_metadata_of_every_type_is_read(tmp_path: Path) -> None:
    metadata = {
        "n": 7,
        "big": 1 << 40,
        "x": 0.5,
        "yes": True,
        "s": "grün",
        "words": ["a", ""],
        "ints": [1, -2],
        "i8": struct.pack("<Ib", 1, -3),
        "f64": struct.pack("<Id", 12, 0.1),
        "nested": struct.pack("<IIQ", 9, 9, 1) + struct.pack("<IQ2H", 2, 2, 5, 6),
        "bools": struct.pack("<IIQ2?", 9, 7, 2, True, False),
    }
    with GGUF(files.write(tmp_path / "a.gguf", metadata, {})) as file:
        assert file.metadata == metadata | {"i8": -3, "f64": 0.1, "nested": [[5, 6]], "bools": [True, False]}


# --- files that are not what they should be -------------------------------------------------------------------------

HEAD = b"GGUF" + struct.pack("<I", 3)
W = files.text("w")
BROKEN = {
    "empty": (b"", "not a GGUF"),
    "another format": (b"PK\x03\x04" + bytes(60), "not a GGUF"),
    "a version of the past": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "no counts": (HEAD, "truncated"),
    "more entries than bytes": (HEAD + struct.pack("<QQ", 0, 1 << 62), "it declares"),
    "more tensors than bytes": (HEAD + struct.pack("<QQ", 1 << 62, 0), "it declares"),
    "a key without end": (HEAD + struct.pack("<QQQ", 0, 1, 1 << 63) + bytes(40), "truncated"),
    "an endless array": (
        HEAD + struct.pack("<QQ", 0, 1) + W + struct.pack("<IIQ", 9, 8, 1 << 60) + bytes(40),
        "it declares",
    ),
    "arrays all the way down": (
        HEAD + struct.pack("<QQ", 0, 1) + W + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000,
        "nests arrays",
    ),
    "an unknown type of value": (HEAD + struct.pack("<QQ", 0, 1) + W + struct.pack("<II", 77, 0) + bytes(9), "type 77"),
    "a key twice": (HEAD + struct.pack("<QQ", 0, 2) + 2 * (W + files.value(1)), "twice"),
    "bad utf-8": (HEAD + struct.pack("<QQQ", 0, 1, 2) + b"\xff\xfe" + files.value(1), "UTF-8"),
    "no dimensions": (HEAD + struct.pack("<QQ", 1, 0) + W + struct.pack("<IIQ", 0, 0, 0) + bytes(32), "0 dimensions"),
    "a billion dimensions": (HEAD + struct.pack("<QQ", 1, 0) + W + struct.pack("<IIQ", 1 << 30, 0, 0), "dimensions"),
    "a size that overflows": (
        HEAD + struct.pack("<QQ", 1, 0) + W + struct.pack("<I4QIQ", 4, *[1 << 40] * 4, 0, 0) + bytes(64),
        "truncated",
    ),
    "a place past the end": (
        HEAD + struct.pack("<QQ", 1, 0) + W + struct.pack("<IQIQ", 1, 4, 0, 1 << 62) + bytes(64),
        "truncated",
    ),
    "no weights": (HEAD + struct.pack("<QQ", 1, 0) + W + struct.pack("<IQIQ", 1, 0, 0, 0) + bytes(64), "shape"),
    "half a block": (HEAD + struct.pack("<QQ", 1, 0) + W + struct.pack("<IQIQ", 1, 16, 2, 0) + bytes(64), "of 32"),
    "a type that is not read": (
        HEAD + struct.pack("<QQ", 1, 0) + W + struct.pack("<IQIQ", 1, 256, 10, 0) + bytes(512),
        "Q2_K",
    ),
    "an alignment of nothing": (
        HEAD + struct.pack("<QQ", 0, 1) + files.text("general.alignment") + files.value(0),
        "0",
    ),
    "tensors on top of one another": (
        HEAD
        + struct.pack("<QQ", 9, 0)
        + b"".join(files.text(f"w{i}") + struct.pack("<IQIQ", 1, 512, 0, 0) for i in range(9))
        + bytes(4096),
        "overlap",
    ),
}


@pytest.mark.parametrize("story", BROKEN)
def test_a_broken_file_is_refused_with_its_name(story: str, tmp_path: Path) -> None:
    data, message = BROKEN[story]
    path = tmp_path / "broken.gguf"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message) as caught:
        GGUF(path)
    assert "broken.gguf" in str(caught.value) or "tensor 'w'" in str(caught.value)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "m.gguf"
    return files.write_model(path, files.tiny_model()).read_bytes()


def read_everything(path: Path) -> None:
    with GGUF(path) as file:
        config_of(file)
        state_of(file)
        tokenizer_of(file)


@pytest.mark.timeout(60)
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damage_to_a_file_gives_more_than_a_value_error(data: st.DataObject, whole: bytes, tmp_path: Path) -> None:
    """Bytes are changed where the header is, or the end is cut off."""
    header = whole.index(b"blk.1.ffn_down") + 200
    damaged = bytearray(whole[: data.draw(st.sampled_from([len(whole), header, header // 2]))])
    for _ in range(data.draw(st.integers(0, 4))):
        damaged[data.draw(st.integers(0, min(header, len(damaged)) - 1))] = data.draw(st.sampled_from([0, 1, 127, 255]))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damaged)
    try:
        read_everything(path)
    except ValueError:
        pass


# --- models ---------------------------------------------------------------------------------------------------------


def logits_from(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    with GGUF(path) as file:
        config, state = config_of(file), state_of(file)
    model = AutoModelForCausalLM.from_config(config).eval()
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    return logits_of(model)


def logits_of(model: Any) -> Any:
    with torch.no_grad():
        return model(torch.arange(3, 40)[None]).logits


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_a_model_comes_back_from_its_gguf(kind: str, is_tied: bool, tmp_path: Path) -> None:
    model = files.tiny_model(kind, is_tied=is_tied)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.normal_(1.0, 0.3)
    path = files.write_model(tmp_path / "m.gguf", model)
    torch.testing.assert_close(logits_from(path), logits_of(model), rtol=1e-5, atol=1e-5)


def test_a_llama_with_biases_comes_back(tmp_path: Path) -> None:
    model = files.tiny_model(attention_bias=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    path = files.write_model(tmp_path / "m.gguf", model)
    torch.testing.assert_close(logits_from(path), logits_of(model), rtol=1e-5, atol=1e-5)


def test_the_positions_of_llama_3_are_known_by_their_table(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    model = files.tiny_model()
    plain = 500000.0 ** -(np.arange(0, 8, 2) / 8)
    waves = 2 * np.pi / plain
    factors = []
    for wave in waves:
        if wave < 8192 / 4:
            factors.append(1.0)
        elif wave > 8192:
            factors.append(32.0)
        else:
            smooth = (8192 / wave - 1) / 3
            factors.append(1 / ((1 - smooth) / 32 + smooth))
    metadata = files.model_metadata(model.config) | {"llama.rope.freq_base": 500000.0}
    tensors = files.tensors_of(model)
    tensors["rope_freqs.weight"] = ((4,), 0, np.array(factors, "<f4").tobytes())
    with GGUF(files.write(tmp_path / "m.gguf", metadata, tensors)) as file:
        assert config_of(file).rope_parameters == rope
        assert "rope_freqs.weight" not in state_of(file)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"general.architecture": "mamba"}, "architecture 'mamba'"),
        ({"general.architecture": None}, "architecture 'None'"),
        ({"llama.block_count": 1 << 31}, "layers"),
        ({"llama.block_count": 3}, "lacks the tensor 'blk.2"),
        ({"llama.block_count": 1}, "does not have: blk.1"),
        ({"llama.embedding_length": 64}, "has the shape"),
        ({"llama.attention.head_count": 0}, "positive number"),
        ({"llama.attention.head_count": [4, 4]}, "positive number"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "positive number"),
        ({"llama.rope.scaling.type": "yarn"}, "'yarn'"),
        ({"llama.rope.dimension_count": 4}, "part of each head|has the shape"),
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.feed_forward_length": 1 << 40}, "has the shape|do not describe a valid model"),
        ({"llama.feed_forward_length": (1 << 64) - 1}, "do not describe a valid model"),
    ],
    ids=str,
)
def test_numbers_that_do_not_agree_are_refused(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = files.write_model(tmp_path / "m.gguf", files.tiny_model(), **changed)
    with GGUF(path) as file, pytest.raises(ValueError, match=message):
        config_of(file)


# --- tokenizers -----------------------------------------------------------------------------------------------------


def tokenizer_with(tmp_path: Path, **changed: Any) -> Any:
    metadata = files.tokenizer_metadata() | {f"tokenizer.ggml.{key}": item for key, item in changed.items()}
    path = files.write(tmp_path / "t.gguf", {key: item for key, item in metadata.items() if item is not None}, {})
    with GGUF(path) as file:
        return tokenizer_of(file)


def test_smollm_reads_numbers_digit_by_digit(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path)
    assert tokenizer.tokenize("hello 1212 hello") == ["hello", "Ġ", "1", "2", "1", "2", "Ġhello"]
    assert tokenizer_with(tmp_path, pre="gpt-2").tokenize("hello 1212") == ["hello", "Ġ", "12", "12"]


def test_the_tokenizer_and_its_ids_survive_saving(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = tokenizer_with(tmp_path)
    tokenizer.save_pretrained(tmp_path / "saved")
    files.tiny_model().config.save_pretrained(tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    for text in ("hello 12", "<|im_start|>hello<|im_end|>\n<user>", "½ x٣٤ grün 🙂\t\r\n  12e7"):
        ids = tokenizer(text)["input_ids"]
        assert again(text)["input_ids"] == ids
        assert again.decode(ids) == text
    assert again.chat_template == tokenizer.chat_template == "{{ messages[0]['content'] }}"
    assert (again.bos_token_id, again.eos_token_id, again.pad_token_id, again.unk_token_id) == (1, 2, 2, 0)


def test_special_tokens_are_left_out_on_request_and_the_users_own_are_not(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path)
    ids = tokenizer("<|im_start|><user>hello<|im_end|>")["input_ids"]
    assert ids[0] == 1
    assert ids[-1] == 2
    assert len(ids) == 4
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<user>hello"


def test_a_first_and_last_token_are_added_where_the_file_says_so(tmp_path: Path) -> None:
    assert tokenizer_with(tmp_path)("hello")["input_ids"][0] != 1
    assert tokenizer_with(tmp_path, add_bos_token=True, add_eos_token=True)("hello")["input_ids"][::2] == [1, 2]
    assert tokenizer_with(tmp_path, pre="llama-bpe")("hello")["input_ids"][0] == 1
    assert tokenizer_with(tmp_path, pre="llama-bpe", add_bos_token=False)("hello")["input_ids"][0] != 1


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [("llama-bpe", ["hello", "Ġ", "12", "3", "4", "Ċ"]), ("qwen2", ["hello", "Ġ", "1", "2", "3", "4", "Ċ"])],
)
def test_other_families_split_numbers_in_their_way(pre: str, pieces: list[str], tmp_path: Path) -> None:
    assert tokenizer_with(tmp_path, pre=pre, add_bos_token=False).tokenize("hello 1234\n") == pieces


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": "llama"}, "type 'llama'"),
        ({"model": None}, "type None"),
        ({"pre": "default"}, "pre-tokenizer 'default'"),
        ({"pre": ["smollm"]}, "pre-tokenizer"),
        ({"tokens": None}, "tokens is not a list"),
        ({"tokens": ["a", "a"]}, "twice"),
        ({"merges": ["a b c"]}, "merges 'a b c'"),
        ({"merges": ["zz yy"]}, "merges 'zz yy'"),
        ({"merges": 3}, "merges is not a list"),
        ({"token_type": [1]}, "1 token types"),
        ({"eos_token_id": 999999}, "id 999999"),
    ],
    ids=str,
)
def test_a_tokenizer_that_cannot_be_read_is_refused(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        tokenizer_with(tmp_path, **changed)
