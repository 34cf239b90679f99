"""Text generation: sampling runs, templates with gaps, greedy decoding, and pictures of how a text formed."""

from sedd.generate import display, template, trace
from sedd.generate.greedy import decode_greedy
from sedd.generate.run import GeneratedSequence, SamplingRun, SamplingStats, blank_prompt, final_sequences
from sedd.sampling_settings import SamplingSettings

__all__ = [
    "GeneratedSequence",
    "SamplingRun",
    "SamplingSettings",
    "SamplingStats",
    "blank_prompt",
    "decode_greedy",
    "display",
    "final_sequences",
    "template",
    "trace",
]
