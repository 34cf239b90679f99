"""The guides that answer questions agree with the code, the stored results and the tests they name."""

import ast
import functools
import json
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sedd import recipes
from sedd.evaluation.protocols import DATASETS
from sedd.runtime.device import FP8_CAPABILITY, TRITON_CAPABILITY
from sedd.training import step

ROOT = Path(__file__).parents[2]
GUIDES = ROOT / "docs/guides"


def page(name: str) -> str:
    return (GUIDES / f"{name}.md").read_text()


def stored(path: str) -> Any:
    return json.loads((ROOT / path).read_text())


def bits(row: str) -> float:
    """Return the bits per character of an objective after 20 seconds, the mean over seeds."""
    runs = [run for run in stored("experiments/results/objectives.json")["rows"].values() if run["row"] == row]
    return float(sum(run["evaluation"]["bits_per_char"] for run in runs) / len(runs))


def long_bits(run: str) -> float:
    return float(stored("benchmarks/results/text8p-h200.json")["runs"][run]["evaluation"]["bits_per_char"])


def perplexity(sampler: str, steps: int) -> float:
    rows = stored("experiments/results/quality-stories.json")["rows"]
    return float(rows[f"{sampler}, {steps} steps, temperature 1, float64 draws"]["gen_ppl_by_token"])


def perplexities(sampler: str) -> str:
    return ", ".join(f"{perplexity(sampler, steps):.1f}" for steps in (8, 32, 128))


MEASURED = {  # the last column of the table of choosing.md, by the name in its second
    "absorbing": f"{bits('SEDD absorbing'):.4f} (score entropy); {long_bits('absorbing'):.4f} after 230 s",
    "uniform": f"{bits('SEDD uniform'):.4f} (score entropy); {long_bits('uniform'):.4f} after 230 s",
    "lambda-dce": f"{bits('RADD λ-DCE'):.4f}",
    "any-order": f"{bits('RADD any-order'):.4f}",
    "t-dce": f"{bits('RADD t-DCE'):.4f}",
    "score-entropy": f"{bits('SEDD absorbing'):.4f}",
    "d3pm": f"{bits('D3PM absorbing'):.4f}, {bits('D3PM uniform'):.4f}",
    "mean": f"{bits('mean prediction'):.4f}",
    "concrete-score": f"{bits('concrete score, any sign'):.4f}, {bits('concrete score, positive'):.4f}",
    "autoregressive": f"{bits('autoregressive'):.4f}",
    **{
        sampler: perplexities(sampler)
        for sampler in ("first-hitting", "tweedie", "theta", "remask", "euler", "confidence")
    },
    "128": f"see above; {perplexity('first-hitting', 1024):.1f} at 1024 steps",
}
WITHOUT_A_NUMBER = {"log-linear", "geometric", "cosine, polynomial", "gibbs", "what the objective needs", "1"}


def test_the_table_of_choices_has_the_stored_numbers() -> None:
    rows = re.findall(r"^\| [a-z]* ?\| (.+?) \| (.+?) \|(.*)\|$", page("choosing"), re.MULTILINE)
    found = {re.sub(r"[*`]", "", choice): cell.strip() for choice, _, cell in rows if choice != "choice"}
    numbers = {choice: cell for choice, cell in found.items() if choice not in WITHOUT_A_NUMBER}
    assert numbers == MEASURED
    assert not any(re.search(r"\d", found[choice]) for choice in WITHOUT_A_NUMBER)


