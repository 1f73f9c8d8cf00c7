"""What TorchRL's tests of buffers need: translations, and the functions that fail, judged.

Each translation has the sentence of docs/coming_from/from_torchrl.md that it follows.
"""

import functools

import numpy as np
import torch


def adapt(fc, used):
    """Translate the differences that the page states; returns the names that this library has under others."""
    _private_names(fc)
    _priorities(fc.PrioritizedSampler)
    _transforms_of_samples(fc.ReplayBuffer)
    _parts_alone(fc)
    # "`read_all_in_order()`, `write_all(data)` | `buffer[:]`, `buffer[:] = data`"
    fc.ReplayBuffer.read_all_in_order = lambda self, end=None: self[..., :end]
    fc.ReplayBuffer.write_all = lambda self, data, end=None: self.__setitem__((..., slice(end)), data)
    fc.ReplayBuffer.state_dict, fc.ReplayBuffer.load_state_dict = _with_names(fc)

    def prioritized(*, alpha, beta, eps=1e-8, storage=None, **options):
        storage = fc.ListStorage(1_000) if storage is None else storage
        storage = storage if hasattr(storage, "admit") else storage()
        sampler = fc.PrioritizedSampler(storage.max_size, alpha, beta, eps)
        return fc.ReplayBuffer(storage=storage, sampler=sampler, **options)

    def writer(**options):
        """Stands for the only writer: "there is no argument for it"."""

    return {
        # "`PrioritizedReplayBuffer(alpha=…, beta=…)` | `ReplayBuffer(sampler=PrioritizedSampler(…))`"
        "PrioritizedReplayBuffer": prioritized,
        "RoundRobinWriter": writer,
        "TensorDictRoundRobinWriter": writer,
        "Sampler": fc.RandomSampler,  # of which all samplers are kinds
        "TensorStorage": functools.partial(_filled, fc),
    }


def _transforms_of_samples(buffer):
    """Apply transforms as samples are drawn: "apply transforms of samples to the sample"."""
    plain, sample = buffer.__init__, buffer.sample

    @functools.wraps(plain)
    def init(self, *, transform=None, **options):
        self._transform = transform
        plain(self, transform=getattr(transform, "inv", None), **options)

    def transformed(self, *arguments, return_info=False, **options):
        batch, info = sample(self, *arguments, return_info=True, **options)
        batch = batch if self._transform is None else self._transform(batch)
        return (batch, info) if return_info else batch

    def insert(self, index, transform):
        if index:
            raise ValueError("only at the beginning")
        self._transform = _both(transform, self._transform)

    buffer.__init__, buffer.sample, buffer.insert_transform = init, transformed, insert
    buffer.append_transform = lambda self, transform: setattr(self, "_transform", _both(self._transform, transform))


def _both(first, then):
    if first is None or then is None:
        return first or then
    return lambda batch: then(first(batch))


def _parts_alone(fc):
    """Give storages and samplers without a buffer one: "a buffer fills its storage", "`buffer.sample(10)`"."""
    storage, plain = fc.storages.Storage, fc.storages.Storage.__setitem__

    def put(self, index, data, **options):
        if "lock" not in vars(self):
            self._alone = fc.ReplayBuffer(storage=self)
        slots = np.atleast_1d(np.asarray(index if not isinstance(index, slice) else range(len(self))))
        if "_alone" in vars(self) and slots[0] == len(self):
            self._alone.extend(data if np.ndim(index) else [data])
        else:
            plain(self, index, data, **options)

    def sample(self, storage, batch_size):
        if storage._alone.sampler is not self:
            data = storage[:]
            del storage._alone  # a storage has one buffer
            storage._alone = fc.ReplayBuffer(storage=storage, sampler=self)
            storage._alone.extend(data)
        batch, info = storage._alone.sample(batch_size, return_info=True)
        return info.pop("index"), info | (dict(batch.items(True, True)) if hasattr(batch, "items") else {})

    storage.__setitem__ = storage.set = put
    storage._storage = property(lambda self: self[:])
    fc.RandomSampler.sample = sample


def _filled(fc, data, **options):
    """A storage with data: "a buffer fills its storage"."""
    storage = fc.LazyTensorStorage(len(torch.utils._pytree.tree_leaves(data)[0]), **options)
    storage.set(range(storage.max_size), data)
    return storage


