"""Model folders, their weights and tokenizers, and published checkpoints."""

import contextlib
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import publications
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import changed_bytes, changed_json, deepen

from sedd import hub
from sedd.cli import info
from sedd.cli.root import find_model
from sedd.hub import convert
from sedd.loading import load_model
from sedd.samplers.template import parse_template, template_ids
from sedd.tokenizer import BPE, Bytes, load_tokenizer
from sedd.training import checkpoint

FUZZ = settings.get_profile("fuzz")


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Callable[[str, bytes], Path]:
    """Writes another content into one file of a copy of the model."""

    def change(name: str, content: bytes) -> Path:
        target = tmp_path / "model"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(model, target)
        (target / checkpoint.MANIFEST).unlink()
        (target / name).write_bytes(content)
        return target

    return change


def use(folder: Path) -> None:
    """Do what commands do with the folder of a model: each part reads it or refuses it with a ValueError."""
    uses: list[Callable[[], object]] = [
        lambda: find_model(folder),
        lambda: info.info(folder),
        lambda: info.info(folder, as_json=True),
        lambda: load_model(folder),
        lambda: hub.CardFacts.read(folder),
        lambda: load_tokenizer(folder).decode([0, 1]),
    ]
    for call in uses:
        with contextlib.suppress(ValueError), contextlib.redirect_stdout(io.StringIO()):
            call()


CARD = {
    "summary": "a",
    "data": "b",
    "command": "c",
    "results": [{"data": "x", "dataset": None, "nats_per_token": 1.5, "stderr_nats_per_token": 0.1}],
    "weights_cost": {"dtype": "int8", "nats_per_token": 0.1},
    "sample_metrics": {"validity": 0.5},
    "samples": ["a"],
}


@pytest.mark.parametrize("name", ["config.json", "state.json", "tokenizer_config.json", "published.json", "card.json"])
def test_json_of_a_model(folder: Callable[[str, bytes], Path], model: Path, name: str) -> None:
    document = CARD if name == "card.json" else json.loads((model / name).read_text())

    @settings(FUZZ)
    @given(changed_json(document))
    def check(content: str) -> None:
        use(folder(name, deepen(content).encode()))

    check()


@settings(FUZZ)
@given(data=st.data())
def test_manifests(model: Path, tmp_path: Path, data: st.DataObject) -> None:
    """A damaged one is a reason, and no error; it never reads outside of its folder."""
    shutil.copytree(model, tmp_path / "model", dirs_exist_ok=True)
    document = json.loads((model / checkpoint.MANIFEST).read_text())
    (tmp_path / "model" / checkpoint.MANIFEST).write_text(deepen(data.draw(changed_json(document))))
    assert isinstance(checkpoint.corruption(tmp_path / "model"), str | None)


@settings(FUZZ)
@given(data=st.data())
def test_headers_of_weights(folder: Callable[[str, bytes], Path], model: Path, data: st.DataObject) -> None:
    content = (model / "ema.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    if data.draw(st.booleans()):
        changed = data.draw(changed_bytes(content, within=8 + length))
    else:
        header = deepen(data.draw(changed_json(json.loads(content[8 : 8 + length])))).encode()
        changed = len(header).to_bytes(8, "little") + header + content[8 + length :]
    use(folder("ema.safetensors", changed))


TOKENIZER = {
    "version": "1.0",
    "added_tokens": [
        {"id": 4, "content": "</s>", "special": True, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False}
    ],
    "normalizer": {"type": "Lowercase"},
    "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "a+|b"}, "behavior": "Isolated", "invert": False},
    "post_processor": None,
    "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "c": 3}, "merges": [["a", "b"]]},
}  # fmt: skip


@settings(FUZZ)
@given(changed_json(TOKENIZER), st.text(max_size=20))
def test_definitions_of_tokenizers(tmp_path: Path, content: str, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(deepen(content))
    with contextlib.suppress(ValueError):
        tokenizer = BPE.read(tmp_path / "tokenizer.json")
        assert isinstance(tokenizer.is_lossless, bool)
        assert isinstance(tokenizer.words_include_space, bool)
        tokenizer.decode(tokenizer.encode(text))
        tokenizer.tokens(tokenizer.encode("ab"))


@settings(FUZZ)
@given(st.text(st.sampled_from("{}0123456789 ab\0\ud800٣"), max_size=30) | st.text(max_size=30))
def test_templates(template: str) -> None:
    with contextlib.suppress(ValueError):
        parts = parse_template(template)
        if sum(part for part in parts if isinstance(part, int)) < 10**6:
            assert template_ids(template, Bytes()).count(-1) == sum(p for p in parts if isinstance(p, int))


@pytest.mark.parametrize("form", ["safetensors", "pickle", "safetensors shards"])
def test_published_checkpoints(tmp_path: Path, form: str) -> None:
    """The configuration and the index, and for pickles the first bytes of the archive."""
    source = publications.folder(tmp_path / "source", publications.KINDS[0], form)
    weights = {path: path.read_bytes() for path in source.iterdir() if path.suffix != ".json"}
    documents = {path: json.loads(path.read_text()) for path in source.glob("*.json")}

    @settings(FUZZ)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        for path, document in documents.items():
            path.write_text(json.dumps(document))
        path = data.draw(st.sampled_from([*documents, *weights]))
        if path in documents:
            path.write_text(deepen(data.draw(changed_json(documents[path]))))
        else:
            path.write_bytes(data.draw(changed_bytes(weights[path], within=2000)))
        with contextlib.suppress(ValueError):
            convert.read_published(source)
        for other, content in weights.items():
            other.write_bytes(content)

    check()
