"""What TorchRL's tests of collectors need: translations, and the functions that fail, judged.

Each translation has the sentence of docs/coming_from/from_torchrl.md that it follows.
"""

import functools

import torch

# Functions that need worker processes. Others run without, on the same data; processes.txt is a sample with them.
PROCESSES = {
    "test_hooks_run_in_multiprocess_workers",
    "test_multiprocess_hook_setters_update_workers",
    "test_multi_async_policy_factory_is_built_only_in_workers",
    "test_multi_sync_no_idle_after_all_outputs",
    "test_weight_update_after_device_cast",
}


def adapt(fc, used):
    """Translate the differences that the page states."""
    from funcollect.collectors.collector import CollectorBase
    from funcollect.collectors.options import Options
    from funcollect.policies.tensordict_modules.tensordict_policy import TensorDictActor

    # Private names of TorchRL's collectors, for what users see as well.
    CollectorBase._use_buffers = True
    CollectorBase._weight_sync_schemes = {"policy": None}  # "`update_policy_weights_` sends weights in every collector"
    CollectorBase._frames = property(lambda self: self.frames)
    CollectorBase._iter = property(lambda self: self.stats()["batches"])
    for cls in (fc.SyncDataCollector, fc.MultiSyncDataCollector, fc.MultiaSyncDataCollector, fc.RayCollector):
        cls.__init__ = _translated(cls, fc)
        cls.state_dict = _with_names(cls.state_dict)
    CollectorBase._write = _with_device(CollectorBase._write)
    fc.ReplayBuffer.__init__ = _in_one_process(fc.ReplayBuffer, fc)
    Options.finish = _with_keys(Options.finish)
    TensorDictActor._called = _in_space(TensorDictActor._called)


def _translated(cls, fc):
    plain = cls.__init__

    @functools.wraps(plain)
    def init(self, *args, **keywords):
        # "all data depend on `seed` only": tests set Torch's global generator, to the same value for two collectors.
        keywords.setdefault("seed", 0)
        if cls is fc.MultiSyncDataCollector:
            keywords.setdefault("cat_results", 0)  # '`cat_results` | the same, but "stack" unless given'
        # '`trajs_per_batch`, `traj_format` | the same, but `"cat"` unless given'
        if keywords.get("trajs_per_batch") and keywords.get("replay_buffer") is None:
            keywords.setdefault("traj_format", "padded")
        stored = keywords.get("storing_device")  # "`storing_device` is one device"
        if isinstance(stored, list) and len({*map(str, stored)}) == 1:
            keywords["storing_device"] = stored[0]
        plain(self, *args, **keywords)
        # "`RandomPolicy()` keeps its missing spec: it stands for the run's own random actions"
        env, policy, *_ = *args, *(keywords.get(name) for name in ("create_env_fn", "policy")[len(args) :])
        if getattr(policy, "action_spec", ...) is None and hasattr(env, "action_spec"):
            policy.action_spec = env.action_spec

    return init


def _in_one_process(cls, fc):
    """Leave out `shared` where it is refused: "`replay_buffer` gets whole batches, in the process that has it"."""
    plain = cls.__init__

    @functools.wraps(plain)
    def init(self, *args, **keywords):
        if not isinstance(keywords.get("storage"), fc.LazyMemmapStorage):
            keywords.pop("shared", None)
        plain(self, *args, **keywords)

    return init


def _with_device(write):
    """Name a storage's device in batches: "`replay_buffer=` gets batches with the device of its storage"."""

    def written(self, batch):
        device = getattr(getattr(self.replay_buffer, "storage", None), "device", None)
        write(self, batch if device is None or batch.device is not None else batch.to(device))

    return written


def _with_keys(finish):
    """Deliver TorchRL's keys.

    "Ours has three more keys"; "`max_frames_per_traj` cuts trajectories without adding a `StepCounter` and its key".
    """

    def finished(self, batch):
        if self.max_frames_per_traj and ("next", "step_count") not in batch.keys(True):
            step = batch["collector", "step"].unsqueeze(-1)
            batch.set("step_count", step).set(("next", "step_count"), step + 1)
        batch = finish(self, batch)
        return batch.exclude(*(("collector", name) for name in ("lane", "step", "policy_version")), inplace=True)

    return finished


