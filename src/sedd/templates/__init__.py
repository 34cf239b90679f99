"""HTML pages from Jinja templates: one self-contained file each, with its style and its figures inside.

Every value is escaped unless a template marks it safe, and the base template's Content-Security-Policy forbids
scripts and requests.
"""

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment


@cache
def jinja_environment() -> "Environment":
    """Return the Jinja environment of this folder, with escaping on and undefined names refused."""
    import jinja2

    return jinja2.Environment(
        loader=jinja2.PackageLoader(__name__, ""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render(name: str, **context: Any) -> str:
    """Render the template ``name`` with the variables of ``context``."""
    return jinja_environment().get_template(name).render(context)
