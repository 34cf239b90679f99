"""The model that draws training stories: its cache, its agreement with another implementation, and its tokenizer."""

import importlib.util
import struct
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

SHAPE = (16, 24, 2, 2, 2, 300, 12)
PIECES = [b"<unk>", b"\n<s>\n", b"\n</s>\n", *(bytes([b]) for b in range(256)), b" ", b"a", b"b", b" a", b" ab", b"ab"]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).parents[2] / "experiments" / "story_teacher.py"
    spec = importlib.util.spec_from_file_location("story_teacher", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["story_teacher"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def weights(tmp_path: Path, script: ModuleType) -> Path:
    shape = script.Shape(*SHAPE)
    d, h, n = shape.width, shape.hidden, shape.depth
    count = shape.vocab_size * d + n * (4 * d * d + 3 * d * h + 2 * d) + d + shape.seq_len * shape.head_dim
    values = np.random.default_rng(0).normal(0, 0.5, count).astype("<f4")
    path = tmp_path / "teacher.bin"
    path.write_bytes(struct.pack("<7i", *SHAPE) + values.tobytes())
    return path


def test_logits_are_those_of_another_implementation_and_do_not_depend_on_the_cache(
    script: ModuleType, weights: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    teacher, shape = script.Teacher(weights), script.Shape(*SHAPE)
    config = transformers.LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.width,
        intermediate_size=shape.hidden,
        num_hidden_layers=shape.depth,
        num_attention_heads=shape.heads,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    other = transformers.LlamaForCausalLM(config).eval()
    halves = torch.arange(shape.width).view(shape.heads, -1, 2).transpose(1, 2).flatten()  # pairs are halves there
    with torch.no_grad():
        other.model.embed_tokens.weight.copy_(teacher.embedding)
        other.model.norm.weight.copy_(teacher.final_norm)
        for i, layer in enumerate(other.model.layers):
            layer.input_layernorm.weight.copy_(teacher.attention_norm[i])
            layer.post_attention_layernorm.weight.copy_(teacher.mlp_norm[i])
            layer.self_attn.q_proj.weight.copy_(teacher.wq[i][halves])
            layer.self_attn.k_proj.weight.copy_(teacher.wk[i][halves])
            layer.self_attn.v_proj.weight.copy_(teacher.wv[i])
            layer.self_attn.o_proj.weight.copy_(teacher.wo[i])
            layer.mlp.gate_proj.weight.copy_(teacher.w1[i])
            layer.mlp.down_proj.weight.copy_(teacher.w2[i])
            layer.mlp.up_proj.weight.copy_(teacher.w3[i])
        tokens = torch.randint(0, shape.vocab_size, (3, shape.seq_len), generator=torch.Generator().manual_seed(0))
        expected = other(tokens).logits
        whole = teacher.logits(tokens, teacher.empty_cache(3), 0)
        cache = teacher.empty_cache(3)
        single = torch.cat([teacher.logits(tokens[:, i : i + 1], cache, i) for i in range(shape.seq_len)], 1)
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(single, whole, rtol=1e-4, atol=1e-4)


def test_first_draws_have_the_probabilities_of_the_model(script: ModuleType, weights: Path) -> None:
    teacher, rows, temperature = script.Teacher(weights), 20_000, 4.0
    with torch.no_grad():
        p = (teacher.logits(torch.full((1, 1), script.BOS), teacher.empty_cache(1), 0)[0, 0] / temperature).softmax(-1)
    teacher.shape = teacher.shape._replace(seq_len=1)
    drawn = teacher.draw(rows, temperature, torch.Generator().manual_seed(0))[:, 0]
    counts = torch.bincount(drawn, minlength=SHAPE[5])
    chi_square = float(((counts - rows * p) ** 2 / (rows * p)).sum())
    assert chi_square < 299 + 5 * (2 * 299) ** 0.5  # five standard deviations; at temperature 1 it is far above
    assert p.max() < 0.5


def test_stories_are_cut_at_their_ends_and_scored_with_them(script: ModuleType, weights: Path, tmp_path: Path) -> None:
    story, end = list(range(50, 80)), [script.BOS]
    streams = torch.tensor([story + end + story[::-1] + end + [60] * 10, [60] * 72])
    assert list(script.complete_stories(streams)) == [story, story[::-1]]  # the rest of a row has no end
    teacher = script.Teacher(weights)
    tokens = torch.tensor([50, 60, 70])
    nats = teacher.nats(tokens)
    logits = teacher.logits(torch.tensor([[script.BOS, 50, 60, 70]]), teacher.empty_cache(1), 0)[0]
    expected = -logits.log_softmax(-1)[torch.arange(4), torch.tensor([50, 60, 70, script.BOS])]
    torch.testing.assert_close(nats, expected)


def test_encoding_merges_the_best_pair_and_decoding_undoes_it(script: ModuleType, tmp_path: Path) -> None:
    scores = {b" ab": -3.0, b"ab": -1.0, b" a": -2.0}
    path = tmp_path / "tokenizer.bin"
    entries = (struct.pack("<fi", scores.get(p, -9.0), len(p)) + p for p in PIECES)
    path.write_bytes(struct.pack("<i", 7) + b"".join(entries))
    pieces = script.Pieces(path, len(PIECES))
    assert [pieces.bytes[i] for i in pieces.encode("ab\na")] == [b" ab", b"\n", b"a"]
    assert pieces.encode("b")[0] == PIECES.index(b" ", 259)  # a piece of its own, not the byte
    for text in ("ab ba é\n b", "ab  ab", "a b\nab ba"):
        assert pieces.decode(pieces.encode(text)) == text
