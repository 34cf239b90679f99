"""Our model in the Language Model Evaluation Harness, on tasks defined in a local folder."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import lm_eval
import numpy as np
import pytest
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager
from runs import SMALL, Sedd, ok

from sedd import evaluation
from sedd.evaluation.lm_eval import SeddLM, parse_generation_options
from sedd.extras import install_hint
from sedd.loading import load_model

KINDS = {"diffusion": ["--parameterization", "mean"], "autoregressive": ["--objective", "autoregressive"]}
DOCUMENTS = [
    {"question": "the cat sat on a", "choices": [" mat", " zzzz"], "answer": 0, "text": "the cat sat on a mat. " * 4},
    {"question": "two small birds fly", "choices": [" over", " under red"], "answer": 0, "text": "two small birds"},
    {
        "question": "old red houses",
        "choices": [" near water", " and"],
        "answer": 1,
        "text": "old red houses near water",
    },
]
TASKS = {
    "choices": """
output_type: multiple_choice
doc_to_text: question
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "documents": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: text
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
    "writing": """
output_type: generate_until
doc_to_text: question
doc_to_target: text
generation_kwargs: {until: [" "], max_gen_toks: 12}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tasks on one file, in the harness's format."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "data.jsonl").write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    data = {"data_files": {"test": str(folder / "data.jsonl")}, "cache_dir": str(folder / "cache")}
    head = f"dataset_path: json\ndataset_kwargs: {json.dumps(data)}\ntest_split: test\ntarget_delimiter: ''\n"
    for name, task in TASKS.items():
        (folder / f"{name}.yaml").write_text(f"task: tiny_{name}\n{head}{task}")
    return folder


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def models(sedd: Sedd, model_folder: Path, corpus: Path) -> Callable[[str], Path]:
    def model(kind: str) -> Path:
        out = model_folder / kind
        if not out.exists():
            ok(sedd("train", corpus, *SMALL, *KINDS[kind], "--steps", 3, "--tokenizer", "bytes", "--out", out))
        return out

    return model


def requests(*arguments: tuple[object, ...]) -> list[Instance]:
    return [Instance("loglikelihood", {}, given, i) for i, given in enumerate(arguments)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_harness_evaluates_our_models(models: Callable[[str], Path], tasks: Path, kind: str) -> None:
    found = lm_eval.simple_evaluate(
        model="sedd",
        model_args=f"pretrained={models(kind)},draws=8",
        tasks=[f"tiny_{name}" for name in TASKS],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
    )
    assert found["config"]["likelihood"] == (
        "exact" if kind == "autoregressive" else "lower bound on the log-probability"
    )
    assert (found["config"]["likelihood_stderr_nats"] == 0) == (kind == "autoregressive")
    model = SeddLM(str(models(kind)), draws=8)
    samples = found["samples"]["tiny_choices"]
    scores = model.loglikelihood(requests(*((d["question"], choice) for d in DOCUMENTS for choice in d["choices"])))
    assert [tuple(given[0]) for sample in samples for given in sample["resps"]] == scores
    right = [max((0, 1), key=lambda i, s=s: s["resps"][i][0][0]) == s["doc"]["answer"] for s in samples]
    assert found["results"]["tiny_choices"]["acc,none"] == pytest.approx(np.mean(right))
    documents = model.loglikelihood_rolling(requests(*((d["text"],) for d in DOCUMENTS)))
    bits = -sum(documents) / math.log(2) / sum(len(d["text"].encode()) for d in DOCUMENTS)
    assert found["results"]["tiny_documents"]["bits_per_byte,none"] == pytest.approx(bits)
    for sample in found["samples"]["tiny_writing"]:
        text = sample["resps"][0][0]
        assert " " not in text
        assert len(text.encode(errors="ignore")) <= 36  # 12 bytes, each a replaced one at most


def test_a_response_depends_on_seed_and_request_only(models: Callable[[str], Path]) -> None:
    """The order, other requests and the batch size change nothing but rounding."""
    questions = [
        ("the cat", " sat"),
        ("the cat", " mat and saw"),
        ("", "two small"),
        ("birds fly over old", "!"),
    ]
    texts = [("two small birds fly over " * 5,), ("a cat",)]
    writing = [
        ("the cat", {"max_gen_toks": 9, "do_sample": True}),
        ("saw two", {"max_gen_toks": 9, "temperature": 0.7}),
    ]

    def responses(batch: int, seed: int, order: int) -> tuple[np.ndarray, np.ndarray, list[str]]:
        model = SeddLM(str(models("diffusion")), draws=8, seed=seed, batch_size=batch)
        scores = model.loglikelihood(requests(*questions[::order]))[::order]
        whole = model.loglikelihood_rolling(requests(*texts[::order]))[::order]
        return np.array(scores), np.array(whole), model.generate_until(requests(*writing[::order]))[::order]

    first, again, other = responses(1, 0, 1), responses(7, 0, -1), responses(1, 1, 1)
    for a, b, c in zip(first[:2], again, other, strict=False):
        np.testing.assert_allclose(a, b, rtol=1e-5)
        assert np.abs(a - c).max() > 1e-3
    assert first[2] == again[2]
    assert first[2] != other[2]
    alone = SeddLM(str(models("diffusion")), draws=8).loglikelihood(requests(questions[1]))
    np.testing.assert_allclose(alone[0], first[0][1], rtol=1e-5)


def test_a_repeated_request_gets_another_sample(models: Callable[[str], Path]) -> None:
    model = SeddLM(str(models("diffusion")))
    drawn = model.generate_until(requests(*[("the cat", {"max_gen_toks": 9, "do_sample": True})] * 3))
    assert len(set(drawn)) == 3
    likeliest = model.generate_until(requests(*[("the cat", {"max_gen_toks": 9})] * 2))
    assert likeliest[0] == likeliest[1]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_decoding_is_recognized(models: Callable[[str], Path], kind: str) -> None:
    """The model's own greedy continuation is greedy, and a changed one is not."""
    model = SeddLM(str(models(kind)), draws=2)
    tokenizer = model.loaded.tokenizer
    (text,) = model.generate_until(requests(("the cat", {"max_gen_toks": 4})))
    assert len(tokenizer.encode(text)) == 4
    other = text[:-1] + ("x" if text[-1] != "x" else "y")
    assert [is_greedy for _, is_greedy in model.loglikelihood(requests(("the cat", text), ("the cat", other)))] == [
        True,
        False,
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_every_token_of_a_document_is_scored_once(models: Callable[[str], Path], kind: str) -> None:
    """The scores of the windows add up to that of the document."""
    model = SeddLM(str(models(kind)), draws=512)
    text = "the cat sat on a mat and saw two small birds fly over old red houses"  # 68 bytes, windows of 32
    (whole,) = model.loglikelihood_rolling(requests((text,)))
    parts = [text[:32], text[32:64], text[64:]]
    scored = [
        evaluation.score_continuation(np.zeros(0, np.int64), model.loaded.tokenizer.encode(p), model.loaded, draws=512)
        for p in parts
    ]
    error = math.sqrt(sum((found.stderr * len(p)) ** 2 for found, p in zip(scored, parts, strict=True)))
    total = sum(found.nats * len(p) for found, p in zip(scored, parts, strict=True))
    assert abs(whole + total) <= 5 * 2 * error + 1e-3  # both sides have this error: false alarm below 1e-5
    assert 10 * error < 0.05 * total
    assert model.loglikelihood_rolling(requests(("",))) == [0.0]


def test_a_long_context_is_truncated_on_the_left(models: Callable[[str], Path]) -> None:
    """The last tokens that fit are used, as is usual in the harness."""
    model = SeddLM(str(models("autoregressive")))
    long, rest = "near water " * 9, "two small"
    kept = long[-(32 - len(rest)) :]
    assert model.loglikelihood(requests((long, rest))) == model.loglikelihood(requests((kept, rest)))
    assert model.generate_until(requests((long, {"max_gen_toks": 9}))) == model.generate_until(
        requests((long[-23:], {"max_gen_toks": 9}))
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (16, (), None)),
        ({"until": "\n", "max_gen_toks": 5, "temperature": 0.0, "do_sample": False}, (5, ("\n",), None)),
        ({"until": ["a", ""], "do_sample": True}, (16, ("a",), 1.0)),
        ({"temperature": 0.5, "top_k": 0}, (16, (), 0.5)),
        ({"temperature": 0.5, "do_sample": False}, (16, (), None)),
    ],
    ids=str,
)
def test_generation_options(options: dict[str, object], expected: tuple[object, ...]) -> None:
    tokens, stops, temperature = expected
    *parsed, warping = parse_generation_options(options, 32)
    assert parsed == [tokens, stops]
    assert (warping and warping.temperature) == temperature


