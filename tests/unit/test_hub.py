"""Models by name: from the cache in huggingface_hub's layout, and to a local Hub through huggingface_hub itself."""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import local_hub
import publications
import pytest
import torch
from huggingface_hub import ModelCard, constants
from local_hub import COMMIT
from publications import KINDS, V

import sedd
from sedd import hub, models
from sedd.hub import convert
from sedd.loading import LoadedModel, load_model
from sedd.tokenizer import BPE, Characters, Integers
from sedd.training import checkpoint

Refuses = Callable[..., None]
SEDD, _, RADD, MDLM = KINDS


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty caches of the Hub and of sedd, with the Hub offline."""
    place = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(place))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("SEDD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SEDD_GPT2", str(tmp_path / "nothing"))
    return place


@pytest.fixture
def online(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[local_hub.Hub]:
    """A Hub that is online."""
    with local_hub.serve() as found:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, found.address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", found.address)
        (tmp_path / "temporary").mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
        yield found


def put(cache: Path, name: str, folder: Path, commit: str = COMMIT) -> None:
    """Put files into the cache in the library's layout: blobs by hash, links by name, and a reference."""
    repo = cache / f"models--{name.replace('/', '--')}"
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        blob = repo / "blobs" / hashlib.sha256(content).hexdigest()
        link = repo / "snapshots" / commit / path.relative_to(folder)
        for file in (blob, link):
            file.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        link.symlink_to(Path(*[".."] * (len(link.relative_to(repo).parts) - 1)) / "blobs" / blob.name)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)


def model(tmp_path: Path, kind: publications.Kind = SEDD, name: str = "model") -> Path:
    """A model folder."""
    found = convert.read_published(publications.folder(tmp_path / f"{name}-source", kind))
    return convert.save_model_folder(found, Characters(alphabet="abcdefghijk"), tmp_path / name, "owner/published")


def scores(loaded: LoadedModel) -> torch.Tensor:
    x = torch.randint(V, (3, 7), generator=torch.Generator().manual_seed(0))
    return loaded.model(x, torch.tensor([0.1, 1.0, 4.0]))


RESULT = {
    "data": "/home/user/secret/test.txt",
    "dataset": None,
    "protocol": "strict",
    "nats_per_token": 1.23456,
    "stderr_nats_per_token": 0.00789,
    "bits_per_char": 1.5,
    "terms": {"diffusion": 1.2, "prior": 0.03, "reconstruction": 0.0},
    "is_exact": False,
}


# From the Hub ----------------------------------------------------------------------------------------------


def test_a_model_is_loaded_from_the_cache(tmp_path: Path, cache: Path) -> None:
    folder = model(tmp_path)
    put(cache, "owner/name", hub.save_pretrained(folder, tmp_path / "shared"))
    loaded = hub.from_pretrained("owner/name")
    assert torch.equal(scores(loaded), scores(load_model(folder)))
    assert loaded.tokenizer == Characters(alphabet="abcdefghijk")
    assert cache in loaded.folder.parents
    assert hub.from_pretrained("owner/name", revision=COMMIT).folder == loaded.folder
    assert sedd.load("owner/name").loaded.folder == loaded.folder


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_a_published_checkpoint_is_converted_once(tmp_path: Path, cache: Path, kind: publications.Kind) -> None:
    put(cache, "owner/published", publications.folder(tmp_path / "source", kind))
    first = hub.fetch("owner/published")
    times = {path: path.stat().st_mtime_ns for path in first.iterdir()}
    assert hub.fetch("owner/published") == first
    assert {path: path.stat().st_mtime_ns for path in first.iterdir()} == times
    by_hand = convert.save_model_folder(convert.read_published(tmp_path / "source"), None, tmp_path / "by hand", "x")
    assert torch.equal(scores(hub.from_pretrained("owner/published")), scores(load_model(by_hand)))
    assert checkpoint.load_json(first, "published")["source"] == "owner/published"
    assert hub.fetch(first) == first
    assert torch.equal(scores(hub.from_pretrained(tmp_path / "source")), scores(load_model(by_hand)))


def test_the_conversion_cache_depends_on_the_files(tmp_path: Path, cache: Path) -> None:
    put(cache, "owner/published", publications.folder(tmp_path / "one", SEDD))
    put(cache, "owner/other", publications.folder(tmp_path / "two", SEDD, seed=1))
    one, two = (scores(hub.from_pretrained(f"owner/{name}")) for name in ("published", "other"))
    assert not torch.allclose(one, two, atol=0.1)


def test_pickles_are_read_by_the_import_command_only(tmp_path: Path, cache: Path, refuses: Refuses) -> None:
    put(cache, "owner/old", publications.folder(tmp_path / "source", SEDD, "pickle"))
    for load in (hub.fetch, sedd.load):
        refuses(lambda load=load: load("owner/old"), "sedd import owner/old --out MODEL")
    assert (hub.download("owner/old", pickles=True) / "pytorch_model.bin").is_file()


