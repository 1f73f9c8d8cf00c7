"""Builds the documentation: ``make docs``."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
import tomllib
from operator import attrgetter
from pathlib import Path
from typing import Any

from sphinx.ext.napoleon import GoogleDocstring
from sphinx.util.nodes import make_refnode

import funcollect

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.harness.plot import write_pages  # noqa: E402

NOTEBOOKS = ROOT / "notebooks"
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
COLAB = REPOSITORY.replace("https://github.com", "https://colab.research.google.com/github")

project = "funcollect"
author = project_copyright = "The funcollect authors"
version = release = funcollect.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.linkcode"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"funcollect {version}"
html_theme_options = {
    "source_repository": REPOSITORY,
    "source_branch": "main",
    "source_directory": "docs/",
}


def _copy_notebooks(folder: Path) -> None:
    """Copy the notebooks to where Sphinx finds them, each with a link to Colab below its introduction."""
    install = f'`!pip install "funcollect[notebooks,ray] @ git+{REPOSITORY}"`'
    folder.mkdir(exist_ok=True)
    for notebook in NOTEBOOKS.glob("*.ipynb"):
        content = json.loads(notebook.read_text())
        link = f"[Open in Colab]({COLAB}/blob/main/notebooks/{notebook.name}), and run {install} there first."
        content["cells"][0]["source"] += ["\n", "\n", link]
        page, text = folder / notebook.name, json.dumps(content)
        if not page.exists() or page.read_text() != text:
            page.write_text(text)


_copy_notebooks(ROOT / "docs" / "notebooks")
write_pages(ROOT / "docs" / "benchmarks")

nb_execution_mode = "off"  # the tests run pages and notebooks, which hold their output
myst_heading_anchors = 3

add_module_names = False
# Members of a base class are shown too, but for these.
_BASES = "object, tuple, Protocol, Generic, ABC, Enum, Iterator, Exception, BaseException"
# What collectors call of each other, and of their workers.
_INTERNAL = "begin_batch, continue_run, count_as, frames_of_batch, of_worker, saved_run"
autodoc_default_options = {
    "members": True,
    "member-order": "bysource",
    "inherited-members": _BASES,
    "exclude-members": _INTERNAL,
}
autodoc_type_aliases = {"Env": "funcollect.Env", "Array": "Array", "npt.DTypeLike": "numpy.typing.DTypeLike"}
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"

napoleon_use_ivar = True
napoleon_custom_sections = ["Returns"]  # as text: a colon in it would end the type
python_maximum_signature_line_length = 88
# Classes of policies, environments and collectors that have the members of a base class or protocol with an entry.
_WITHOUT_ENTRY = """
    collectors.collector.CollectorBase core.state.Array buffers.ring.RingMemory keys.Purpose
    protocols._Backend envs.torch_vector_env.DeviceVectorEnv envs.torch_vector_env.VectorSimulators
    trajectories.final_observations.FinalObservations buffers.storages.packed_rows.RowLayout
    buffers.trajectory_index.Segments
    envs.host.host_env.SimulatedEnv envs.jax_envs.jax_env.FunctionsEnv
    policies.heads.head.FromDistribution policies.jax_functions.jax_policy.JaxPolicy
    policies.by_group.GroupPolicy policies.by_player.PlayerPolicy
    policies.normalized.NormalizedJax policies.normalized.NormalizedTorch
    policies.population.JaxPopulation policies.population.TorchPopulation
    policies.random_policy.RandomPolicy policies.tensordict_modules.tensordict_policy.TensorDictPolicy
    policies.torch_in_jax.LoweredPolicy policies.torch_modules.torch_policy.TorchPolicy
"""
nitpick_ignore = [("py:class", f"funcollect.{name}") for name in _WITHOUT_ENTRY.split()]
suppress_warnings = ["ref.python"]  # a protocol and its base classes have members of the same names

_LITERAL = re.compile(r"(``.*?``|^\s*(?:>>>|\.\.\.).*)")
_AN_ALIAS = re.compile(r"~?(?:\w+\.)*TypeAliasForwardRef\('([\w.]+)'\)")
_A_STAR = re.compile(r"(?<![*\\])\*(?=[a-zA-Z])")
_A_NAME = re.compile(r"(?<![`:])`(?:funcollect\.)?([\w.]+)`(?!`)")
_NAMES = re.compile(r"(?<=^:ivar )\w+(?:, \w+)+(?=:)")
_A_LINK = re.compile(r"\]\((?!https?:|#)([^)\s#]+)(#[^)\s]*)?\)")


def _write_markup(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Write each name in single backticks as a link if it is public, else as code; escape the stars of shapes."""
    for number, line in enumerate(lines):
        parts = _LITERAL.split(line)  # every second one is code
        parts[::2] = [_A_NAME.sub(_link_or_code, _A_STAR.sub(r"\\*", part)) for part in parts[::2]]
        lines[number] = "".join(parts)