def test_impossible_requests_are_reported(models: Callable[[str], Path], sedd: Sedd, tmp_path: Path) -> None:
    model = SeddLM(str(models("diffusion")))
    with pytest.raises(ValueError, match="33 tokens and the model was trained on 32"):
        model.loglikelihood(requests(("a", "b" * 33)))
    with pytest.raises(ValueError, match="empty"):
        model.loglikelihood(requests(("a", "")))
    with pytest.raises(ValueError, match="max_gen_toks is 33"):
        model.generate_until(requests(("a", {"max_gen_toks": 33})))
    with pytest.raises(ValueError, match="nowhere holds no model"):
        SeddLM("nowhere")
    with pytest.raises(ValueError, match="batch_size is 'auto'"):
        SeddLM(str(models("diffusion")), batch_size="auto")
    with pytest.raises(ValueError, match="draws is 3"):
        SeddLM(str(models("diffusion")), draws=3).loglikelihood(requests(("a", "b")))
    (tmp_path / "names.txt").write_text("anna\nbob\ncarl\nberta\n" * 60)
    records = ["--set", "data.packing=lines", "--set", "model.seq_len=8", "--steps", 1, "--out", tmp_path / "run"]
    ok(sedd("train", tmp_path / "names.txt", *SMALL, *records))
    with pytest.raises(ValueError, match="padded records"):
        SeddLM(load_model(tmp_path / "run"))


def test_the_command_passes_its_arguments_to_the_harness(
    sedd: Sedd, models: Callable[[str], Path], tasks: Path
) -> None:
    words = ["--model", "sedd", "--model_args", f"pretrained={models('diffusion')},draws=4", "--limit", 2]
    ours_alone = (  # the harness's own thousands of tasks take 9 s to list
        "import functools, lm_eval.tasks\n"
        "lm_eval.tasks.TaskManager = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)"
    )
    done = sedd("lm-eval", *words, "--tasks", "tiny_choices", "--include_path", tasks, before=ours_alone)
    ok(done)
    assert "tiny_choices" in done.stdout
    cells = [{cell.strip() for cell in line.split("|")} for line in done.stdout.splitlines()]
    assert any({"Tasks", "Version", "Metric", "Value", "Stderr"} <= row for row in cells)
    assert "acc_norm" in done.stdout
    missing = sedd("lm-eval", "ls", before="sys.modules['lm_eval.__main__'] = None")
    assert missing.returncode == 2
    assert install_hint("lm-eval") in missing.stderr