def test_sentences_of_the_choices_have_the_stored_numbers() -> None:
    text = " ".join(page("choosing").split())
    quality = stored("experiments/results/quality-stories.json")["rows"]
    at_one = [row for row in quality.values() if row["temperature"] == 1 and row["draws"] == "float64"]
    entropies = [row["entropy_nats"] for row in at_one if row["sampler"] != "confidence"]
    others = [row["entropy_nats"] for row in at_one if row["sampler"] == "confidence"]
    sure = ", ".join(f"{perplexity('confidence', steps):.1f}" for steps in (256, 512, 1024))
    assert f"the lowest perplexity of all ({sure} at 256, 512, 1024 steps), at a higher entropy" in text
    at_most_tokens = [row for row in at_one if row["steps"] >= 256]
    assert max(at_most_tokens, key=lambda row: -row["gen_ppl_by_token"])["sampler"] == "confidence"
    assert min(others) > max(entropies)
    here = f"between {min(entropies):.2f} and {max(entropies):.2f} nats, and for `confidence` between"
    assert f"{here} {min(others):.2f} and {max(others):.2f}" in text
    shorter, longer = bits("SEDD uniform") - bits("SEDD absorbing"), long_bits("uniform") - long_bits("absorbing")
    assert f"by {shorter:.2f} bits per character after 20 seconds, by {longer:.2f} after 230" in text
    assert f"It is {bits('SEDD absorbing') - bits('RADD λ-DCE'):.2f} bits per character behind" in text
    theta, hitting = (quality[f"{name}, 8 steps, temperature 1, float64 draws"] for name in ("theta", "first-hitting"))
    assert f"with {theta['nfe']:.1f} network calls in place of {hitting['nfe']:.1f}" in text
    calls = quality["first-hitting, 1024 steps, temperature 1, float64 draws"]
    assert f"1024 steps on {calls['length']} positions took {calls['nfe']:.0f} network calls" in text


def test_significance_in_the_choices_is_that_of_the_results() -> None:
    """The names of rows on the results page, and the objectives of the guide."""
    text, results = " ".join(page("choosing").split()), (ROOT / "docs/results.md").read_text()
    names = {"RADD any-order": "any-order", "RADD t-DCE": "t-dce", "D3PM absorbing": "d3pm"}
    names |= {"mean prediction": "mean", "SEDD absorbing": "score-entropy"}
    close: dict[str, str] = {}
    for better, others in re.findall(r"^- (.+) is not significantly better than (.+)\.$", results, re.MULTILINE):
        for worse, p in re.findall(r"([^,(]+?) \(p = ([\d.]+)\)(?:, )?", others):
            if "RADD λ-DCE" in (better, worse):
                close[worse if better == "RADD λ-DCE" else better] = p
    assert set(close) == set(names)
    for row, p in close.items():
        assert f"`{names[row]}` (p = {p})" in text
    (significant, differences) = re.findall(r"(\d+) of (\d+) differences are significant", results)[0]
    assert (
        f"Of the {differences} differences between the rows of the [results](../results.md) {significant} are" in text
    )


def test_values_to_expect_are_stored() -> None:
    lines = [json.loads(line) for line in (ROOT / "benchmarks/results/scaling.jsonl").read_text().splitlines()]

    def small_run(tokenizer: str, tokens: int) -> float:
        kind = {"corpus": "shakespeare.txt", "tokenizer": tokenizer, "width": 64, "depth": 2, "tokens": tokens}
        return float(next(line["bits"] for line in lines if kind.items() <= line.items()))

    expected = [math.log2(27), bits("RADD λ-DCE"), bits("SEDD absorbing"), bits("SEDD uniform")]
    expected += [long_bits("absorbing"), long_bits("uniform"), long_bits("long"), bits("autoregressive")]
    expected += [small_run("bytes", 1_024_000), small_run("bpe:1024", 1_024_000)]
    expected += [stored("experiments/results/stories.json")["run"]["result"]["bits_per_char"]]
    section = page("loss").partition("## Values to expect")[2].partition("\n## ")[0]
    found = [float(value) for value in re.findall(r"\| (\d\.\d{3}) \|$", section, re.MULTILINE)]
    assert found == pytest.approx(expected, abs=6e-4)


