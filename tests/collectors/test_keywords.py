"""The keywords of collectors: one table, which `help`, editors and type checkers show."""

import ast
import dataclasses
import inspect
import itertools
import pathlib
import re
import textwrap

import pytest

import funcollect as fc
from funcollect.collectors.options import ONLY_IN_TORCHRL

COLLECTORS = (fc.SyncDataCollector, fc.MultiSyncDataCollector, fc.MultiaSyncDataCollector, fc.RayCollector)
CHOICES = ("backend", "num_collectors", "sync")  # by which TorchRL chooses one of these classes


@pytest.mark.parametrize("kind", COLLECTORS)
def test_help_describes_every_keyword_once_with_type_and_default(kind):
    parameters = inspect.signature(kind).parameters
    section = re.search(r"^Args:\n((?: +.*\n|\n)*)", kind.__doc__, re.M)[1]
    assert sorted(re.findall(r"^    (\w+): \S", section, re.M)) == sorted(parameters)
    assert not [each for each in parameters.values() if each.annotation is each.empty or type(each.annotation) is str]
    required = {name for name, each in parameters.items() if each.default is each.empty}
    assert required == {"create_env_fn", "frames_per_batch"}
    assert [*parameters][:3] == ["create_env_fn", "policy", "frames_per_batch"]
    positional = {name for name, each in parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD}
    assert positional == {"create_env_fn", "policy"}


@pytest.mark.parametrize("kind", COLLECTORS)
def test_a_meaning_stands_below_each_declaration_of_a_keyword_and_none_is_declared_twice(kind):
    """An editor shows the string below the declaration that is nearest in the order of bases."""
    found = {name: [] for name in inspect.signature(kind).parameters}
    for base in kind.__mro__:
        if base.__module__.startswith("funcollect"):
            body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body
            for statement, below in itertools.pairwise(body):
                if isinstance(statement, ast.AnnAssign) and statement.target.id in found:
                    assert isinstance(below, ast.Expr), f"{base.__name__}.{statement.target.id}"
                    assert isinstance(below.value.value, str)
                    own = (ast.unparse(statement.annotation), below.value.value)
                    found[statement.target.id] += [own] * dataclasses.is_dataclass(base)
    assert all(found.values()), [name for name, each in found.items() if not each]
    assert all(len(each) == len({*each}) for each in found.values()), "declared again without another type or meaning"


@pytest.mark.parametrize("kind", COLLECTORS)
def test_an_unknown_keyword_is_named_also_below_a_class_of_ones_own(kind):
    class Own(kind):
        def __init__(self, *args, extra=0, **keywords):
            super().__init__(*args, **keywords)
            self.extra = extra

    says = r"\['frames_per_bach'\] are unknown \(perhaps you meant frames_per_batch\), .* as create_env_kwargs"
    for each in (kind, Own):
        with pytest.raises(TypeError, match=says):
            each("CartPole-v1", frames_per_batch=10, frames_per_bach=10)


@pytest.mark.parametrize("kind", COLLECTORS)
def test_a_keyword_that_only_torchrl_has_is_explained_here_and_on_the_page(kind):
    page = (pathlib.Path(__file__).parents[2] / "docs" / "coming_from" / "from_torchrl.md").read_text()
    for name in {*ONLY_IN_TORCHRL, *CHOICES} - inspect.signature(kind).parameters.keys():
        reason = re.escape(ONLY_IN_TORCHRL[name]) if name in ONLY_IN_TORCHRL else ".*MultiSyncDataCollector.*"
        with pytest.raises(TypeError, match=rf"no argument {name} \({reason}\): leave it out"):
            kind("CartPole-v1", frames_per_batch=8, **{name: None})
        assert name in CHOICES or f"`{name}`" in page
