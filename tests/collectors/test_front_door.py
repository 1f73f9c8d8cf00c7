"""TorchRL's present front door: `Collector(...)`, `replay_buffer=`, hooks, and the keywords that came with it.

All keywords of collectors are in one table, which `help`, editors and type checkers show.
"""

import ast
import dataclasses
import inspect
import itertools
import re
import signal
import textwrap
import threading

import numpy as np
import pytest
import torch

import funcollect as fc
from funcollect.collectors.keywords import FOREIGN
from tests.support.compare import assert_same
from tests.support.running import ROOT

ENV, FRAMES = "CartPole-v1", {"frames_per_batch": 40, "seed": 3}
LOCAL = {"in_process": True}
DOORS = {
    "here": ({}, fc.SyncDataCollector),
    "direct": ({"backend": "direct"}, fc.SyncDataCollector),
    "async": ({"num_collectors": 2, **LOCAL}, fc.MultiaSyncDataCollector),
    "sync": ({"num_collectors": 2, "sync": True, "backend_options": LOCAL}, fc.MultiSyncDataCollector),
    "process": ({"backend": "process", **LOCAL}, fc.MultiaSyncDataCollector),
}


@pytest.mark.parametrize("door", DOORS)
def test_the_keywords_choose_the_class_whose_data_are_the_same(door):
    keywords, kind = DOORS[door]
    own = {} if kind is fc.SyncDataCollector else {"num_workers": keywords.get("num_collectors", 1), **LOCAL}
    with fc.Collector(ENV, **FRAMES, **keywords) as collector, kind(ENV, **FRAMES, **own) as other:
        assert type(collector) is kind
        assert isinstance(collector, fc.Collector)
        assert isinstance(collector, fc.MultiCollector) == (kind is not fc.SyncDataCollector)
        assert_same(next(collector), next(other))


def test_a_list_of_environments_is_one_for_each_worker_and_a_derived_class_is_itself():
    with fc.MultiCollector([ENV] * 3, sync=True, **FRAMES, **LOCAL) as collector:
        assert next(collector).shape == (3, 14)
    with fc.AsyncCollector(ENV, **FRAMES, **LOCAL) as collector:
        assert isinstance(collector, fc.MultiaSyncDataCollector)
        assert len(collector.run.workers) == 1
    with pytest.raises(ValueError, match="create_env_fn has 2 entries, expected 1"):
        fc.AsyncCollector([ENV] * 2, **FRAMES, **LOCAL)

    ended = []

    class Own(fc.Collector):
        def shutdown(self, *args):
            ended.append(self)
            super().shutdown(*args)

    with Own(ENV, **FRAMES) as collector:
        assert type(collector) is Own
    collector.async_shutdown()
    assert ended == [collector] * 2
    assert not isinstance(collector, fc.MultiCollector)
    with pytest.raises(TypeError, match="sync is True, but Own is one class"):
        Own(ENV, **FRAMES, sync=True)
    assert (fc.MultiSyncCollector, fc.MultiAsyncCollector) == (fc.MultiSyncDataCollector, fc.MultiaSyncDataCollector)


@pytest.mark.parametrize(
    ("keywords", "says"),
    [
        ({"backend": "rpc"}, "but is 'rpc'"),
        ({"sync": True}, "sync=True"),
        ({"backend": "direct", "num_collectors": 2}, "num_collectors=2"),
        ({"num_collectors": 0}, "num_collectors is 0"),
        ({"num_collectors": 2, "num_workers": 3}, "num_collectors is 2, but num_workers is 3"),
        ({"num_collectors": 2, "seed": 1, "backend_options": {"seed": 2}}, r"backend_options has \['seed'\]"),
        ({"trajs_per_write": 2}, "trajs_per_write is 2, but"),
        ({"replay_buffer": 3}, "replay_buffer is int, expected an object with a method extend"),
        ({"pre_collect_hook": lambda batch: None}, "pre_collect_hook"),
        ({"split_trajs": True, "track_traj_ids": False}, "track_traj_ids is False"),
        ({"set_truncated": True, "track_traj_ids": False, "replay_buffer": []}, "track_traj_ids is False"),
        ({"compact_obs": True, "track_traj_ids": False}, "track_traj_ids is False"),
        ({"split_trajs": True, "replay_buffer": []}, "would store padding"),
        ({"max_frames_per_traj": 5, "reset_when_done": False}, "max_frames_per_traj cuts .* reset_when_done=False"),
        ({"env_device": "meta"}, "env_device is meta, but .* runs on cpu: build the environment there"),
        ({"policy": lambda x: x, "policy_factory": dict}, "policy and policy_factory are both given, expected one"),
        ({"policy_factory": lambda: None}, "policy_factory returned None, expected a policy"),
    ],
)
def test_keywords_that_contradict_each_other_are_refused(keywords, says):
    with pytest.raises((TypeError, ValueError), match=says):
        fc.Collector(ENV, **{"frames_per_batch": 8, **keywords})