def _private_names(fc):
    """Private names of TorchRL's, for what users see as well."""
    buffer = fc.ReplayBuffer
    buffer.initialized = True
    for name in ("storage", "sampler", "collate_fn"):
        setattr(buffer, f"_{name}", property(functools.partial(lambda name, self: getattr(self, name), name)))
    buffer._rng = property(lambda self: self.generator)
    buffer._prefetch_queue = property(lambda self: [future for _, future in self._ahead])
    buffer.writer = buffer._writer = property(_Writer)
    fc.SamplerWithoutReplacement._sample_list = property(lambda self: torch.from_numpy(self._left))
    fc.SliceSampler._fetch_traj = property(lambda self: self.traj_key is not None)
    fc.SliceSampler._traj_key_auto = False


class _Writer:
    def __init__(self, buffer):
        lanes = max(int(np.prod(buffer._memory.lanes or (1,))), 1)
        self._write_count = buffer.write_count
        self._cursor = buffer._memory.written // lanes % (buffer.storage.max_size // lanes)


def _with_names(fc):
    plain, load = fc.ReplayBuffer.state_dict, fc.ReplayBuffer.load_state_dict

    def state_dict(self):
        names = {"_batch_size": self.batch_size, "_writer": {"_write_count": self.write_count}, "_rng": self.generator}
        return {**names, "_prefetch_state": None, "bytes": plain(self)}

    return state_dict, lambda self, state, **options: load(self, state["bytes"], allow_pickle=True)


def _priorities(sampler):
    for name in ("beta", "eps", "max_capacity"):
        setattr(sampler, f"_{name}", property(functools.partial(lambda name, self: getattr(self, name), name)))
    sampler._sum_tree = sampler._min_tree = property(_Weights)
    sampler.device = torch.device("cpu")  # "priorities are on the host"
    sampler.default_priority = property(_highest)
    sampler._max_priority = property(lambda self: (_highest(self), int(self._priorities._sums[0].argmax())))
    sampler.extend = sampler.add = sampler.mark_update = lambda self, index: self.extended(
        None, np.atleast_1d(np.asarray(index))
    )
    sampler.update_priority = _without_buffer(sampler.update_priority)


def _highest(sampler):
    if not sampler.max_priority_within_buffer:
        return sampler._highest
    weight = sampler._priorities._sums[0].max() or 1.0
    return max(weight ** (1 / (float(sampler.alpha) or 1)) - sampler.eps, 0)


class _Weights:
    def __init__(self, sampler):
        self.sampler = sampler

    def __getitem__(self, index):
        weights = self.sampler._priorities.get(np.atleast_1d(np.asarray(index)))
        return torch.from_numpy(weights).reshape(np.shape(index)).float()

    def query(self, first, last):
        return float(self.sampler._priorities._sums[0][first:last].sum())


def _without_buffer(plain):
    """Priorities of a sampler without a buffer, as of a full one."""

    def update_priority(self, *arguments, **keywords):
        if len(arguments) + len(keywords) > 3:
            return plain(self, *arguments, **keywords)
        index, priority = arguments[:2]
        return plain(self, _Full(self.max_capacity), index, priority, None, 0)

    return update_priority


class _Full:
    def __init__(self, capacity):
        self.capacity = self.written = capacity

    def __len__(self):
        return self.capacity