def _with_names(state_dict):
    """Add TorchRL's names: "`state_dict()` has its own layout"."""

    def named(self):
        # "weights that change in place act in workers at once | after `update_policy_weights_`"
        if self.params is None and isinstance(policy := getattr(self, "policy", None), torch.nn.Module):
            now = {name: weights.clone() for name, weights in policy.state_dict().items()}
            before = vars(self).setdefault("_weights_seen", now)
            if any(not torch.equal(weights, before[name]) for name, weights in now.items()):
                self.update_policy_weights_()
            self._weights_seen = now
        saved = state_dict(self)
        if not isinstance(saved, dict):
            return saved
        runners = [*saved["workers"].values()] if "workers" in saved else [saved]
        latest = torch.stack([runner["episode"].max() for runner in runners]).max()
        workers = {f"worker{index}": runner for index, runner in enumerate(runners)}
        return {**saved, **workers, "traj_pool": {"traj_id": latest}}

    return named


def _in_space(called):
    """Bring a mock policy's actions into their space: "Actions are checked"."""

    def call(self):
        outputs, spec = dict(called(self)), self._rollout.spec
        if isinstance(action := outputs.get(("action",)), torch.Tensor):
            shape = spec.shape if self._single else (self._rollout.num_envs, *spec.shape)
            if action.shape != shape:
                action = action.reshape(shape) if action.numel() == torch.Size(shape).numel() else action.expand(shape)
            if not spec.dtype.is_floating_point and not spec.one_hot:
                low, high = (bound.to(action.device) for bound in spec.bounds)
                action = action.clamp(low, high)
            outputs["action",] = action.to(spec.dtype)
        return outputs

    return call


