"""Text generation: sampling runs, templates with gaps, greedy decoding, and pictures of how a text formed."""

from typing import TYPE_CHECKING

from sedd.lazy import lazy_names

if TYPE_CHECKING:
    from sedd.generate import display, settings, template, trace
    from sedd.generate.greedy import decode_greedy
    from sedd.generate.run import GeneratedSequence, SamplingRun, SamplingStats, blank_prompt, final_sequences
    from sedd.generate.settings import SamplingSettings
    from sedd.generate.watch import watch_states

__all__ = [
    "GeneratedSequence",
    "SamplingRun",
    "SamplingSettings",
    "SamplingStats",
    "blank_prompt",
    "decode_greedy",
    "display",
    "final_sequences",
    "settings",
    "template",
    "trace",
    "watch_states",
]

__getattr__ = lazy_names(
    __name__,
    {
        "display": [],
        "greedy": ["decode_greedy"],
        "run": ["GeneratedSequence", "SamplingRun", "SamplingStats", "blank_prompt", "final_sequences"],
        "settings": ["SamplingSettings"],
        "template": [],
        "trace": [],
        "watch": ["watch_states"],
    },
)