# Why the functions below fail: a sentence of the page, whose item under "Left out:" leaves a function out of the count.
# Functions follow the name of their class.
DOCUMENTED = {
    "`query`: read `buffer[:]` and select.": """
        TestReplayBufferQuery: test_query_after_wraparound test_query_all test_query_empty_buffer
        test_query_list_storage test_query_list_storage_non_td_raises test_query_matches_slice_sampler_boundaries
        test_query_ndim_storage test_query_opaque_predicate_uses_full_transforms test_query_predicate
        test_query_predicate_sees_transformed_values test_query_result_has_all_keys test_query_skips_unneeded_transforms
        test_query_views_stored_data
    """,
    "Generations of slots (`track_generations`, `update_if_present`): `written_at` records when slots "
    "were written.": """
        TestUpdateIfPresent: test_capability_error_on_list_storage test_capability_error_without_generation_tracking
        test_concurrent_updates_do_not_tear_records test_empty_invalidates_handles test_handle_survives_repeated_updates
        test_invalid_shape_or_dtype_raises_before_any_write test_mask_aligns_with_input_order
        test_multidim_storage_roundtrip test_nested_key_patch test_never_written_slot_is_stale
        test_sampled_handles_roundtrip test_stale_records_skipped_and_unmodified
        test_unknown_key_raises_and_storage_untouched test_updates_live_records TestUpdateIfPresentVersioned:
        test_all_stale_still_reports_version_rejected test_checkpoint_roundtrip_preserves_mutable_fields_and_generations
        test_dotted_version_key_rejected test_duplicate_handles_resolve_to_max_version
        test_equal_version_applies_when_not_require_newer test_equal_version_rejected_when_require_newer
        test_facility_absent_is_backward_compatible test_multidim_storage_versioned_update
        test_newer_version_applies_and_is_written_back test_older_async_writer_loses_deterministically
        test_per_record_version_tensor test_stale_takes_precedence_over_version test_trailing_singleton_version_leaf
        test_tuple_version_key_matches_string_form test_validation_errors_leave_storage_untouched TestWriterGeneration:
        test_empty_invalidates_handles_immediately test_empty_is_monotonic test_empty_preserves_unwritten_sentinel
        test_enabled_writer_tracks_generations test_generation_add test_generation_add_on_storage_device
        test_generation_extend_wrapping_twice test_generation_increments_on_reuse test_generation_on_storage_device
        test_generation_state_dict_roundtrip test_generation_tensordict_writer test_generation_wraparound
        test_generation_write_at test_generations_live_on_the_storage test_generations_of_out_of_range_reports_minus_one
        test_generations_of_unwritten_reports_minus_one test_legacy_state_dict_without_generation_loads
        test_multidim_storage_1d_index_is_a_batch_of_slots test_non_tracking_sample_has_no_generation
        test_non_tracking_writer_empty_invalidates_shared_generations test_non_tracking_writer_reports_minus_one
        test_non_tracking_writer_updates_shared_generations test_partial_reuse_detectable test_sample_returns_generation
        test_tensordict_sample_has_generation_key test_tracking_is_opt_in test_wraparound_race_detectable
    """,
    "`sample_unit`, `Sequence`: a `SliceSampler` samples slices.": """
        TestSampleUnit: test_custom_unit_expands_batch_and_metadata test_default_and_transition_are_identical
        test_prioritized_buffer_with_transition_unit test_tensordict_buffer_carries_unit_metadata
        test_transition_adds_no_info_keys TestSequenceBurnInBootstrap: test_bootstrap_appends_records
        test_bootstrap_masked_at_episode_end test_burn_in_clamped_at_episode_start test_burn_in_prepends_records
        test_defaults_match_base_sequence test_dilation_spaces_the_window
        test_include_reset_burn_in_respects_write_cursor test_include_reset_does_not_read_unwritten_slots
        test_stop_shifts_bootstrap_inside_episode test_window_size_through_sampling TestSequenceMultidimensional:
        test_include_reset_respects_multidimensional_ring_write_seam test_priority_reduction_uses_full_anchor_coordinate
        test_priority_update_routes_to_multidimensional_anchors test_sampling_emits_full_coordinate_metadata
        test_stop_shifts_time_but_retains_sampled_anchor test_time_expansion_preserves_lanes_and_nested_done_key
        TestSequencePrioritySemantics: test_anchor_index_metadata test_prioritized_anchor_distribution_unchanged
        test_uniform_anchor_distribution_unchanged test_update_priority_via_anchor_index
        test_update_tensordict_priority_routes_to_anchors test_user_anchor_index_ignored_without_sequence_unit
        test_weights_are_block_constant TestSequenceUnit: test_custom_nested_done_key
        test_expansion_is_consecutive_within_episode test_include_reset_crosses_boundary
        test_include_reset_does_not_splice_across_write_cursor test_include_reset_partially_filled_buffer
        test_metadata_flows_into_tensordict_sample test_multiple_anchors_sequence_ids
        test_none_done_key_uses_storage_boundary test_pad_masks_tail_and_clamps_inside_episode
        test_prioritized_weights_expanded_to_records test_requires_tensordict_storage
        test_scalar_info_entries_pass_through test_stop_falls_back_to_pad_for_short_episode
        test_stop_shifts_anchor_to_end_at_boundary test_wraparound_seam
    """,
    "`consume_after_n_samples`: frames stay until they are overwritten.": """
        TestReplayBufferConsumption: test_replay_buffer_consume_add_extend_after_exhaustion
        test_replay_buffer_consume_after_one_list_storage test_replay_buffer_consume_after_two_list_storage
        test_replay_buffer_consume_dumps_loads test_replay_buffer_consume_interleaved_writes
        test_replay_buffer_consume_iterates_until_exhausted
        test_replay_buffer_consume_load_state_dict_decouples_from_source
        test_replay_buffer_consume_reuse_and_append_keeps_tensor_storage_len
        test_replay_buffer_consume_reuses_consumed_slots_before_cursor
        test_replay_buffer_consume_reuses_slots_then_cursor
        test_replay_buffer_consume_reuses_slots_then_wraparound_cursor
        test_replay_buffer_consume_skips_reused_slots_after_wraparound
        test_replay_buffer_consume_skips_reused_slots_when_advancing_cursor
        test_replay_buffer_consume_state_dict_preserves_free_slots test_replay_buffer_consume_state_dict_roundtrip
        test_replay_buffer_consume_tensor_storage_prepopulated test_replay_buffer_consume_unsupported_modes
        test_tensordict_replay_buffer_consume_lazy_memmap_storage
        test_tensordict_replay_buffer_consume_lazy_tensor_storage
    """,
    "`PromptGroupSampler`, `StalenessAwareSampler`: they are for language models": """
        TestPromptGroupSampler: test_basic_grouping test_cache_hit_does_not_read_full_storage
        test_cache_invalidation_on_extend test_construction_errors test_load_state_dict_invalidates_cache
        test_ndim_gt_one_raises test_nested_key test_non_divisible_batch_raises test_persistence_independence
        test_plain_list_storage_raises test_recency_state_roundtrip test_reward_strategy_requires_tensor_reward
        test_samples_per_group_inference test_shared_storage_update_invalidates_cache test_small_group_warns_and_fills
        test_state_dict_and_pickle_drop_cache test_strategy_recency test_strategy_recency_after_wraparound
        test_strategy_reward test_strategy_variance test_strategy_variance_breaks_ties_by_reward test_string_keys
        TestStalenessAwareSampler: test_all_stale_raises test_basic_sampling test_consumer_version_increment
        test_freshness_weighting test_hard_staleness_gate test_missing_version_key_raises test_no_staleness_limit
        test_staleness_in_info test_state_dict_roundtrip
    """,
    "`TensorDictMaxValueWriter`, `ImmutableDatasetWriter`: the newest frames are kept, not the best ones": """
        TestBufferStats: test_stats_with_non_counting_writer TestComposableBuffers: test_add test_cursor_position
        test_extend test_index test_rb_repr test_sample TestMaxValueWriter: test_max_value_writer
        test_max_value_writer_reduce test_max_value_writer_serialize TestMultiProc: test_error_maxwriter TestRBMultidim:
        test_rb_multidim_collector
    """,
    "Ensembles of buffers: sample from each, and concatenate the samples.": "TestEnsemble: test_rb",
    "`RayReplayBuffer`: the buffer is in the process that learns": """
        TestRayRB: test_construct_from_replay_buffer_service_backend test_ray_rb test_ray_rb_iter
        test_ray_rb_serialization test_ray_rb_stats test_ray_rb_update_if_present test_ray_replay_with_gloo_transport
    """,
    "Compressed storages, `LazyStackStorage`: `compact_obs` and `frame_stack` store equal parts of "
    "observations once.": """
        test_compressed_storage_checkpointing_releases_staging_memmaps TestStorages: test_lazy_stack_storage
    """,
    "`service_backend`, `register_save_hook`, `checkpointer`: a buffer is an object of its process, "
    "with one format of files.": """
        test_replay_buffer_direct_service_client_is_identity test_storage_save_hook
    """,
    "`HERReplayBuffer`: relabel goals in `transform=`, before frames are stored.": """
        TestHERReplayBuffer: test_cache_rebuilds_after_add test_cache_rebuilds_after_extend test_custom_reward_key
        test_episode_strategy_stays_within_episode test_final_strategy_uses_last_achieved test_future_goal_not_from_past
        test_her_ratio_one_full_relabel test_her_ratio_zero_unchanged test_invalid_her_ratio
        test_missing_goal_key_raises test_multi_episode_final_stays_within_episode test_nested_goal_key test_repr
        test_reward_recomputed_for_her_transitions test_sample_shape test_state_dict_round_trip test_strategies_run
        test_strategy_accepts_string test_strategy_invalid
    """,
    "`transform=` runs before data is stored, on a copy, as in the examples of TorchRL's documentation": """
        TestRBLazyInit: test_lazy_init TestStorages: test_storage_inplace_writing_transform TestTransforms:
        test_transform_inv
    """,
    "`ListStorage` keeps what it is given | it splits and copies a TensorDict or a tensor": "test_prb",
    "a wrong argument is often a `RuntimeError` | it is a `ValueError`, or a `TypeError` for a value of "
    "another type": """
        test_batch_errors test_prb_alpha_setter_validates TestBuffers: test_empty TestFindStartStopTraj:
        test_end_keys_exclusive_with_end_key TestLazyStorages: test_extend_list_pytree TestSamplers:
        test_slice_sampler_errors TestStorages: test_existsok_lazymemmap
    """,
    "`state_dict()` has keys for each part, samplers and storages have `state_dict` and `dumps` of their own": """
        TestSamplers: test_prb_load_legacy_within_buffer_state_dict test_prb_loads_legacy_within_buffer_metadata
        TestStorages: test_list_storage_load_state_dict_decouples_from_source test_load_state_dict_decouples_from_source
        test_state_dict test_storage_dumps_loads
    """,
    "pickling a buffer | `buffer.state_dict()`, or `dumps(directory)`": """
        test_replay_buffer_prefetch_pickle_roundtrip TestComposableBuffers: test_pickable
    """,
    "tensorclasses in a `LazyTensorStorage` | `data.to_tensordict()`, for `extend` and `add`": """
        TestLazyStorages: test_set_tensorclass TestRBMultidim: test_rb_multidim TestStorages: test_get_set
    """,
    "stored frames have the keys of the first batch": """
        test_replay_buffer_read_write_all_in_order test_replay_buffer_read_write_all_in_order_matches_full_slice_ndim2
        TestStorages: test_storage_inplace_writing_newkey
    """,
    "a buffer fills its storage: `buffer.extend(data)`; a sampler and a storage belong to one buffer": """
        test_shared_storage_prioritized_sampler TestSamplers: test_prb_new_sampler_with_loaded_storage
    """,
    "a `SamplerWithoutReplacement` goes on with its round after `extend`, and in a new iteration | both "
    "begin a new round": """
        test_replay_buffer_prefetch_without_replacement_roundtrip TestSamplers: test_sampler_without_rep_state_dict
    """,
    "`sampler.traj_key` becomes the key that was found | it is the key that was given, or None": """
        TestSamplers: test_slice_sampler_auto_traj_key_collector_ids test_slice_sampler_auto_traj_key_episode
        test_slice_sampler_auto_traj_key_no_warning_single_key
    """,
    "the flags are in the sample, and `terminated` stays as it was stored": """
        TestSamplers: test_slice_sampler_without_replacement
    """,
    "`sampler.alpha = 0.5` after 0 warns; `add` of a batch of frames warns | no warning": """
        test_add_warning test_prb_alpha_change_from_zero_warns
    """,
    '`stats()["initialized"]` is False before the first use of a buffer with `delayed_init` | it is True': """
        TestBufferStats: test_stats_does_not_initialize_buffer
    """,
    "`pad_output=True` adds a mask if a slice is short | always": """
        TestSamplers: test_slice_sampler_mask_all_long_trajs_no_mask
    """,
    "a `PrioritizedSampler` with a smaller `max_capacity` than the storage | it is an error": """
        test_ptdrb test_replay_buffer_trajectories
    """,
    "ragged TensorDicts in a `LazyTensorStorage` | a `ListStorage` has them, as lazy stacks": """
        TestStorages: test_extend_lazystack
    """,
    "`auto_cleanup=True`, `cleanup()` of a `LazyMemmapStorage` with `scratch_dir` | delete the directory": """
        TestLazyMemmapStorageCleanup: test_cleanup_explicit_scratch_dir test_cleanup_idempotent
        test_cleanup_nonexistent_dir test_cleanup_temp_dir test_cleanup_uninitialized_storage test_cleanup_with_del
    """,
    "`end_keys` that the frames lack altogether, or a `traj_key` | it is an error": """
        TestFindStartStopTraj: test_end_keys_all_missing_falls_back TestSamplers: test_slice_sampler
    """,
    "`sync=False`: all processes write | one process writes into a `LazyMemmapStorage(scratch_dir=…)`": """
        test_replay_buffer_append_transform_rejects_unshareable_when_shared
        test_replay_buffer_append_transform_shares_when_buffer_is_shared
        test_replay_buffer_insert_transform_rejects_unshareable_when_shared
        test_replay_buffer_insert_transform_shares_when_buffer_is_shared
        test_replay_buffer_share_auto_shares_write_stateful_transform
        test_replay_buffer_share_rejects_unshareable_write_stateful_transform TestMultiProc:
        test_async_generic_prioritized_rb_multiproc_writes test_async_prioritized_rb_multiproc_writes test_error_list
        test_error_noninit test_multiproc_rb test_shared_prefetch_error_mentions_fix TestSharedStorageInit:
        test_mutation_revision_shared_across_processes test_sequence_boundary_cache_invalidated_across_processes
        test_shared_init_reconciles_non_cpu_device test_shared_storage_multiprocess
    """,
    "`MultiStep` as a module, for done flags of any shape | a function of batches whose flags are `[*B, T, 1]`": """
        TestMultiStep: test_multistep test_mutistep_cattrajs test_unusual_done
    """,
    "the last batch dimension is time, so `dim_extend` can only name that": """
        TestFindStartStopTraj: test_multidimensional_boundary_index_and_fullgraph
    """,
}
INTERNALS = {
    "reads the private cache of slices, or calls the private methods that find them": """
        TestFindStartStopTraj: test_boundary_index_cache_and_storage_invalidation test_end_keys_union
        test_matches_slice_sampler test_slice_sampler_cache_uses_storage_revision
        test_subclass_end_to_start_stop_override TestSamplers: test_slice_sampler_prioritized
    """,
    "reads or sets the trees of priorities by private names, or by places that they have there": """
        test_prb_alpha_change_retransforms_trees test_prb_alpha_zero_keeps_raw_max
        test_prioritized_sampler_load_state_dict_decouples_from_source
        test_prioritized_slice_sampler_load_state_dict_decouples_from_source TestSamplers: test_prb_ndim
        test_prb_update_max_priority
    """,
    "reads the private list of frames that are left in a round": """
        test_samplerwithoutrep test_samplerwithoutrep_load_state_dict_decouples_from_source
    """,
    "reads the private queue of prepared samples, its lock, or its part of a saved state": """
        test_replay_buffer_load_state_dict_waits_for_in_flight_samples test_replay_buffer_prefetch_autograd_roundtrip
        test_replay_buffer_prefetch_state_dict_capacity_mismatch
        test_replay_buffer_prefetch_state_dict_does_not_alias_queue
        test_replay_buffer_prefetch_state_dict_waits_for_in_flight_samples
    """,
    "calls a private method of a storage, or reads its private memory, counter or registry": """
        test_storage_mutation_revision_for_buffer_write_paths TestLazyMemmapStorageCleanup:
        test_auto_cleanup_default_behavior test_cleanup_preserves_user_data_by_default test_cleanup_registry
        TestLazyStorages: test_init test_init_tensorclass test_set TestStorages: test__rand_given_ndim_recompile
    """,
    "counts calls of a method of TensorDict, or compiles private writing": """
        TestStorages: test_compilable_storage_set_fullgraph test_extend_lazystack_2d_storage
        test_extend_lazystack_direct_write
    """,
    "collects with env.rand_step as a policy, a method that steps the collector's environment": """
        TestCheckpointers: test_multi_env test_simple_env
    """,
}


def _judged():
    for kind, table in (("X", DOCUMENTED), ("I", INTERNALS)):
        for reason, words in table.items():
            group = ""
            for word in words.split():
                if word.endswith(":"):
                    group = f"{word}:"
                else:
                    yield f"{group}{word}", (kind, reason)


JUDGED = dict(_judged())