def test_the_keys_of_the_log_are_listed() -> None:
    """Those that the training loop writes; samples are logged on request alone."""
    section = page("loss").partition("## Loss by time")[2].partition("\n## ")[0]
    listed = {key for row in re.findall(r"^\| (`.+?`) \|", section, re.MULTILINE) for key in re.findall("`(.+?)`", row)}
    sources = [(ROOT / "src/sedd/training" / name).read_text() for name in ("loop.py", "validation.py")]
    for key in listed:
        assert any(f'"{key}"' in source for source in sources), key
    assert {"loss", "bits_per_char", "grad_norm", "loss_by_time", "skipped", "bound", "bound_stderr"} <= listed
    assert step.TIME_BINS == 10


# Error messages ----------------------------------------------------------------------------------------------


class Message(NamedTuple):
    """A string of the source as a pattern, in which a value is any text."""

    pattern: re.Pattern[str]
    literal: int
    """Number of characters that are not values."""


@functools.cache
def messages() -> list[Message]:
    found = []
    for path in (ROOT / "src/sedd").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            texts = [part.value if isinstance(part, ast.Constant) else None for part in parts]
            literals = [text for text in texts if isinstance(text, str)]
            if literals:
                pattern = "".join(re.escape(text) if isinstance(text, str) else ".*" for text in texts)
                found.append(Message(re.compile(pattern, re.DOTALL), sum(map(len, literals))))
    return found


def is_printed(message: str) -> bool:
    """Return whether a string of the source is the whole message or, with 60 characters of its own, a part of it."""
    return any(
        m.pattern.fullmatch(message) if m.literal < 60 else m.pattern.search(message)
        for m in messages()
        if m.literal >= 25  # shorter ones would match anything
    )


QUOTED = re.findall(r"^> (.+)$", page("troubleshooting"), re.MULTILINE)


@pytest.mark.parametrize("message", QUOTED, ids=lambda message: message[:40])
def test_a_quoted_message_is_one_of_the_source(message: str) -> None:
    assert is_printed(message)


def test_a_message_that_nothing_prints_is_found() -> None:
    """Mutant: another remedy in place of the right one."""
    right = "a batch of 7 cannot be shared by 1 processes, each in 2 equal parts; make it a multiple"
    assert right in QUOTED
    assert not is_printed(right.replace("multiple", "divisor"))


def test_capabilities_are_those_of_the_code() -> None:
    text = " ".join(page("troubleshooting").split())
    assert "compute capability {}.{} or higher".format(*TRITON_CAPABILITY) in text
    assert "`train.precision=float8` needs {}.{}".format(*FP8_CAPABILITY) in text


# Footguns and the paper ----------------------------------------------------------------------------------------


def test_tests_named_in_the_footguns_exist() -> None:
    names = set(re.findall(r"\btest_\w+", page("footguns").replace(".py", "")))
    files = list((ROOT / "tests").rglob("test_*.py"))
    defined = {name for path in files for name in re.findall(r"def (test_\w+)", path.read_text())}
    assert len(names) > 10
    assert names <= defined | {path.stem for path in files}


def test_the_recipes_are_those_of_the_paper() -> None:
    """The table of reproducing.md, as the recipes hold it."""
    text = page("reproducing")
    for name, network in (("small", "12 blocks, width 768, 12 heads"), ("medium", "24 blocks, width 1024, 16 heads")):
        recipe = recipes.RECIPES[name]
        model, optim = recipe["model"], recipe["optim"]
        assert network in text
        assert f"{model['depth']} blocks, width {model['width']}, {model['heads']} heads" == network
        assert (model["seq_len"], recipe["train"]["batch_size"], model["dropout"]) == (1024, 512, 0.1)
        assert (optim["lr"], optim["beta2"], optim["warmup_steps"], optim["ema_decay"]) == (3e-4, 0.999, 2500, 0.9999)
        assert recipe["budget"]["steps"] == 400_000
        assert optim["lr_schedule"] == "constant"
    assert f"{512 * 1024:,} tokens per step" in text