KINDS = {"here": {}, "sync": DOORS["sync"][0], "async": DOORS["async"][0]}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("start", [False, True], ids=["iterated", "started"])
def test_every_batch_extends_the_buffer(kind, start):
    buffer = fc.ReplayBuffer(storage=fc.LazyTensorStorage(1_000))
    keywords = {**FRAMES, **KINDS[kind], "total_frames": 200, "create_env_kwargs": {"num_envs": 2}}
    collector = fc.Collector(ENV, **keywords, replay_buffer=buffer)
    if start:
        collector.start()
        collector.join()
    else:
        assert {*collector} == {None}
    collector.shutdown()
    with fc.Collector(ENV, **keywords) as other:
        wanted = torch.cat([batch.reshape(-1) for batch in other])
    assert torch.equal(buffer[:]["observation"], wanted["observation"])
    assert collector.stats().items() >= {"completed": True, "total_frames": 200}.items()


@pytest.mark.needs("torchrl")
def test_a_buffer_of_torchrls_whose_storage_has_one_dimension_gets_single_frames():
    """TorchRL's workers write their own frames, so that none of its storages gets a batch of several."""
    from torchrl.data import LazyTensorStorage, ReplayBuffer

    buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=8)
    with fc.Collector(ENV, **FRAMES, **KINDS["sync"], replay_buffer=buffer) as collector:
        next(collector)
    assert (len(buffer), buffer.sample()["observation"].shape) == (40, (8, 4))


