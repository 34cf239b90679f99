"""HTML pages from Jinja templates: one self-contained file each, with its style and its figures inside.

Every value is escaped unless a template marks it safe, and the base template's Content-Security-Policy forbids
requests, forms and all scripts but those whose hash it names.
"""

import base64
import hashlib
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def script_hash(script: str) -> str:
    """Return the source of a script in a Content-Security-Policy: no other script runs on the page."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"


environment = Environment(
    loader=PackageLoader("sedd", "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
environment.filters["script_hash"] = script_hash


def render(name: str, **context: Any) -> str:
    """Render the template ``name`` with the variables of ``context``."""
    return environment.get_template(name).render(context)