def test_missing_models_are_reported_in_a_sentence(
    tmp_path: Path, cache: Path, refuses: Refuses, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuses(lambda: hub.fetch("owner/nothing"), "owner/nothing", str(cache), "HF_HUB_OFFLINE is set")
    refuses(lambda: sedd.load("no such folder"), "holds no model", "name on the Hub")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    refuses(lambda: hub.fetch("owner/nothing"), "http://127.0.0.1:9 did not answer", "owner/nothing")
    refuses(lambda: hub.push_to_hub(model(tmp_path), "owner/name"), "http://127.0.0.1:9 did not answer")
    put(cache, "owner/name", hub.save_pretrained(tmp_path / "model", tmp_path / "shared"))
    assert hub.fetch("owner/name").name == COMMIT  # the cache is enough


@pytest.mark.parametrize(
    ("status", "code", "sentence"),
    [
        (404, "RepoNotFound", "check its spelling"),
        (401, "RepoNotFound", "you are not logged in"),
        (403, "GatedRepo", "request access"),
        (404, "RevisionNotFound", "no such revision"),
        (400, "", "did not answer"),
    ],
)
def test_errors_of_the_hub_are_reported_in_a_sentence(
    online: local_hub.Hub, status: int, code: str, sentence: str, refuses: Refuses
) -> None:
    online.refused["owner/name"] = status, code
    refuses(lambda: hub.download("owner/name"), "owner/name", sentence)


def test_pickles_are_downloaded_only_without_safetensors(tmp_path: Path, cache: Path, online: local_hub.Hub) -> None:
    for name, forms in (("owner/both", ("safetensors", "pickle")), ("owner/old", ("pickle",))):
        for form in forms:
            publications.folder(tmp_path / name, SEDD, form)
        (tmp_path / name / "train.py").write_text("import os")
        online.files[name] = {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
    found = {name: hub.download(name, pickles=True) for name in online.files}
    assert {path.name for path in found["owner/both"].iterdir()} == {"config.json", "model.safetensors"}
    assert {path.name for path in found["owner/old"].iterdir()} == {"config.json", "pytorch_model.bin"}
    assert {path.name for path in hub.download("owner/both").iterdir()} == {"config.json", "model.safetensors"}
    one, two = (convert.read_published(folder).weights["ema"] for folder in found.values())
    assert all(torch.equal(value, two[name]) for name, value in one.items())


def test_repository_ids() -> None:
    assert models.is_repo_id("louaaron/sedd-small")
    assert not any(
        map(models.is_repo_id, ["name", "../name", "owner/../name", "/etc/passwd", "a/b/c", "owner/", "-o/n", "o/n\n"])
    )


def test_manifests_with_paths_outside_the_folder_are_refused(tmp_path: Path, cache: Path, refuses: Refuses) -> None:
    folder = hub.save_pretrained(model(tmp_path), tmp_path / "shared")
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in ("/dev/zero", "../secret"):
        (folder / "manifest.json").write_text(json.dumps({name: {"bytes": 0, "sha256": ""}, **manifest}))
        refuses(lambda: hub.from_pretrained(folder), name, "outside of it")


# The tokenizer ---------------------------------------------------------------------------------------------


def test_the_gpt2_tokenizer_is_the_default_for_its_vocabulary_size(
    tmp_path: Path, cache: Path, refuses: Refuses
) -> None:
    found = convert.read_published(publications.folder(tmp_path / "source", SEDD))
    large = found._replace(vocab_size=50257)
    assert hub.find_tokenizer(found) is None
    assert hub.find_tokenizer(large) is None  # offline, and not on the disk
    refuses(lambda: hub.find_tokenizer(large, "gpt2"), "openai-community/gpt2", "HF_HUB_OFFLINE")
    bpe = BPE.train(iter(["some text to learn from"] * 3), 260)
    bpe.save(tmp_path / "bpe")
    (tmp_path / "bpe" / "tokenizer_config.json").unlink()
    put(cache, "gpt2", tmp_path / "bpe")  # the name in older caches
    assert hub.find_tokenizer(large) == hub.find_tokenizer(found, "gpt2") == bpe
    shutil.copy(tmp_path / "bpe" / "tokenizer.json", tmp_path / "source")
    assert hub.find_tokenizer(found) == bpe
    Integers(size=V).save(tmp_path / "source")
    assert hub.find_tokenizer(found) == Integers(size=V)
    refuses(lambda: hub.find_tokenizer(found, "klingon"), "klingon")
    (tmp_path / "source" / "tokenizer.json").unlink()
    (tmp_path / "source" / "tokenizer_config.json").write_text("5")
    refuses(lambda: hub.find_tokenizer(found), "tokenizer_config.json holds a int, not an object")


def test_gpt2_vocabulary_and_merges_files_are_read(tmp_path: Path) -> None:
    source = publications.folder(tmp_path / "source", SEDD)
    letters = sorted(json.loads(BPE.train(iter(["a"]), 256).definition)["model"]["vocab"])
    (source / "vocab.json").write_text(json.dumps({letter: i for i, letter in enumerate([*letters, "<|endoftext|>"])}))
    (source / "merges.txt").write_text("#version: 0.2\n")
    tokens = hub.find_tokenizer(convert.read_published(source))
    assert tokens is not None
    assert (tokens.vocab_size, tokens.eos) == (257, 256)
    assert tokens.decode(tokens.encode("any text")) == "any text"


# To the Hub ------------------------------------------------------------------------------------------------


def test_a_model_is_pushed_and_loaded_again(tmp_path: Path, cache: Path, online: local_hub.Hub) -> None:
    """Through huggingface_hub, to and from a Hub on this machine."""
    folder = model(tmp_path)
    assert hub.push_to_hub(folder, "owner/name", private=True, results=[RESULT]) == f"{online.address}/owner/name"
    names = {
        "README.md",
        "card.json",
        "config.json",
        "ema.safetensors",
        "manifest.json",
        "published.json",
        "state.json",
    }
    assert online.files["owner/name"].keys() == names | {"tokenizer_config.json"}
    assert online.private == {"owner/name": True}
    loaded = hub.from_pretrained("owner/name")
    assert cache in loaded.folder.parents
    assert torch.equal(scores(loaded), scores(load_model(folder)))
    assert list(Path(tempfile.gettempdir()).glob("sedd-*")) == []  # temporary files are removed


def test_names_are_checked_before_any_request(tmp_path: Path, online: local_hub.Hub, refuses: Refuses) -> None:
    refuses(lambda: hub.push_to_hub(tmp_path / "nothing", "name"), "'name'", "owner/name")
    refuses(lambda: hub.push_to_hub(tmp_path / "nothing", "owner/name"), "holds no model")
    assert online.requests == []


def test_the_card_describes_the_model(tmp_path: Path) -> None:
    """The library reads the metadata back; bounds have standard errors; local paths are left out."""
    folder = hub.save_pretrained(model(tmp_path, MDLM), tmp_path / "shared", "owner/name", [RESULT])
    card = ModelCard.load(folder / "README.md")
    assert card.data.library_name == "sedd"
    assert card.data.pipeline_tag == "text-generation"
    assert {"sedd", "discrete-diffusion", "absorbing"} <= set(card.data.tags)
    (result,) = card.data.eval_results
    assert (result.metric_value, result.dataset_name) == (1.23456, "test.txt")
    for words in (
        *(
            "≤ 1.23456 ± 0.00789",
            "test.txt",
            "strict",
            "t-dce",
            "LogLinear(eps=0.001)",
            "noise-level embedding fixed at σ = 0",
        ),
        *('sedd.load("owner/name")', "sedd sample", "published MDLM checkpoint `owner/published`"),
    ):
        assert words in card.text
    assert "secret" not in card.content
    count = sum(p.numel() for p in load_model(folder).network.parameters())
    assert f"{count:,}" in card.text
    again = ModelCard.load(hub.save_pretrained(folder, tmp_path / "again") / "README.md")
    assert "≤ 1.23456 ± 0.00789" in again.text  # the same weights
    bare = ModelCard.load(hub.save_pretrained(folder, tmp_path / "bare", dtype="int8") / "README.md")
    assert bare.data.eval_results is None
    assert "Not measured" in bare.text


def test_a_card_calls_only_bounds_upper_bounds(tmp_path: Path) -> None:
    """Protocol sedd leaves out two terms; the Hub reads the metadata, people the table."""
    published = RESULT | {"protocol": "sedd", "terms": {"diffusion": 1.2, "prior": None, "reconstruction": None}}
    results = [RESULT, published, RESULT | {"is_exact": True}]
    card = ModelCard.load(hub.save_pretrained(model(tmp_path), tmp_path / "shared", results=results) / "README.md")
    names = [result.metric_name for result in card.data.eval_results]
    assert names == ["upper bound on nats per token", "nats per token", "nats per token"]
    assert [part[:1] for part in card.text.split(" | ") if "1.23456" in part] == ["≤", "1", "1"]


def test_local_folders_are_not_shared(tmp_path: Path) -> None:
    folder = model(tmp_path)
    stored = checkpoint.load_json(folder, "config")
    stored["data"]["sources"] = ["/home/user/secret/book.txt"]
    checkpoint.write_json(folder / "config.json", stored)
    (folder / "manifest.json").unlink()
    (folder / "published.json").unlink()
    shared = hub.save_pretrained(folder, tmp_path / "shared")
    assert checkpoint.load_json(shared, "config")["data"]["sources"] == ["book.txt"]
    assert all(b"/home/user" not in path.read_bytes() for path in shared.iterdir())
    assert "On book.txt" in (shared / "README.md").read_text()