@pytest.mark.parametrize("per_write", [None, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_whole_trajectories_are_written_as_they_end_and_none_is_lost(kind, per_write):
    written = []
    buffer = type("Buffer", (), {"extend": lambda self, batch: written.append(batch)})()
    keywords = {**FRAMES, **KINDS[kind], "total_frames": 400, "trajs_per_batch": 1}
    with fc.Collector(ENV, **keywords, replay_buffer=buffer, trajs_per_write=per_write) as collector:
        assert {*collector} == {None}
        in_flight = sum(map(len, collector._pending.values()))
    frames = torch.cat(written)
    assert len(frames) + in_flight == 400
    ids, ends = frames["collector", "traj_ids"], frames["next", "done"][:, 0]
    assert torch.equal(ends, torch.cat([ids[1:] != ids[:-1], torch.tensor([True])]))
    assert len(ids.unique()) == ends.sum()
    if per_write:
        assert max(int(batch["next", "done"].sum()) for batch in written) == per_write


def test_hooks_are_called_here_and_in_every_worker_and_may_be_set():
    calls = []
    marked = lambda batch: batch.set("marked", torch.ones(batch.shape))  # noqa: E731
    with fc.Collector(ENV, **FRAMES, pre_collect_hook=lambda: calls.append(1), post_collect_hook=marked) as collector:
        assert "marked" in next(collector)
        collector.post_collect_hook = None
        assert "marked" not in next(collector)
        assert len(calls) == 2
    with fc.MultiSyncDataCollector([ENV] * 2, **FRAMES, post_collect_hook=marked, on_failure="restart") as collector:
        assert "marked" in next(collector)
        collector.post_collect_hook = _mark_again
        assert (next(collector)["marked"] == 2).all()


def test_the_collector_of_an_actor_that_is_replaced_has_the_hook_that_was_set():
    with fc.MultiSyncDataCollector([ENV], **FRAMES, **LOCAL, post_collect_hook=print) as collector:
        record = collector.run.records[0]
        keywords = {"frames_per_batch": 40, "post_collect_hook": print}
        record.job = dataclasses.replace(record.job, kind=fc.SyncDataCollector, keywords=keywords)
        collector.post_collect_hook = _mark_again
        assert "marked" in next(record.job.collector())


def test_a_hook_may_replace_leaves_by_views_of_others():
    def swapped(batch):
        before, after = batch["observation"], batch["next", "observation"]
        batch["observation"], batch["next", "observation"] = after, before[..., :1, :].expand_as(before)

    both = [
        fc.MultiSyncDataCollector([ENV], **FRAMES, in_process=in_process, post_collect_hook=swapped)
        for in_process in (True, False)
    ]
    for collector in both:
        next(collector)  # whose memory is not shared yet
    for one, other in zip(*(itertools.islice(collector, 2) for collector in both), strict=True):
        assert_same(one, other)
    for collector in both:
        collector.shutdown()


def _policy():
    return fc.torch_policy(torch.nn.Linear(4, 2), head=fc.heads.categorical)


def _mark_again(batch):
    batch.set("marked", torch.full(batch.shape, 2.0))


def test_columns_that_torchrl_has_on_request():
    with fc.Collector(ENV, **FRAMES, track_traj_ids=False, track_policy_version=True) as collector:
        batch = next(collector)
        assert "collector" not in {*batch.keys()}
        assert not batch["policy_version"].any()
        assert torch.equal(batch["next", "policy_version"], batch["policy_version"])
        assert collector.policy_version == 0


def test_weights_for_single_workers_and_frames_for_each():
    weights = {worker: {"weight": torch.full((2, 4), 1.0 + worker), "bias": torch.zeros(2)} for worker in range(2)}
    keywords = {"frames_per_batch": [15, 5], "total_frames": 100, **LOCAL}
    with fc.MultiaSyncDataCollector([ENV] * 2, _policy(), **keywords) as collector:
        collector.update_policy_weights_(weights)
        lengths = {int(batch["collector", "lane"][0]): len(batch) for batch in collector}
        collector.update_policy_weights_(weights[1], np.int64(1))
        collector.update_policy_weights_({np.int64(0): weights[0]})
    assert lengths == {0: 15, 1: 5}
    assert collector.policy_version == 4


def test_a_policy_beside_a_factory_is_the_source_of_weights():
    policy = _policy()
    with fc.MultiSyncDataCollector([ENV] * 2, policy, policy_factory=_policy, **FRAMES, **LOCAL) as collector:
        for version in range(2):
            assert (next(collector)["collector", "policy_version"] == version).all()
            saved = collector.state_dict()["workers"]["0"]["policy_state_dict"]
            assert all(torch.equal(saved[name], weight) for name, weight in policy.module.state_dict().items())
            torch.nn.init.zeros_(policy.module.weight)
            collector.update_policy_weights_()


@pytest.mark.parametrize("trajectories", [None, 2])
def test_what_an_exception_keeps_from_the_buffer_is_written_by_the_next_call(trajectories):
    written, failures = [], iter([False, True, True, False, True])

    class Full:
        def extend(self, batch):
            if next(failures, False):
                raise KeyboardInterrupt
            written.append(batch)

    keywords = {**FRAMES, "total_frames": 200}
    if trajectories:
        keywords |= {"trajs_per_batch": 1, "trajs_per_write": trajectories}
    collector = fc.Collector(ENV, **keywords, replay_buffer=Full())
    with pytest.raises(KeyboardInterrupt):
        for _ in collector:
            pass
    with pytest.raises(fc.ReplayError, match="batches are not in the buffer yet"):
        collector.save("never written")
    while True:
        try:
            next(collector)
        except KeyboardInterrupt:
            continue
        except StopIteration:
            break
    frames = torch.cat([batch.reshape(-1) for batch in written])
    assert len(frames) + sum(map(len, collector._pending.values())) == 200
    assert len(torch.stack([frames["collector", "traj_ids"], frames["collector", "step"]]).unique(dim=1).T) == len(
        frames
    )


@pytest.mark.parametrize("again", ["start", "iterate"])
def test_what_the_buffer_of_a_thread_refuses_comes_first_afterwards(again):
    written, failures = [], iter([False, True])

    class Full:
        def extend(self, batch):
            if next(failures, False):
                raise OSError("full")
            written.append(batch)

    def run():
        collector.start(Full())
        collector.join()

    collector = fc.Collector(ENV, **FRAMES, total_frames=200)
    with pytest.warns(RuntimeWarning, match="no longer filled"), pytest.raises(OSError, match="full"):
        run()
    assert collector.frames == 80
    if again == "start":
        run()
    else:
        written += collector
    frames = torch.cat(written)["collector"]
    assert len(torch.stack([frames["traj_ids"], frames["step"]]).unique(dim=1).T) == len(frames) == 200


def test_ctrl_c_while_one_waits_for_the_thread_does_not_end_the_next_wait():
    gate = threading.Event()

    class Slow(list):
        def extend(self, batch):
            if len(self) == 1:
                threading.Timer(0.05, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT]).start()
                gate.wait(60)
            self.append(batch)

    with fc.Collector(ENV, **FRAMES, total_frames=200) as collector:
        collector.start(buffer := Slow())
        with pytest.raises(KeyboardInterrupt):
            collector.join()
        with pytest.raises(RuntimeError, match="fills a buffer already"):
            collector.start([])
        gate.set()
        collector.join()
        assert len(buffer) == 5


def test_ctrl_c_while_a_buffer_stores_writes_no_batch_twice(monkeypatch):
    buffer, interrupts = fc.ReplayBuffer(), iter([signal.SIGINT])
    real = buffer.sampler.extended
    monkeypatch.setattr(
        buffer.sampler, "extended", lambda *args: [*map(signal.raise_signal, interrupts), real(*args)][-1]
    )
    collector = fc.Collector(ENV, **FRAMES, replay_buffer=buffer)
    with pytest.raises(KeyboardInterrupt):
        next(collector)
    next(collector)
    assert len(buffer) == collector.frames == 80


@pytest.mark.parametrize("start", [False, True], ids=["iterated", "started"])
@pytest.mark.parametrize("name", ["postproc", "pre_collect_hook", "replay_buffer"])
def test_a_stop_iteration_of_the_users_does_not_end_the_run_silently(name, start, recwarn):
    class Buffer:
        def extend(self, batch):
            next(iter(()))

    def exhausted(*_):
        next(iter(()))

    function = Buffer() if name == "replay_buffer" else exhausted
    collector = fc.Collector(ENV, **FRAMES, **{name: function})
    if start:
        collector.start(*([] if name == "replay_buffer" else [Buffer()]))
        collector._filler.thread.join()
    with pytest.raises(RuntimeError, match=r"a function that the collector calls raised StopIteration.*: give"):
        next(collector)
    assert len(recwarn) == start


@pytest.mark.parametrize("kind", ["here", "workers", "statistics"])
def test_weights_that_are_sent_while_a_batch_renews_those_before_are_kept(kind, monkeypatch):
    policy, threads = _policy(), []
    if with_statistics := kind == "statistics":
        policy = fc.normalized(policy, fc.running_statistics.init(fc.make_env(ENV).observation_space))
    keywords = {"update_statistics" if with_statistics else "update_at_each_batch": True}

    def send(value):
        weights = {"weight": torch.full((2, 4), value), "bias": torch.zeros(2)}
        collector.update_policy_weights_((weights, policy.statistics) if with_statistics else weights)

    def prepare(self, params):
        if not threads:
            threads.append(threading.Thread(target=send, args=(2.0,)))
            threads[0].start()
            threads[0].join(0.1)  # it has to wait for the batch
        return real(self, params)

    keywords |= {"num_collectors": 2, "sync": True, **LOCAL} if kind == "workers" else {}
    with fc.Collector(ENV, policy, **FRAMES, **keywords) as collector:
        send(1.0)
        next(collector)
        real = type(policy).prepare
        monkeypatch.setattr(type(policy), "prepare", prepare)
        next(collector)
        threads[0].join()
        weights = collector.params[0] if with_statistics else collector.params
        assert (weights["weight"] == 2.0).all()


def test_the_thread_that_fills_cannot_wait_for_itself_and_may_end_the_run():
    refused = []

    class Buffer:
        def extend(self, batch):
            with pytest.raises(RuntimeError, match="cannot wait for itself"):
                collector.pause()
            refused.append(batch)
            collector.shutdown()

    collector = fc.Collector(ENV, **FRAMES, replay_buffer=Buffer())
    collector.start()
    collector._filler.thread.join()
    assert len(refused) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_none_is_the_default_of_a_keyword_as_in_torchrls_signatures(kind):
    names = ["split_trajs", "traj_format", "total_frames", *["num_threads", "cat_results"] * (kind != "here")]
    keywords = FRAMES | KINDS[kind]
    with fc.Collector(ENV, **keywords, **dict.fromkeys(names)) as collector, fc.Collector(ENV, **keywords) as other:
        assert_same(next(collector), next(other))


def test_a_run_goes_on_while_whole_trajectories_are_left():
    collector = fc.Collector(ENV, frames_per_batch=200, seed=3, total_frames=200, trajs_per_batch=1)
    batches = [collector.next() for _ in iter(collector.is_running, False)]
    assert len(batches) > 1
    assert collector.next() is None


def test_a_paused_run_is_not_waited_for_where_it_was_paused():
    collector = fc.Collector(ENV, **FRAMES, total_frames=100_000)
    collector.start([])
    collector.pause()
    with pytest.raises(RuntimeError, match=r"is paused and would not end: call resume\(\) before"):
        collector.join()
    collector.shutdown()
    collector.join()


def test_any_door_loads_what_another_has_saved(tmp_path):
    with fc.AsyncCollector(ENV, **FRAMES, **LOCAL) as collector:
        next(collector)
        collector.save(tmp_path / "run")
        wanted = next(collector)
    for door in (fc.Collector, fc.MultiCollector, fc.AsyncCollector, fc.MultiaSyncDataCollector):
        with door.load(tmp_path / "run", [ENV], **LOCAL) as loaded:
            assert type(loaded) is fc.MultiaSyncDataCollector
            assert_same(next(loaded), wanted)
    with fc.Collector.load(tmp_path / "run", [ENV], num_collectors=1, sync=False, **LOCAL) as loaded:
        assert_same(next(loaded), wanted)
    with pytest.raises(ValueError, match="that of a MultiaSyncDataCollector, this is a MultiSyncDataCollector"):
        fc.Collector.load(tmp_path / "run", [ENV], sync=True, num_collectors=1, **LOCAL)
    with pytest.raises(ValueError, match="that of a MultiaSyncDataCollector, this is a SyncDataCollector"):
        fc.SyncDataCollector.load(tmp_path / "run", ENV)


def test_weights_by_worker_are_not_mistaken_and_not_overwritten():
    policy = fc.jax_policy(
        lambda params, x: x @ params[0] + params[1],
        {0: np.zeros((4, 2), "f"), 1: np.zeros(2, "f")},
        head=fc.heads.categorical,
    )
    with fc.MultiSyncDataCollector([ENV] * 2, policy, **FRAMES, **LOCAL) as collector:
        collector.update_policy_weights_(policy.params)
        assert collector.policy_version == 1
    with fc.MultiSyncDataCollector([ENV] * 2, _policy(), update_at_each_batch=True, **FRAMES, **LOCAL) as collector:
        with pytest.raises(ValueError, match="update_at_each_batch is True, so all workers get the same"):
            collector.update_policy_weights_(worker_ids=0)
        with pytest.raises(TypeError, match="pre_collect_hook is 3"):
            collector.pre_collect_hook = 3


def test_stats_by_worker():
    with fc.MultiCollector([ENV] * 2, sync=True, **FRAMES, **LOCAL) as collector:
        next(collector)
        both, each = collector.stats("both", timeout=1.0), collector.stats("per_worker")
        with pytest.raises(
            ValueError, match=r"workers must be one of \['aggregate', 'both', 'per_worker'\], but is 'x'"
        ):
            collector.stats("x")
    assert each == {
        f"worker_{worker}/{name}": value for worker in (0, 1) for name, value in (("frames", 20), ("batches", 1))
    }
    assert both.items() >= {**each, "worker_frames": 40, "frames": 40}.items()
    assert collector.stats().keys() == both.keys() - each.keys()


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
    page = (ROOT / "docs" / "coming_from" / "from_torchrl.md").read_text()
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
