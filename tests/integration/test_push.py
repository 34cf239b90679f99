"""`sedd push`, and `sedd import` from the Hub."""

import json
import shutil
from pathlib import Path

import local_hub
import publications
from huggingface_hub import ModelCard
from publications import KINDS
from runs import SMALL, Sedd, log, ok


def test_a_run_is_shared_with_its_results(sedd: Sedd, tmp_path: Path, corpus: Path) -> None:
    """The card has the last validation bound and the given results; no optimizer state is shared."""
    run, shared = tmp_path / "run", tmp_path / "shared"
    ok(sedd("train", corpus, "--out", run, "--steps", 5, *SMALL))
    (tmp_path / "test.txt").write_text("the cat sat on a mat " * 10)
    ok(sedd("eval", run, tmp_path / "test.txt", "--draws", 4, "--out", tmp_path / "result.json"))
    ok(sedd("push", run, "owner/name", "--result", tmp_path / "result.json", "--out", shared))
    card = ModelCard.load(shared / "README.md")
    measured = json.loads((tmp_path / "result.json").read_text())
    logged = [record for record in log(run) if "bound" in record][-1]
    assert [r.metric_value for r in card.data.eval_results] == [round(logged["bound"], 5), measured["nats_per_token"]]
    assert f"≤ {round(logged['bound'], 5)} ± {round(logged['bound_stderr'], 5)}" in card.text
    assert f"{measured['nats_per_token']} ± {measured['stderr_nats_per_token']}" in card.text
    assert "On words.txt (packed), objective `score-entropy`" in card.text
    assert {path.name for path in shared.glob("*.safetensors")} == {"ema.safetensors"}
    assert all(str(tmp_path.parent) not in path.read_text(errors="replace") for path in shared.iterdir())
    first, second = (sedd("sample", model, "-n", 2, "--steps", 4).stdout for model in (run, shared))
    assert first == second != ""
    commands_take_its_name(sedd, shared, tmp_path, first)


def commands_take_its_name(sedd: Sedd, shared: Path, tmp_path: Path, sampled: str) -> None:
    """A model in the cache of huggingface_hub is used by its name, in every command."""
    repository = tmp_path / "hub" / "models--owner--ours"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(local_hub.COMMIT)
    shutil.copytree(shared, repository / "snapshots" / local_hub.COMMIT)
    before = (
        "from huggingface_hub import constants\n"
        f"constants.HF_HUB_OFFLINE, constants.HF_HUB_CACHE = True, {str(tmp_path / 'hub')!r}"
    )
    done = sedd("sample", "owner/ours", "-n", 2, "--steps", 4, before=before)
    assert done.stdout == sampled, done.stderr
    for words in (["info"], ["eval", tmp_path / "test.txt", "--draws", 2], ["score", "the cat", "--draws", 2]):
        ok(sedd(words[0], "owner/ours", *words[1:], before=before))
    missing = sedd("sample", "owner/missing", before=before)
    assert missing.returncode == 2
    assert "there is no folder owner/missing here, and on the Hub: " in missing.stderr


def test_the_command_reaches_the_hub(sedd: Sedd, tmp_path: Path) -> None:
    """With huggingface_hub's environment variables: import by name, then offline from the cache."""
    source = publications.folder(tmp_path / "source", KINDS[0], "pickle")

    def with_variables(**variables: str) -> str:
        """Return code that sets variables and lets huggingface_hub read them, as it does when it is imported."""
        base = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_TELEMETRY": "1"}
        read = "import importlib; from huggingface_hub import constants; importlib.reload(constants)"
        return f"os.environ.update({base | variables!r}); {read}"

    with local_hub.serve() as hub:
        hub.files["owner/name"] = {path.name: path.read_bytes() for path in source.iterdir()}
        online = with_variables(HF_ENDPOINT=hub.address)
        ok(sedd("import", "owner/name", "--out", tmp_path / "first", before=online))
        assert hub.requests
    ok(sedd("import", "owner/name", "--out", tmp_path / "second", before=with_variables(HF_HUB_OFFLINE="1")))
    first, second = ((tmp_path / name / "ema.safetensors").read_bytes() for name in ("first", "second"))
    assert first == second


def test_files_without_results_are_refused(sedd: Sedd, tmp_path: Path) -> None:
    source = publications.folder(tmp_path / "source", KINDS[0])
    for content in ("", "{}", "no JSON", "[]"):
        (tmp_path / "result.json").write_text(content)
        done = sedd("push", source, "owner/name", "--result", tmp_path / "result.json")
        assert done.returncode == 2
        assert "result.json" in done.stderr