_KEPT: dict[str, list[str]] = {}


def _keep_attributes(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Read docstrings of attributes as those of methods: Napoleon takes what is before their first colon for a type."""
    if what in ("attribute", "property"):
        _KEPT[name] = GoogleDocstring(lines, app.config, app, "method", name, obj, options).lines()
        lines.clear()


def _give_attributes_back(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Undo `_keep_attributes` after Napoleon."""
    lines += _KEPT.pop(name, [])


def _join_names(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Write several attributes without spaces, which would make the first ones a type."""
    lines[:] = [_NAMES.sub(lambda names: names[0].replace(", ", ","), line) for line in lines]


def _link_or_code(match: re.Match[str]) -> str:
    first, _, rest = match[1].partition(".")
    owner = getattr(funcollect, first) if first in funcollect.__all__ else None
    if owner is not None and (not rest or hasattr(owner, rest)):
        return f":py:obj:`{match[1]} <funcollect.{match[1]}>`"
    return f"``{match[1]}``"


def _write_factories(app: Any, what: str, name: str, obj: Any, options: Any, signature: Any, returns: Any) -> Any:
    """Write defaults that a factory makes, and names of unions, as Python does."""

    def plain(text: str | None) -> str | None:
        return text and _AN_ALIAS.sub(r"\1", text.replace("<factory>", "{}"))

    return plain(signature), plain(returns)


def _resolve_links(app: Any, page: str, source: list[str]) -> None:
    """Let relative links lead to the page of a file, or to the repository for a file that has none."""
    folder = NOTEBOOKS if page.startswith("notebooks/") else Path(app.srcdir, page).parent

    def resolved(match: re.Match[str]) -> str:
        path, place = (folder / match[1]).resolve(), match[2] or ""
        if not path.exists():
            return match[0]
        if path.is_relative_to(app.srcdir):
            return f"](/{path.relative_to(app.srcdir)}{place})"
        inside = path.relative_to(ROOT)
        if inside.parent == NOTEBOOKS.relative_to(ROOT):
            return f"](/notebooks/{inside.name}{place})"
        return f"]({REPOSITORY}/{'tree' if path.is_dir() else 'blob'}/main/{inside}{place})"

    source[0] = _A_LINK.sub(resolved, source[0])


def _lead_to_sources(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Let the links to a page's source lead to the notebook that it is a copy of; a page made here has none."""
    folder = page.partition("/")[0]
    if folder == "notebooks":
        context["theme_source_directory"] = ""
    elif folder == "benchmarks":
        context["page_source_suffix"] = ""


def linkcode_resolve(domain: str, info: dict[str, str]) -> str | None:
    """The address of a name's source code."""
    try:
        value = attrgetter(info["fullname"])(importlib.import_module(info["module"]))
        value = inspect.unwrap(value.fget if isinstance(value, property) else value)
        file, (lines, first) = Path(inspect.getsourcefile(value) or ""), inspect.getsourcelines(value)
    except (AttributeError, ImportError, OSError, TypeError, ValueError):  # constants, attributes
        return None
    if not file.is_relative_to(ROOT / "funcollect"):
        return None
    return f"{REPOSITORY}/blob/main/{file.relative_to(ROOT)}#L{first}-L{first + len(lines) - 1}"


def _find_public_name(app: Any, env: Any, node: Any, content: Any) -> Any:
    """Let the type of an annotation lead to the entry of its public name; other packages' have none here."""
    target = node.get("reftarget", "")
    if node.get("refdomain") != "py" or not target.startswith("funcollect."):
        return content if node.get("reftype") in ("class", "data") else None
    known = env.get_domain("py").objects
    name = target.rpartition(".")[2]
    for public in (f"funcollect.{name}", f"funcollect.envs.{name}", f"funcollect.heads.{name}"):
        if public in known:
            return make_refnode(
                app.builder, node["refdoc"], known[public].docname, known[public].node_id, content, public
            )
    return None


def setup(app: Any) -> None:
    """Register what this file adds to Sphinx."""
    app.connect("autodoc-process-docstring", _write_markup, priority=100)  # before the sections are read
    app.connect("autodoc-process-docstring", _keep_attributes, priority=400)
    app.connect("autodoc-process-docstring", _give_attributes_back, priority=600)
    app.connect("autodoc-process-docstring", _join_names, priority=900)  # after
    app.connect("autodoc-process-signature", _write_factories)
    app.connect("source-read", _resolve_links)
    app.connect("missing-reference", _find_public_name)
    app.connect("html-page-context", _lead_to_sources)
