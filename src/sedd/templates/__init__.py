"""HTML pages from Jinja templates: one self-contained file each, with its style and its figures inside.

Every value is escaped unless a template marks it safe, and the base template's Content-Security-Policy forbids
requests, forms and all scripts but those whose hash it names.
"""

import base64
import hashlib
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

FOLDER = Path(__file__).parent


def script(name: str) -> Markup:
    """Return a script of this folder, which a page contains as it is."""
    return Markup((FOLDER / name).read_text(encoding="utf-8"))


def script_hash(name: str) -> str:
    """Return the source of a script in a Content-Security-Policy: no other script runs on the page."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script(name).encode()).digest()).decode()}"


environment = Environment(
    loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)
environment.globals |= {"script": script, "script_hash": script_hash}


def render(name: str, **context: Any) -> str:
    """Render the template ``name`` with the variables of ``context``."""
    return environment.get_template(name).render(context)
