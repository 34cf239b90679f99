"""Data, prepared data, configurations, logs, results and samples."""

import contextlib
import csv
import gzip
import hashlib
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import changed_bytes, changed_json, deepen

from sedd import data
from sedd.cli import convert, runs
from sedd.data.readers import read_chunks
from sedd.evaluation import compare, report
from sedd.evaluation.quality import quality_table, results
from sedd.evaluation.quality import samples as sample_sets
from sedd.runtime.run_log import read_log
from sedd.tokenizer import Integers
from sedd.training.config import RunConfig
from sedd.training.overrides import merge_config

FUZZ = settings.get_profile("fuzz")
pytestmark = [  # numbers of a hostile log overflow in its plots
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def fuzz(check: Callable[[Any], object], strategy: st.SearchStrategy[Any], part: int = 1) -> None:
    """Call ``check`` with many values, or that part of them; it may raise a ValueError."""

    @settings(FUZZ, max_examples=FUZZ.max_examples // part)
    @given(strategy)
    def run(value: Any) -> None:
        with contextlib.suppress(ValueError), contextlib.redirect_stdout(io.StringIO()):
            check(value)

    run()


@pytest.mark.parametrize("packing", ["packed", "lines"])
def test_an_index_of_prepared_data(tmp_path: Path, packing: str) -> None:
    """Its own hash can be right whatever it says: the author of a file computes it."""
    np.save(tmp_path / "ids.npy", np.arange(60).reshape(6, 10) % 7)
    data.prepare([tmp_path / "ids.npy"], tmp_path / "out", Integers(size=7), packing=packing)
    whole = json.loads((tmp_path / "out" / "index.json").read_text())

    def check(content: str) -> None:
        with contextlib.suppress(RecursionError, AttributeError, TypeError):  # of this test, where it computes the hash
            document = json.loads(content)
            if document.get("sha256") == whole["sha256"]:
                hashed = json.dumps({**document, "sha256": ""}, sort_keys=True)
                content = json.dumps({**document, "sha256": hashlib.sha256(hashed.encode()).hexdigest()})
        (tmp_path / "out" / "index.json").write_text(deepen(content))
        blocks = data.TokenBlocks.open(tmp_path / "out", None if packing == "lines" else 5, "train", check=True)
        blocks.read(np.arange(len(blocks)))
        blocks.label_ids(np.arange(len(blocks)))

    fuzz(check, changed_json(whole))


TEXTS = {
    "jsonl": b'{"text": "abc", "label": 1}\n{"text": "d\\u00e9", "label": null}\n',
    "json": b'[{"text": "abc"}, {"text": "de"}]',
    "csv": b'text,label\n"a, ""b""",x\nc,y\n',
    "txt": "abc\nd é\n".encode(),
    "smi": b"CCO ethanol\nC1CC1\n",
    "fa": b">a\nACGT\n>b\nAC\n",
    "txt.gz": gzip.compress(b"abc\n" * 50),
}


@pytest.mark.parametrize("kind", [*TEXTS, "npy", "parquet"])
def test_files_of_data(tmp_path: Path, kind: str) -> None:
    buffer = io.BytesIO()
    if kind == "npy":
        np.save(buffer, np.arange(20).reshape(4, 5))
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow", reason="the extra data has it")
        parquet = pytest.importorskip("pyarrow.parquet", reason="the extra data has it")
        parquet.write_table(pyarrow.table({"text": ["abc", "de"], "label": ["x", None]}), buffer)
    path, content = tmp_path / f"data.{kind}", TEXTS.get(kind, buffer.getvalue())

    def check(changed: bytes) -> None:
        path.write_bytes(changed)
        for packing in ("packed", "lines"):
            for _ in read_chunks(data.expand_sources([path]), None, packing):
                pass

    limit = csv.field_size_limit()
    fuzz(check, changed_bytes(content))
    csv.field_size_limit(limit)


def test_configurations(tmp_path: Path) -> None:
    """As YAML, as JSON, as options; what is returned is a configuration."""
    path = tmp_path / "settings.yaml"
    document = {key: value for key, value in RunConfig().as_dict().items() if key not in ("out", "data")}

    def check(content: str) -> None:
        path.write_text(deepen(content), encoding="utf-8", errors="surrogatepass")
        assert isinstance(merge_config({}, file=path), RunConfig)

    fuzz(check, changed_json(document))
    fuzz(check, st.text(max_size=40) | st.text(st.sampled_from("{}[]:,-&*!|>'\"%@`#? \nab1.$"), max_size=40))
    fuzz(lambda text: merge_config({}, sets=[text]), st.text(st.sampled_from("optim.lr=[]{}$:?1e-,&*' "), max_size=20))
    fuzz(lambda content: RunConfig.from_dict(json.loads(content)).resolved(), changed_json(document))


RECORDS = [
    {"step": step, "tokens": 100 * step, "loss": 3.0, "seconds": 0.5 * step, "loss_by_time": [1.0, 2.0, 3.0],
     "bound": 2.5, "bound_stderr": 0.1, "bound_bits_per_char": 1.2, "samples": ["a", "b"]}
    for step in (10, 20)
]  # fmt: skip


def test_logs(tmp_path: Path) -> None:
    """Read by `sedd runs`, `sedd compare` and `sedd report`, which makes a page of them."""
    (tmp_path / "config.json").write_text(json.dumps(RunConfig().resolved().as_dict()))

    def check(content: str, render: bool) -> None:
        (tmp_path / "log.jsonl").write_text(deepen(content))
        runs.runs(tmp_path, as_json=True)
        for read in (read_log, compare.read_curve):
            with contextlib.suppress(ValueError):
                read(tmp_path)
        history = report.read_run(tmp_path)
        report.report_samples(history, 2, seed=0)
        if render:
            report.render_report(history, *report.report_samples(history, 2, seed=0))

    lines = "\n".join(json.dumps(record) for record in RECORDS) + "\n"
    last = f"\n{json.dumps(RECORDS[1])}\n"
    fuzz(lambda content: check(content + last, render=False), changed_json(RECORDS[0]))
    fuzz(lambda content: check(content + last, render=True), changed_json(RECORDS[0]), part=5)
    fuzz(lambda content: check(content.decode("latin-1"), render=False), changed_bytes(lines.encode()))


def test_configurations_and_states_of_runs(tmp_path: Path) -> None:
    """`sedd runs` lists whatever it finds, with gaps."""
    run = tmp_path / "run"
    (run / "checkpoints" / "step-00000001").mkdir(parents=True)
    document = {"config": RunConfig().as_dict(), "state": {"step": 1, "best": 2.5}}

    def check(content: str) -> None:
        found = json.loads(content)
        for name, file in (("config", run / "config.json"), ("state", run / "checkpoints/step-00000001/state.json")):
            file.write_text(deepen(json.dumps(found.get(name) if isinstance(found, dict) else found)))
        runs.runs(tmp_path)

    fuzz(check, changed_json(document))
    shutil.rmtree(run)


LIKELIHOOD = {
    "nats_per_token": 1.5, "stderr_nats_per_token": 0.1, "protocol": "strict", "data": "a.txt", "is_exact": False,
    "terms_included": ["diffusion"], "precision": "float32", "eos": None, "packing": "packed", "t_min": 0.0,
    "label": None,
}  # fmt: skip
SAMPLES = [{"text": "abc", "ids": [1, 2], "sample": 0, "calls": 2.0, "seconds": 0.1, "sampler": "euler", "steps": 4}]


def test_results_and_samples(tmp_path: Path) -> None:
    def check_likelihood(content: str) -> None:
        (tmp_path / "a.jsonl").write_text(deepen(content))
        assert convert._records(tmp_path / "a.jsonl")

    def check_samples(content: str) -> None:
        (tmp_path / "b.jsonl").write_text(deepen(content))
        with contextlib.suppress(ValueError):
            sample_sets.read_samples(tmp_path / "b.jsonl")
        if records := results.read_results(tmp_path / "b.jsonl"):
            quality_table(records, ["source", "sampler", "gen_ppl_by_token"])

    judged = {"source": "run", "judge": "gpt2", "gen_ppl_by_token": 20.0, "entropy_nats": 3.0, "sampler": "euler"}
    fuzz(check_likelihood, changed_json(LIKELIHOOD))
    fuzz(check_samples, changed_json(SAMPLES))
    fuzz(check_samples, changed_json([judged]))