# Why the functions below fail: a sentence of the page, whose item under "Left out:" leaves a function out of the count.
DOCUMENTED = {
    "`map_fn`, `get_distant_attr`, `cascade_execute`, by which TorchRL's collectors reach into each other": [
        "TestAsyncCollection::test_start_multi",
        "TestCollectorRemoteHelpers::test_local_map_fn_and_get_distant_attr",
        "TestCollectorRemoteHelpers::test_multiprocess_map_fn_and_get_distant_attr",
        "TestCollectorRemoteHelpers::test_ray_map_fn_and_get_distant_attr",
    ],
    "`fake_tensordict`: the first batch shows the keys and shapes": [
        "TestCollectorGeneric::test_fake_tensordict_multi_raises",
        "TestCollectorGeneric::test_fake_tensordict_single_matches_iter",
    ],
    "`enable_profile`: `fc.profile` measures a collector": [
        "TestCollectorProfiling::test_disable_profile_clears_hook_and_restores",
        "TestCollectorProfiling::test_enable_profile_cannot_call_after_iteration",
        "TestCollectorProfiling::test_enable_profile_installs_profiler_hook_single",
        "TestCollectorProfiling::test_enable_profile_single_collector",
    ],
    "`preemptive_threshold` below 1: a slow worker is waited for, so that no frame is lost": [
        "TestCollectorGeneric::test_multi_sync_data_collector_ordering",
        "TestPreemptiveThreshold::test_multisync_collector_interruptor_mechanism",
        "TestPreemptiveThreshold::test_preemptive_threshold_validation",
        "TestPreemptiveThreshold::test_sync_collector_interruptor_mechanism",
    ],
    "Objects as `weight_updater`: `update_policy_weights_` sends weights": [
        "TestPolicyFactory::test_update_weights",
    ],
    'The backends `"rpc"`, `"distributed"` and `"submitit"`, and `torchrl.service_backend`': [
        "TestCollectorGeneric::test_backend_dispatch",
        "TestCollectorGeneric::test_context_backend_dispatch",
        "TestCollectorGeneric::test_explicit_direct_backend_overrides_context",
        "TestCollectorGeneric::test_process_backend_smoke_and_context_isolation",
        "TestCollectorGeneric::test_sequence_inference_and_options_are_not_mutated",
    ],
    "Transforms that a collector adds to the environment for its policy": [
        "TestEnvTransformAutoWrap::test_bare_env_collector_appends_init_and_primer",
        "TestEnvTransformAutoWrap::test_default_emits_future_warning_about_v0_15_flip",
        "TestEnvTransformAutoWrap::test_env_hook_then_collector_is_idempotent",
        "TestEnvTransformAutoWrap::test_explicit_false_is_silent_and_does_not_wrap",
        "TestEnvTransformAutoWrap::test_parallel_env_with_inner_init_tracker_no_double_wrap",
        "TestEnvTransformAutoWrap::test_policy_factory_recurrent_auto_register",
        "TestEnvTransformAutoWrap::test_serial_env_with_inner_init_tracker_no_double_wrap",
    ],
    "Several actions, rewards or nested flags that are not those of groups": [
        "TestCollectorGeneric::test_set_truncated",
        "TestHeterogeneousEnvsCollector::test_collector_heterogeneous_env",
        "TestHeterogeneousEnvsCollector::test_multi_collector_heterogeneous_env_consistency",
        "TestMultiKeyEnvsCollector::test_collector",
        "TestMultiKeyEnvsCollector::test_multi_collector_consistency",
        "TestNestedEnvsCollector::test_collector_nested_env_combinations",
        "TestNestedEnvsCollector::test_multi_collector_nested_env_consistency",
        "TestNestedEnvsCollector::test_nested_env_dims",
    ],
    "Observations that are no tensors, or whose shapes vary": [
        "TestCollectorsNonTensor::test_async",
        "TestCollectorsNonTensor::test_simple",
        "TestCollectorsNonTensor::test_sync",
        "TestDynamicEnvs::test_dynamic_multiasync_collector",
        "TestDynamicEnvs::test_dynamic_multisync_collector",
        "TestDynamicEnvs::test_dynamic_sync_collector",
    ],
    "`RayReplayBuffer`: the buffer is in the process that learns": [
        "TestCollectorGeneric::test_ray_backend_rejects_direct_replay_buffer",
    ],
    "Here all data depend on `seed` only, from which environments are seeded, too": [
        "TestCollectorGeneric::test_collector_consistency",
    ],
    "An exception in a worker, also of its constructor, is a `WorkerError` with the traceback": [
        "TestAutoWrap::test_auto_wrap_error",
    ],
    "A list of `frames_per_batch` of an asynchronous collector has the frames of each worker's batch": [
        "TestCollectorGeneric::test_collector_frames_per_batch_worker",
    ],
    "`max_frames_per_traj` beside a `StepCounter(…)` is an error | the shorter of both limits acts": [
        "TestCollectorGeneric::test_maxframes_error",
    ],
    '`trajs_per_batch`, `traj_format` | the same, but `"cat"` unless given': [
        "TestTrajsPerBatch::test_traj_format_default_future_warning",
        "TestTrajsPerBatch::test_traj_format_validation",
    ],
    "`reset()` drops whole trajectories that wait for delivery | they are delivered first": [
        "TestTrajsPerBatch::test_reset_flushes_assembly_state",
    ],
}
INTERNALS = {
    "reads _wrapped_policy": [
        "TestAutoWrap::test_auto_wrap_modules",
    ],
    "sets _exclude_private_keys": [
        "TestCollectorGeneric::test_excluded_keys",
    ],
    "counts calls of TensorDict.update_at_": [
        "TestCollectorRB::test_collector_with_rb_uses_lazy_stack",
    ],
    "sets _ignore_rb": [
        "TestCollectorRB::test_runner_managed_replay_buffer_returns_uncloned_rollout",
    ],
    "a private function puts the storage's device on batches": [
        "TestTrajsPerBatchReplayBuffer::test_replay_buffer_device_normalization_uses_initialized_storage",
        "TestTrajsPerBatchReplayBuffer::test_replay_buffer_tensordict_device_metadata_uses_storage_payload",
    ],
}
JUDGED = {
    function: (kind, reason)
    for kind, table in (("X", DOCUMENTED), ("I", INTERNALS))
    for reason, functions in table.items()
    for function in functions
}
