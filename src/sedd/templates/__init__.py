"""HTML pages from Jinja templates: one self-contained file each, with its style and its figures inside.

Every value is escaped unless a template marks it safe, and the base template's Content-Security-Policy forbids
requests, forms and all scripts but those whose hash it names.
"""

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup


@cache
def jinja_environment() -> "Environment":
    """Return the Jinja environment of this folder; it escapes values and raises an error for undefined names."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__name__, ""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {"script": script, "script_hash": script_hash}
    return environment


def script(name: str) -> "Markup":
    """Return a script of this folder, which a page contains as it is."""
    from markupsafe import Markup

    return Markup((Path(__file__).parent / name).read_text(encoding="utf-8"))


def script_hash(name: str) -> str:
    """Return the source of a script in a Content-Security-Policy: no other script runs on the page."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script(name).encode()).digest()).decode()}"


def render(name: str, **context: Any) -> str:
    """Render the template ``name`` with the variables of ``context``."""
    return jinja_environment().get_template(name).render(context)
