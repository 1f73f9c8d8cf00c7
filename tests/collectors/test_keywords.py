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
from funcollect.collectors.keywords import FOREIGN

COLLECTORS = (fc.SyncDataCollector, fc.MultiSyncDataCollector, fc.MultiaSyncDataCollector, fc.RayCollector)
OTHERS = {"in_process", "update_at_each_batch", "collector_class"}  # of other classes of this library
NOT_IGNORED = object()


@pytest.mark.parametrize("kind", COLLECTORS)
def test_help_describes_every_keyword_once_with_type_and_default(kind):
    parameters = inspect.signature(kind).parameters
    section = re.search(r"^Args:\n((?: +.*\n|\n)*)", kind.__doc__, re.M)[1]
    assert sorted(re.findall(r"^    (\w+): \S", section, re.M)) == sorted(parameters)
    assert not [each for each in parameters.values() if each.annotation is each.empty or type(each.annotation) is str]
    required = {name for name, each in parameters.items() if each.default is each.empty}
    assert required == {"create_env_fn"}
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
def test_a_keyword_of_torchrls_is_ignored_if_the_call_means_the_same_and_explained_if_not(kind):
    page = (pathlib.Path(__file__).parents[2] / "docs" / "coming_from" / "from_torchrl.md").read_text()
    foreign = FOREIGN.keys() - inspect.signature(kind).parameters.keys()
    for name in foreign:
        assert f"`{name}`" in page or name in OTHERS, name
        if not FOREIGN[name].ignored(NOT_IGNORED, {}):
            with pytest.raises(TypeError, match=rf"{name}=.* \({re.escape(FOREIGN[name].why)}\): leave it out"):
                kind("CartPole-v1", frames_per_batch=8, **{name: NOT_IGNORED})
    if kind is fc.SyncDataCollector:
        means_the_same = {"use_buffers": True, "preemptive_threshold": 1.0, "weight_sync_schemes": {"policy": object()}}
        with kind("CartPole-v1", frames_per_batch=8, **dict.fromkeys(foreign) | means_the_same) as collector:
            assert len(next(collector)) == 8