def test_published_numbers_are_the_stored_ones() -> None:
    published = stored("experiments/published.json")
    rows = published["zero_shot"]["rows"]
    found = re.findall(r"^\| ((?:SEDD|GPT-2) [a-z ]+) \|(.+)\|$", page("reproducing"), re.MULTILINE)
    assert len(found) == 5
    for name, cells in found:
        assert [float(cell) for cell in cells.split("|")] == rows[name]["values"]
    columns = published["zero_shot_mdlm"]["columns"]
    sedd = dict(zip(columns, published["zero_shot_mdlm"]["rows"]["SEDD"]["values"], strict=True))
    shown = f"SEDD there: PTB {sedd['ptb']:.2f}, LM1B {sedd['lm1b']:.2f}, LAMBADA {sedd['lambada']:.2f}"
    assert shown in page("reproducing")


def test_names_of_benchmark_files_are_those_of_the_protocols() -> None:
    page = (ROOT / "docs/guides/likelihood.md").read_text()
    rows = re.findall(r"^\| (LAMBADA|WikiText-2|WikiText-103|PTB|One Billion Words) \| (.+?) \|", page, re.MULTILINE)
    shown = {title.replace("One Billion Words", "LM1B"): re.findall("`(.+?)`", names) for title, names in rows}
    assert shown == {d.title: [name for names in d.files.values() for name in names] for d in DATASETS.values()}


def test_what_guides_state_of_serving_and_checkpoints_is_stored() -> None:
    serving = stored("benchmarks/results/serve-h200.json")
    many = next(load for load in serving["loads"] if load["variant"] == "64 clients")
    share = many["tokens_per_second"] / serving["offline_tokens_per_second"]
    assert f"64 clients of a network of the published small size had {share:.0%}".replace("%", " %") in page("serve")
    run = stored("benchmarks/results/saving-h200.json")["runs"]["text8"]
    cost = (run["waited_seconds"] + run["slowed_seconds"]) / run["checkpoints"]
    every, last = run["save_every"] * run["seconds_per_step"], run["training"]["save_seconds"] - run["waited_seconds"]
    stated = f"{100 * cost / (cost + every):.1f} % of the time, and {last:.1f} s at the end of a run of `text8`"
    assert stated in " ".join(page("training").split())


def test_what_the_guide_states_of_molecules_is_stored() -> None:
    results, text = stored("experiments/results/molecules.json"), " ".join(page("models").split())
    trained, measured, cooler = (
        results["train"]["result"],
        *(results[name]["result"] for name in ("quality", "temperature 0.6")),
    )
    for stated in (
        f"trained for {trained['seconds']:.0f} seconds on one GPU on the training split of MOSES",
        f"{results['export']['result']['parameters'] / 1e6:.1f} million weights in int8, "
        f"{results['export']['folder_bytes'] / 1e6:.1f} MB",
        f"Of {measured['samples']:,} molecules at temperature 1, {100 * measured['validity']:.1f} % are valid by RDKit",
        f"{100 * measured['novelty']:.1f} % of them not in the training data",
        f"of {cooler['samples']} at 0.6, {100 * cooler['validity']:.1f} % are valid",
        f"and {100 * cooler['novelty']:.1f} % of those new",
    ):
        assert stated in text
    assert measured["uniqueness"] == 1


def test_perplexities_of_both_precisions_are_stored() -> None:
    rows, text = stored("experiments/results/quality-stories-cpu.json")["rows"], " ".join(page("quality").split())

    def numbers(draws: str, *steps: int) -> str:
        found = (rows[f"tweedie, {count} steps, temperature 1, {draws} draws"] for count in steps)
        *first, last = (f"{row['gen_ppl_by_token']:.1f}" for row in found)
        return f"{', '.join(first)} and {last} with {draws} draws at"

    assert numbers("float64", 64, 256) in text
    assert numbers("float32", 64, 256, 1024, 4096) in text
