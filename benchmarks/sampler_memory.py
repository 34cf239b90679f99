"""Peak memory of one step of every sampler, at vocabulary 50,257, length 1024 and batch 16.

.venv/bin/python benchmarks/sampler_memory.py            a table
.venv/bin/python benchmarks/sampler_memory.py --json     a JSON record, as in benchmarks/results/

The network is small (width 64, 1 block), so that the memory of the sampler dominates. A step calls the network, applies
the output layer and samples; the last column is the size of a (batch, length, vocabulary) tensor in float32, which no
sampler allocates. On a CPU the peak is that of the resident memory above its level before the step, in a new process;
on a GPU that of the allocator.
"""

import argparse
import json
import multiprocessing
import platform
import resource
import subprocess

import torch

from sedd import samplers, sampling_settings
from sedd.nn import transformer
from sedd.registry import PARAMETERIZATIONS
from sedd.training.config import PROCESSES

VOCABULARY, LENGTH, BATCH = 50_257, 1024, 16
FULL_TENSOR = BATCH * LENGTH * (VOCABULARY + 1) * 4
NOISES = {"gibbs": ["uniform"], "tweedie": ["absorbing", "uniform"], "euler": ["absorbing", "uniform"]}
NOISES |= {"theta": ["absorbing", "uniform"], "ancestral": ["absorbing", "uniform"]}


def peak(name: str, noise: str, device: str) -> int:
    """Return the bytes allocated at the peak of a step."""
    process = PROCESSES.build(noise, VOCABULARY)
    network = transformer.Modern(states=process.num_states, width=64, depth=1, heads=2).to(device).requires_grad_(False)
    model = PARAMETERIZATIONS.build("mean", network, process)
    options = {"bound": 1e9} if name == "entropy" else {}  # reveals all tokens at once
    settings = samplers.SamplingSettings(name, steps=2, options=options)
    sampling_run = samplers.SamplingRun(model, settings)
    prompt = samplers.empty(BATCH, LENGTH, device)
    if device == "cpu":
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    else:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    states = sampling_run.states(prompt)
    for _ in range(2):  # the prior, and one step
        next(states)
    if device == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    return torch.cuda.max_memory_allocated() - before


def main(as_json: bool) -> None:
    """Measure every sampler under every process it supports."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = {}
    for name in sampling_settings.SAMPLERS.built_in:
        for noise in NOISES.get(name, ["absorbing"]):
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                found[f"{name}, {noise}"] = pool.apply(peak, (name, noise, device))
            if not as_json:
                mebibytes = found[f"{name}, {noise}"] / 2**20
                print(f"{name:12s} {noise:10s} {mebibytes:9.0f} MiB   of {FULL_TENSOR / 2**20:.0f} MiB")
    if as_json:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        record = {
            "command": "python benchmarks/sampler_memory.py --json",
            "commit": commit.stdout.strip(),
            "torch": torch.__version__,
            "machine": torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()}, CPU",
            "vocabulary": VOCABULARY,
            "length": LENGTH,
            "batch": BATCH,
            "batch_length_vocabulary_bytes": FULL_TENSOR,
            "peak_bytes": found,
        }
        print(json.dumps(record, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON record")
    main(parser.parse_args().json)
