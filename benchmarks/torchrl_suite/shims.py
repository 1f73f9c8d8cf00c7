"""Replaces TorchRL's collectors, replay buffers and helpers by those of this library, in TorchRL's modules.

In strict mode only names are replaced. In adapted mode, `collectors.adapt` and `buffers.adapt` also translate the
differences that docs/coming_from/from_torchrl.md states, so that tests reach what lies behind them.
"""

import functools
import importlib.util
import inspect
import pkgutil
import sys

NAMES = """
Collector AsyncCollector MultiCollector SyncDataCollector MultiSyncCollector MultiSyncDataCollector MultiAsyncCollector
MultiaSyncDataCollector RayCollector AsyncBatchedCollector split_trajectories MultiStep
ReplayBuffer TensorDictReplayBuffer TensorDictPrioritizedReplayBuffer PrioritizedReplayBuffer ReplayBufferEnsemble
RemoteTensorDictReplayBuffer RayReplayBuffer HERReplayBuffer OfflineToOnlineReplayBuffer
LazyTensorStorage LazyMemmapStorage ListStorage CompressedListStorage LazyStackStorage StoreStorage TensorStorage
StorageEnsemble RandomSampler SamplerWithoutReplacement SliceSampler PrioritizedSampler PrioritizedSliceSampler
SliceSamplerWithoutReplacement StreamingSliceSampler ConsumingSampler PromptGroupSampler StalenessAwareSampler
SamplerEnsemble RoundRobinWriter TensorDictRoundRobinWriter TensorDictMaxValueWriter ImmutableDatasetWriter
WriterEnsemble
""".split()  # noqa: SIM905
HOMES = ("torchrl.collectors", "torchrl.data", "torchrl.collectors.utils", "torchrl.collectors.distributed")
OTHERS = ("torchrl.trainers", "torchrl.testing.mocking_classes", "torchrl.envs", "torchrl.weight_update")
USED: set[str] = set()  # the names in NAMES that the running test has called
_in_processes = False  # whether the running test gets worker processes; otherwise the same data without them


def begin(function, in_processes):
    """Forget the last test; the next one is a parametrization of this function."""
    global _in_processes
    from collectors import PROCESSES

    USED.clear()
    _in_processes = in_processes or function in PROCESSES


def install(adapted=False):
    """Replace the names; to be called before TorchRL's tests are imported."""
    modules = _modules()
    import funcollect as fc

    new = {name: getattr(fc, name, None) or _absent(name) for name in NAMES}
    for cls in (fc.MultiSyncDataCollector, fc.MultiaSyncDataCollector):
        _before(cls, lambda keywords: keywords.setdefault("in_process", not _in_processes))
    for cls in {each for each in new.values() if inspect.isclass(each)}:
        _before(cls, lambda keywords, name=cls.__name__: USED.add(name))
    new["split_trajectories"] = _counted(fc.split_trajectories)
    for part in ("collectors", "buffers") if adapted else ():
        if importlib.util.find_spec(part):
            new |= importlib.import_module(part).adapt(fc, USED) or {}
    for name, value in new.items():
        homes = [module for module in (*map(sys.modules.get, HOMES), *modules) if hasattr(module, name)]
        old = getattr(homes[0], name) if homes else value
        for module in modules:
            if vars(module).get(name) is old:
                setattr(module, name, value)


def _before(cls, note):
    """Call `note` with the keywords of every construction."""
    plain = cls.__init__

    @functools.wraps(plain)
    def init(self, *args, **keywords):
        note(keywords)
        plain(self, *args, **keywords)

    cls.__init__ = init


def _absent(name):
    def init(self, *args, **keywords):
        USED.add(name)
        raise NotImplementedError(f"funcollect has no {name}")

    return type(name, (), {"__init__": init})


def _counted(function):
    @functools.wraps(function)
    def call(*args, **keywords):
        USED.add(function.__name__)
        return function(*args, **keywords)

    return call


def _modules():
    """TorchRL's modules of collectors and data, all imported, and those that use them."""
    for package in map(importlib.import_module, ("torchrl.collectors", "torchrl.data")):
        for info in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if not any(part in info.name for part in (".llm", ".datasets", ".rlhf", "vllm")):
                _imported(info.name)
    for name in OTHERS:
        _imported(name)
    return [module for name, module in [*sys.modules.items()] if name.startswith(HOMES[:2]) and module]


def _imported(name):
    try:
        importlib.import_module(name)
    except Exception as error:  # of an optional dependency
        print(f"{name} is left out: {error!r:.200}", file=sys.stderr)
