"""Settings of the documentation: `make docs` builds guide, results and API, without network."""

from importlib.metadata import version as installed_version
from typing import Any

project = "FIRM"
author = "the FIRM authors"
version = release = installed_version("firm-align")
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_nb"]
nb_execution_mode = "off"  # the notebook's outputs are stored; a test runs it
myst_heading_anchors = 3
myst_enable_extensions = ["dollarmath"]
suppress_warnings = ["myst.header"]
default_role = "code"  # docstrings write `name` for a name
add_module_names = False
python_use_unqualified_type_names = True
maximum_signature_line_length = 80

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"

kept_lines: dict[str, list[str]] = {}

html_theme = "furo"
html_title = f"FIRM {version}"
html_show_sourcelink = html_copy_source = html_show_copyright = False


def hide_signature(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: str, returned: str
) -> tuple[str, None] | None:
    """Hides the signature of a protocol, which would read (*args, **kwargs)."""
    return ("", None) if getattr(obj, "_is_protocol", False) else None


def keep_attributes(app: Any, what: str, name: str, obj: Any, options: Any, lines: list) -> None:
    """Keeps the lines below a field, since napoleon takes the text before a colon for its type."""
    if what in ("attribute", "property"):
        kept_lines[name] = list(lines)


def restore_attributes(app: Any, what: str, name: str, obj: Any, options: Any, lines: list) -> None:
    """Puts the noted lines back after napoleon."""
    lines[:] = kept_lines.pop(name, lines)


def setup(app: Any) -> None:
    """Connects the functions above to autodoc; napoleon's own runs at the default priority, 500."""
    app.connect("autodoc-process-signature", hide_signature)
    app.connect("autodoc-process-docstring", keep_attributes, priority=400)
    app.connect("autodoc-process-docstring", restore_attributes, priority=600)
