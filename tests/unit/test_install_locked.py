"""Default installs check the hashes of requirements.lock."""

import hashlib
import importlib.util
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
WHEEL = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
LOCK = (ROOT / "requirements.lock").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def installer() -> ModuleType:
    return load(ROOT / "install_locked.py")


def test_every_default_install_uses_it() -> None:
    """That of `make`, and of the image; CI uses `make`."""
    for name in ("Makefile", "Dockerfile"):
        text = (ROOT / name).read_text()
        assert "install_locked.py" in text
        assert "--constraint constraints.txt '.[" not in text
    assert "pip install" not in (ROOT / ".ci/run").read_text()


def test_another_build_of_torch_is_taken_by_its_version_and_all_else_by_hash(installer: ModuleType) -> None:
    entries, other = installer.entries(LOCK), installer.without_torch(LOCK)
    assert "".join(entries) == LOCK
    assert all("--hash=sha256:" in entry for entry in entries)
    assert {"uv", "numpy", "triton"} <= {entry.partition("==")[0] for entry in installer.entries(other)}
    unhashed = [entry for entry in installer.entries(other) if "--hash" not in entry]
    assert [entry.partition("==")[0] for entry in unhashed] == ["torch"]
    assert "nvidia-" not in other


def test_where_another_build_is_found(installer: ModuleType, tmp_path: Path) -> None:
    assert not installer.offers_torch([], "2.0")
    assert not installer.offers_torch([str(tmp_path)], "2.0")
    assert installer.offers_torch(["https://example.org/wheels"], "2.0")
    (tmp_path / "torch-2.0+cpu-cp311-cp311-linux_x86_64.whl").touch()
    assert installer.offers_torch([str(tmp_path)], "2.0")
    assert not installer.offers_torch([str(tmp_path)], "2.1")


@pytest.mark.parametrize("is_tampered", [False, True])
def test_a_file_with_another_hash_is_not_installed(tmp_path: Path, is_tampered: bool) -> None:
    """uv checks the hashes of constraints, which is how the lock is given to it."""
    wheel = tmp_path / "example-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("example.py", "")
        archive.writestr("example-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: example\nVersion: 1.0\n")
        archive.writestr("example-1.0.dist-info/WHEEL", WHEEL)
        archive.writestr("example-1.0.dist-info/RECORD", "")
    digest = hashlib.sha256(b"" if is_tampered else wheel.read_bytes()).hexdigest()
    (tmp_path / "lock").write_text(f"example==1.0 \\\n    --hash=sha256:{digest}\n")
    uv = Path(sys.executable).with_name("uv")
    command = [
        uv,
        "pip",
        "install",
        "--no-cache",
        "--no-index",
        "--find-links",
        tmp_path,
        "--target",
        tmp_path / "site",
    ]
    done = subprocess.run([*command, "--constraint", tmp_path / "lock", "example"], capture_output=True, check=False)
    assert (done.returncode == 0) is not is_tampered
    assert (tmp_path / "site" / "example.py").exists() is not is_tampered


def test_an_unreachable_database_is_not_a_passed_audit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor are those of a report with gaps."""
    audit = load(ROOT / "experiments/audit_dependencies.py")
    package = {"name": "a", "version": "1", "vulns": []}
    assert audit.findings(json.dumps({"dependencies": [package]})) == []
    assert audit.findings(json.dumps({"dependencies": [{**package, "vulns": [{"id": "X-1"}]}]})) == ["a 1: X-1"]
    for report in ("", "[]", '{"dependencies": []}', json.dumps({"dependencies": [package, {"skip_reason": "?"}]})):
        assert audit.findings(report) is None
    for answer, code, word in ((None, audit.NOT_CHECKED, "NOT CHECKED"), ([], 0, "no known"), (["a 1: X-1"], 1, "X-1")):
        monkeypatch.setattr(audit, "ask", lambda service, folder, answer=answer: answer)
        assert audit.main() == code
        assert word in "".join(capsys.readouterr())


def test_verify_goes_on_without_a_database_alone() -> None:
    """Its last command succeeds where nothing is known, and fails where there is a vulnerability or an error."""
    line = re.search(r"^\t.*audit_dependencies\.py (\|\|.*)$", MAKEFILE, re.MULTILINE)
    assert line
    for code, goes_on in ((0, True), (1, False), (2, False), (3, True)):
        script = f"(exit {code}) {line[1].replace('$$', '$')}"
        assert (subprocess.run(["sh", "-c", script], check=False).returncode == 0) is goes_on
