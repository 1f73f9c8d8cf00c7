"""Checkpoints: training runs killed at any moment and continued, and what a checkpoint refuses."""

import random
import signal
import subprocess
import sys
import time
from collections import OrderedDict

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import funcollect as fc
from tests.support.compare import assert_same
from tests.support.misuse import refused
from tests.support.programs.resumable import RUNS, main
from tests.support.running import ROOT, SCALE, in_soak, scaled

BATCHES = 11  # and one more for every kill


def log(directory):
    path = directory / "log"
    return [tuple(line.split()) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize("kind", ["dqn", *in_soak(kind for kind in RUNS if kind != "dqn")])
def test_a_killed_run_continues_bit_for_bit(kind, tmp_path):
    kills, chance = scaled(2) if SCALE > 1 else 1, random.Random(kind)
    batches = BATCHES + kills
    main(kind, tmp_path / "whole", batches)
    whole = dict(log(tmp_path / "whole"))
    assert len(whole) == batches + 1
    killed = tmp_path / "killed"
    command = [sys.executable, "-m", "tests.support.programs.resumable", kind, str(killed), str(batches)]
    for kill in range(kills):
        process, target = subprocess.Popen(command, cwd=ROOT), 1 + (BATCHES - 1) * kill // kills + chance.randrange(3)
        while process.poll() is None and len(dict(log(killed))) < target:
            time.sleep(0.002)
        time.sleep(chance.random() * 0.02)  # anywhere in a batch, an update or a checkpoint
        process.send_signal(signal.SIGKILL)
        process.wait()
    main(kind, killed, batches)
    lines = log(killed)
    assert {number: whole[number] for number, _ in lines} == dict(lines)
    assert all(whole[number] == digest for number, digest in lines)
    assert dict(lines) == whole


@pytest.fixture
def own():
    module = nn.Linear(4, 2)
    policy = fc.torch_policy(module, head=fc.heads.categorical)
    buffer = fc.ReplayBuffer(storage=fc.LazyTensorStorage(100), batch_size=4)
    with fc.SyncDataCollector("CartPole-v1", policy, frames_per_batch=20, seed=0) as collector:
        optimizer = torch.optim.Adam(module.parameters())
        yield {"collector": collector, "buffer": buffer, "policy": module, "optimizer": optimizer}


def work(parts):
    batch = next(parts["collector"])
    parts["buffer"].extend(batch)
    parts["policy"](batch["observation"]).square().mean().backward()
    parts["optimizer"].step()


def test_the_latest_are_kept_and_any_of_them_can_be_restored(own, tmp_path):
    checkpoint = fc.Checkpoint(tmp_path / "runs", keep=2)
    assert checkpoint.latest() is None
    weights = {}
    for step in (1, 20, 300):
        work(own)
        weights[step] = own["policy"].weight.clone()
        checkpoint.save(step, **own, best=float(step), names=["a", None], rows=torch.arange(3), nested={"x": (1, 2)})
    assert checkpoint.steps() == [20, 300]
    for step in (20, 300):
        values = checkpoint.restore(**own, step=step)
        assert torch.equal(own["policy"].weight, weights[step])
        assert (values["step"], values["best"], values["names"]) == (step, step, ["a", None])
        assert torch.equal(values["rows"], torch.arange(3))
        assert values["nested"] == {"x": (1, 2)}
        assert len(own["buffer"]) == own["collector"].frames
    assert checkpoint.restore()["best"] == 300
    with pytest.warns(UserWarning, match=r"also has \['buffer', 'optimizer'\], which were not passed"):
        checkpoint.restore(collector=own["collector"], policy=own["policy"])


def test_episodes_that_were_unfinished_are_counted_in_full(tmp_path):
    def run(batches, history):
        for _ in range(batches):
            history.append(fc.episode_stats(next(collector), history[-1] if history else None))
        return fc.EpisodeStats.concatenate(history)

    checkpoint, keywords = fc.Checkpoint(tmp_path), {"frames_per_batch": 40, "seed": 0}
    with fc.SyncDataCollector("CartPole-v1", None, **keywords) as collector:
        run(1, history := [])
        checkpoint.save(1, collector=collector, history=history, best={"one": history[0]})
        whole = run(6, history)
    with fc.SyncDataCollector("CartPole-v1", None, **keywords) as collector:
        saved = checkpoint.restore(collector=collector)
        assert saved["best"]["one"] is saved["history"][0]
        resumed = run(6, saved["history"])
    assert torch.equal(resumed.returns, whole.returns)
    assert torch.equal(resumed.traj_ids, whole.traj_ids)
    assert resumed.open_returns == whole.open_returns
    with fc.SyncDataCollector("CartPole-v1", None, **keywords) as collector:
        checkpoint.restore(collector=collector)
        with pytest.warns(UserWarning, match="checkpoints save it"):
            assert len(run(1, [])) < len(whole)


def test_items_that_only_code_could_read_are_refused(tmp_path):
    buffer, checkpoint = fc.ReplayBuffer(batch_size=1), fc.Checkpoint(tmp_path, keep=1)
    frame = TensorDict({"x": torch.zeros(2)}, [2])
    plain = [frame, {"a": [torch.ones(1), (1, 2.0, "s", None, {3}, b"b")]}, OrderedDict(w=nn.Parameter(torch.ones(1)))]
    buffer.extend(plain)
    checkpoint.save(1, buffer=buffer)
    checkpoint.restore(buffer=buffer)
    assert_same(buffer[0], frame)
    assert buffer[1] == plain[1]
    for wrong, words in (
        ({"deep": (1, frame)}, "(TensorDict)"),
        (TensorDict({"x": torch.zeros(2), "name": "x"}, [2]), "(NonTensorData)"),
        (frozenset(), "frozenset()"),
    ):
        other = fc.ReplayBuffer()
        other.extend([1, wrong])
        with refused(TypeError, ("item 1 of the ListStorage holds", words, "without running code: store such items")):
            checkpoint.save(2, buffer=other)
        assert checkpoint.steps() == [1]


def test_a_buffer_is_saved_by_links_to_the_latest_checkpoint_that_has_it_and_old_ones_are_deleted(
    tmp_path, monkeypatch
):
    buffer, checkpoint = fc.ReplayBuffer(storage=fc.LazyTensorStorage(16)), fc.Checkpoint(tmp_path)

    def extend():
        buffer.extend(TensorDict({"x": torch.arange(2)}, [2]))

    def rows_written(step):
        """The number of files of rows in a checkpoint that are not links, and of those that are."""
        links = [path.stat().st_nlink > 1 for path in tmp_path.glob(f"step-{step}/buffer/v*/rows-*.bin")]
        return links.count(False), links.count(True)

    def disk_full(path):
        raise OSError("full")

    extend()
    checkpoint.save(1, buffer=buffer)
    checkpoint.save(2, x=1)
    extend()
    with monkeypatch.context() as patched:
        patched.setattr("funcollect.checkpoint.sync", disk_full)  # after the buffer was dumped
        with pytest.raises(OSError, match="full"):
            checkpoint.save(3, buffer=buffer)
    checkpoint.save(3, buffer=buffer)
    assert rows_written(3) == (2, 2)
    next((tmp_path / "step-3").glob("buffer/v0/rows-*.bin")).unlink()
    checkpoint.save(4, buffer=buffer)
    assert rows_written(4) == (4, 0)
    checkpoint.restore(buffer=buffer)
    assert buffer[:]["x"].tolist() == [0, 1, 0, 1]
    checkpoint.keep = 1
    with monkeypatch.context() as patched:  # a process is killed while it deletes checkpoints
        patched.setattr("funcollect.checkpoint.shutil.rmtree", lambda path: (path / "values").unlink())
        checkpoint.save(5, x=2)
    assert checkpoint.steps() == [5]
    checkpoint.save(6, x=3)
    assert [path.name for path in tmp_path.iterdir()] == ["step-6"]


def test_groups_and_trees_are_restored_as_they_were(tmp_path):
    checkpoint = fc.Checkpoint(tmp_path)
    actor, critic = nn.Linear(2, 2), nn.BatchNorm1d(3)
    optimizers = {"actor": torch.optim.SGD(actor.parameters(), 0.1, momentum=0.9)}
    actor(torch.ones(1, 2)).sum().backward()
    optimizers["actor"].step()
    critic(torch.randn(5, 3))
    kept = actor.weight.clone(), critic.running_mean.clone()
    checkpoint.save(0, policy={"actor": actor, "critic": critic}, optimizer=optimizers)
    optimizers["actor"].step()
    critic(torch.randn(5, 3))
    checkpoint.restore(policy={"actor": actor, "critic": critic}, optimizer=optimizers)
    assert torch.equal(actor.weight, kept[0])
    assert torch.equal(critic.running_mean, kept[1])
    tree, other = {"w": torch.ones(2), "deep": [torch.zeros(3), 4]}, {"deep": [torch.ones(3), 0]}
    checkpoint.save(1, policy=tree)
    restored = checkpoint.restore(policy={"w": torch.zeros(2), **other})["policy"]
    assert torch.equal(restored["w"], tree["w"])
    assert restored["deep"][1] == 4
    with refused(ValueError, "policy differs … v is … was not there"):
        checkpoint.restore(policy={"v": torch.zeros(2), **other})
    with refused(ValueError, "policy differs … int64"):
        checkpoint.restore(policy={"w": torch.zeros(2, dtype=torch.int64), **other})


def test_a_group_may_have_trees_beside_modules(tmp_path):
    def group(value):
        return {"actor": constant(torch.nn.Linear(2, 1), value), "alpha": torch.tensor([value]), "target": None}

    def constant(module, value):
        torch.nn.init.constant_(module.weight, value)
        return module

    checkpoint, other = fc.Checkpoint(tmp_path), group(0.0)
    checkpoint.save(1, policy=group(3.0))
    restored = checkpoint.restore(policy=other)["policy"]
    assert restored["actor"] is other["actor"]
    assert (other["actor"].weight == 3.0).all()
    assert (restored["alpha"].item(), restored["target"]) == (3.0, None)


def test_tensors_that_require_gradients_are_restored_in_place(tmp_path):
    params = {"w": torch.ones(2, requires_grad=True), "b": nn.Parameter(torch.ones(1)), "mean": torch.ones(3)}
    optimizer, checkpoint = torch.optim.Adam([params["w"], params["b"]]), fc.Checkpoint(tmp_path)

    def train(params):
        optimizer.zero_grad()
        (params["w"].sum() * params["b"] * params["mean"].sum()).backward()
        optimizer.step()
        return [params[name].tolist() for name in ("w", "b")]

    train(params)
    checkpoint.save(1, policy=params, optimizer=optimizer)
    wanted = train(params)
    params["mean"].zero_()
    restored = checkpoint.restore(policy=params, optimizer=optimizer)["policy"]
    assert (restored["w"] is params["w"], restored["b"] is params["b"]) == (True, True)
    assert restored["mean"].tolist() == [1, 1, 1]
    assert params["mean"].tolist() == [0, 0, 0]
    assert train(restored) == wanted


def test_what_does_not_fit_is_refused_before_anything_changes(own, tmp_path):
    checkpoint = fc.Checkpoint(tmp_path)
    work(own)
    checkpoint.save(5, policy=own["policy"], optimizer=own["optimizer"], collector=own["collector"])
    work(own)
    before = own["policy"].weight.clone()
    large, twin = nn.Linear(4, 3), nn.Linear(4, 2, bias=False)
    both = {"policy": own["policy"], "optimizer": torch.optim.SGD(twin.parameters(), 1)}
    for keywords, error, words in (
        ({"policy": large}, ValueError, ("policy differs from the saved one: bias is ('float32', 3), was",)),
        (both, ValueError, ("optimizer", "class is")),
        ({"optimizer": torch.optim.Adam(twin.parameters())}, ValueError, ("parameters of group 0",)),
        ({"optimizer": torch.optim.AdamW(own["policy"].parameters())}, ValueError, ("class is 'AdamW'",)),
        ({"policy": own["policy"], "buffer": own["buffer"]}, FileNotFoundError, ("has no buffer",)),
        ({"policy": own["policy"], "step": 4}, FileNotFoundError, ("[5], expected 4",)),
        ({"collector": own["collector"], "episodes": "x"}, ValueError, ("but is 'x'",)),
    ):
        with refused(error, words):
            checkpoint.restore(**keywords)
    assert torch.equal(own["policy"].weight, before)
    for step, keywords, error, words in (
        (5, {"policy": large}, ValueError, ("step is 5, expected more than 5", "later step")),
        (6, {"policy": large, "thing": object()}, TypeError, ("values", "cannot be saved as data")),
        (6, {"policy": large, "critic": large}, TypeError, ("critic is Linear", "within policy={'critic': …}")),
        (6, {"second": both["optimizer"]}, TypeError, ("second is SGD", "within optimizer={'second': …}")),
    ):
        with refused(error, words):
            checkpoint.save(step, **keywords)
    with pytest.raises(OSError, match="Not a directory"):
        fc.Checkpoint(tmp_path / "step-5" / "values" / "deep").save(1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-5"]
    with refused(FileNotFoundError, ("has the checkpoints [], expected one",)):
        fc.Checkpoint(tmp_path / "none").restore()
    with refused(ValueError, ("keep is 0",)):
        fc.Checkpoint(tmp_path, keep=0)
