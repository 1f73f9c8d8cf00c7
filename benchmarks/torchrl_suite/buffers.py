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
    plain = buffer.__init__

    @functools.wraps(plain)
    def init(self, *, transform=None, **options):
        plain(self, transform=getattr(transform, "inv", None), sample_transform=transform, **options)

    def insert(self, index, transform):
        if index:
            raise ValueError("only at the beginning")
        self.sample_transform = _both(transform, self.sample_transform)

    buffer.__init__, buffer.insert_transform = init, insert
    buffer._transform = property(
        lambda self: self.sample_transform, lambda self, transform: setattr(self, "sample_transform", transform)
    )
    buffer.append_transform = lambda self, transform: setattr(
        self, "sample_transform", _both(self.sample_transform, transform)
    )


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
        return sampler._highest.item()
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
# Functions, without test_ at the beginning, follow the name of their class.
DOCUMENTED = {
    "`query`: read `buffer[:]` and select.": """
        TestReplayBufferQuery: query_after_wraparound query_all query_empty_buffer query_list_storage
        query_list_storage_non_td_raises query_matches_slice_sampler_boundaries query_ndim_storage
        query_opaque_predicate_uses_full_transforms query_predicate query_predicate_sees_transformed_values
        query_result_has_all_keys query_skips_unneeded_transforms query_views_stored_data
    """,
    "Generations of slots (`track_generations`): `written_at` records when slots were written.": """
        TestUpdateIfPresent: capability_error_on_list_storage capability_error_without_generation_tracking
        concurrent_updates_do_not_tear_records empty_invalidates_handles handle_survives_repeated_updates
        invalid_shape_or_dtype_raises_before_any_write mask_aligns_with_input_order multidim_storage_roundtrip
        nested_key_patch never_written_slot_is_stale sampled_handles_roundtrip stale_records_skipped_and_unmodified
        unknown_key_raises_and_storage_untouched updates_live_records TestUpdateIfPresentVersioned:
        all_stale_still_reports_version_rejected checkpoint_roundtrip_preserves_mutable_fields_and_generations
        dotted_version_key_rejected duplicate_handles_resolve_to_max_version
        equal_version_applies_when_not_require_newer equal_version_rejected_when_require_newer
        facility_absent_is_backward_compatible multidim_storage_versioned_update
        newer_version_applies_and_is_written_back older_async_writer_loses_deterministically per_record_version_tensor
        stale_takes_precedence_over_version trailing_singleton_version_leaf tuple_version_key_matches_string_form
        validation_errors_leave_storage_untouched TestWriterGeneration: empty_invalidates_handles_immediately
        empty_is_monotonic empty_preserves_unwritten_sentinel enabled_writer_tracks_generations generation_add
        generation_add_on_storage_device generation_extend_wrapping_twice generation_increments_on_reuse
        generation_on_storage_device generation_state_dict_roundtrip generation_tensordict_writer generation_wraparound
        generation_write_at generations_live_on_the_storage generations_of_out_of_range_reports_minus_one
        generations_of_unwritten_reports_minus_one legacy_state_dict_without_generation_loads
        multidim_storage_1d_index_is_a_batch_of_slots non_tracking_sample_has_no_generation
        non_tracking_writer_empty_invalidates_shared_generations non_tracking_writer_reports_minus_one
        non_tracking_writer_updates_shared_generations partial_reuse_detectable sample_returns_generation
        tensordict_sample_has_generation_key tracking_is_opt_in wraparound_race_detectable
    """,
    "`sample_unit`, `Sequence`: a `SliceSampler` samples slices.": """
        TestSampleUnit: custom_unit_expands_batch_and_metadata default_and_transition_are_identical
        prioritized_buffer_with_transition_unit tensordict_buffer_carries_unit_metadata transition_adds_no_info_keys
        TestSequenceBurnInBootstrap: bootstrap_appends_records bootstrap_masked_at_episode_end
        burn_in_clamped_at_episode_start burn_in_prepends_records defaults_match_base_sequence
        dilation_spaces_the_window include_reset_burn_in_respects_write_cursor
        include_reset_does_not_read_unwritten_slots stop_shifts_bootstrap_inside_episode window_size_through_sampling
        TestSequenceMultidimensional: include_reset_respects_multidimensional_ring_write_seam
        priority_reduction_uses_full_anchor_coordinate priority_update_routes_to_multidimensional_anchors
        sampling_emits_full_coordinate_metadata stop_shifts_time_but_retains_sampled_anchor
        time_expansion_preserves_lanes_and_nested_done_key TestSequencePrioritySemantics: anchor_index_metadata
        prioritized_anchor_distribution_unchanged uniform_anchor_distribution_unchanged update_priority_via_anchor_index
        update_tensordict_priority_routes_to_anchors user_anchor_index_ignored_without_sequence_unit
        weights_are_block_constant TestSequenceUnit: custom_nested_done_key expansion_is_consecutive_within_episode
        include_reset_crosses_boundary include_reset_does_not_splice_across_write_cursor
        include_reset_partially_filled_buffer metadata_flows_into_tensordict_sample multiple_anchors_sequence_ids
        none_done_key_uses_storage_boundary pad_masks_tail_and_clamps_inside_episode
        prioritized_weights_expanded_to_records requires_tensordict_storage scalar_info_entries_pass_through
        stop_falls_back_to_pad_for_short_episode stop_shifts_anchor_to_end_at_boundary wraparound_seam
    """,
    "`consume_after_n_samples`: a `RecentSampler(once=True)` draws each frame once.": """
        TestReplayBufferConsumption: replay_buffer_consume_add_extend_after_exhaustion
        replay_buffer_consume_after_one_list_storage replay_buffer_consume_after_two_list_storage
        replay_buffer_consume_dumps_loads replay_buffer_consume_interleaved_writes
        replay_buffer_consume_iterates_until_exhausted replay_buffer_consume_load_state_dict_decouples_from_source
        replay_buffer_consume_reuse_and_append_keeps_tensor_storage_len
        replay_buffer_consume_reuses_consumed_slots_before_cursor replay_buffer_consume_reuses_slots_then_cursor
        replay_buffer_consume_reuses_slots_then_wraparound_cursor
        replay_buffer_consume_skips_reused_slots_after_wraparound
        replay_buffer_consume_skips_reused_slots_when_advancing_cursor
        replay_buffer_consume_state_dict_preserves_free_slots replay_buffer_consume_state_dict_roundtrip
        replay_buffer_consume_tensor_storage_prepopulated replay_buffer_consume_unsupported_modes
        tensordict_replay_buffer_consume_lazy_memmap_storage tensordict_replay_buffer_consume_lazy_tensor_storage
    """,
    "`PromptGroupSampler`: it is for language models": """
        TestPromptGroupSampler: basic_grouping cache_hit_does_not_read_full_storage cache_invalidation_on_extend
        construction_errors load_state_dict_invalidates_cache ndim_gt_one_raises nested_key non_divisible_batch_raises
        persistence_independence plain_list_storage_raises recency_state_roundtrip
        reward_strategy_requires_tensor_reward samples_per_group_inference shared_storage_update_invalidates_cache
        small_group_warns_and_fills state_dict_and_pickle_drop_cache strategy_recency strategy_recency_after_wraparound
        strategy_reward strategy_variance strategy_variance_breaks_ties_by_reward string_keys
    """,
    "`StalenessAwareSampler(max_staleness=k)`, `sampler.consumer_version`": """
        TestStalenessAwareSampler: all_stale_raises basic_sampling consumer_version_increment freshness_weighting
        hard_staleness_gate missing_version_key_raises no_staleness_limit staleness_in_info state_dict_roundtrip
    """,
    "`TensorDictMaxValueWriter`, `ImmutableDatasetWriter`: the newest frames are kept, not the best ones": """
        TestBufferStats: stats_with_non_counting_writer TestComposableBuffers: add cursor_position extend index rb_repr
        sample TestMaxValueWriter: max_value_writer max_value_writer_reduce max_value_writer_serialize TestMultiProc:
        error_maxwriter TestRBMultidim: rb_multidim_collector
    """,
    "`ReplayBufferEnsemble(…)`, `SamplerEnsemble`": "TestEnsemble: rb",
    "`RayReplayBuffer`: the buffer is in the process that learns": """
        TestRayRB: construct_from_replay_buffer_service_backend ray_rb ray_rb_iter ray_rb_mcadvantage_transform_factory
        ray_rb_serialization ray_rb_stats ray_rb_update_if_present ray_replay_with_gloo_transport
    """,
    "Compressed storages, `LazyStackStorage`: `compact_obs` and `frame_stack` store equal parts of "
    "observations once.": """
        compressed_storage_checkpointing_releases_staging_memmaps TestStorages: lazy_stack_storage
    """,
    "`service_backend`, `register_save_hook`, `checkpointer`: a buffer is an object of its process, "
    "with one format of files.": """
        replay_buffer_direct_service_client_is_identity storage_save_hook
    """,
    "`HERReplayBuffer(reward_fn=…, her_ratio=0.8)`": """
        TestHERReplayBuffer: cache_rebuilds_after_add cache_rebuilds_after_extend custom_reward_key
        episode_strategy_stays_within_episode final_strategy_uses_last_achieved future_goal_not_from_past
        her_ratio_one_full_relabel her_ratio_zero_unchanged invalid_her_ratio missing_goal_key_raises
        multi_episode_final_stays_within_episode nested_goal_key repr reward_recomputed_for_her_transitions sample_shape
        state_dict_round_trip strategies_run strategy_accepts_string strategy_invalid
    """,
    "`transform=` runs before data is stored, on a copy, as in the examples of TorchRL's documentation": """
        TestRBLazyInit: lazy_init TestStorages: storage_inplace_writing_transform TestTransforms: transform_inv
    """,
    "`ListStorage` keeps what it is given | `extend` splits and copies a TensorDict or a tensor": "prb",
    "a wrong argument is often a `RuntimeError` | it is a `ValueError`, or a `TypeError` for a value of "
    "another type": """
        batch_errors prb_alpha_setter_validates TestBuffers: empty TestFindStartStopTraj:
        end_keys_exclusive_with_end_key TestLazyStorages: extend_list_pytree TestSamplers: slice_sampler_errors
        TestStorages: existsok_lazymemmap
    """,
    "`state_dict()` has keys for each part, samplers and storages have `state_dict` and `dumps` of their own": """
        TestSamplers: prb_load_legacy_within_buffer_state_dict prb_loads_legacy_within_buffer_metadata TestStorages:
        list_storage_load_state_dict_decouples_from_source load_state_dict_decouples_from_source state_dict
        storage_dumps_loads
    """,
    "pickling a buffer | `buffer.state_dict()`, or `dumps(directory)`": """
        replay_buffer_prefetch_pickle_roundtrip TestComposableBuffers: pickable
    """,
    "tensorclasses in a `LazyTensorStorage` | `data.to_tensordict()`, for `extend` and `add`": """
        TestLazyStorages: set_tensorclass TestRBMultidim: rb_multidim TestStorages: get_set
    """,
    "stored frames have the keys of the first batch": """
        replay_buffer_read_write_all_in_order replay_buffer_read_write_all_in_order_matches_full_slice_ndim2
        TestStorages: storage_inplace_writing_newkey
    """,
    "a buffer fills its storage: `buffer.extend(data)`; a sampler and a storage belong to one buffer": """
        shared_storage_prioritized_sampler TestSamplers: prb_new_sampler_with_loaded_storage
    """,
    "a `SamplerWithoutReplacement` goes on with its round after `extend`, and in a new iteration | both "
    "begin a new round": """
        replay_buffer_prefetch_without_replacement_roundtrip TestSamplers: sampler_without_rep_state_dict
    """,
    "`sampler.traj_key` becomes the key that was found | it is the key that was given, or None": """
        TestSamplers: slice_sampler_auto_traj_key_collector_ids slice_sampler_auto_traj_key_episode
        slice_sampler_auto_traj_key_no_warning_single_key
    """,
    "`terminated` stays as it was stored": "TestSamplers: slice_sampler_without_replacement",
    "no warning: priorities count as 1 until they are set again": "add_warning prb_alpha_change_from_zero_warns",
    "it is True: storages take their memory at the first `extend`": "TestBufferStats: stats_does_not_initialize_buffer",
    "adds a mask if a slice is short | always": "TestSamplers: slice_sampler_mask_all_long_trajs_no_mask",
    "a smaller `max_capacity` than the storage | it is an error": "ptdrb replay_buffer_trajectories",
    "a `ListStorage` has them, as lazy stacks": "TestStorages: extend_lazystack",
    "`auto_cleanup=True`, `cleanup()` of a `LazyMemmapStorage` with `scratch_dir` | delete the directory": """
        TestLazyMemmapStorageCleanup: cleanup_explicit_scratch_dir cleanup_idempotent cleanup_nonexistent_dir
        cleanup_temp_dir cleanup_uninitialized_storage cleanup_with_del
    """,
    "or a `traj_key` | it is an error": """
        TestFindStartStopTraj: end_keys_all_missing_falls_back TestSamplers: slice_sampler
    """,
    "`sync=False`: all processes write | one process writes into a `LazyMemmapStorage(scratch_dir=…)`": """
        replay_buffer_append_transform_rejects_unshareable_when_shared
        replay_buffer_append_transform_shares_when_buffer_is_shared
        replay_buffer_insert_transform_rejects_unshareable_when_shared
        replay_buffer_insert_transform_shares_when_buffer_is_shared
        replay_buffer_share_auto_shares_write_stateful_transform
        replay_buffer_share_rejects_unshareable_write_stateful_transform TestMultiProc:
        async_generic_prioritized_rb_multiproc_writes async_prioritized_rb_multiproc_writes error_list error_noninit
        multiproc_rb shared_prefetch_error_mentions_fix TestSharedStorageInit: mutation_revision_shared_across_processes
        sequence_boundary_cache_invalidated_across_processes shared_init_reconciles_non_cpu_device
        shared_storage_multiprocess
    """,
    "`MultiStep` as a module, for done flags of any shape | a function of batches whose flags are `[*B, T, 1]`": """
        TestMultiStep: multistep mutistep_cattrajs unusual_done
    """,
    "`dim_extend` can only name that": "TestFindStartStopTraj: multidimensional_boundary_index_and_fullgraph",
}
INTERNALS = {
    "reads the private cache of slices, or calls the private methods that find them": """
        TestFindStartStopTraj: boundary_index_cache_and_storage_invalidation end_keys_union matches_slice_sampler
        slice_sampler_cache_uses_storage_revision subclass_end_to_start_stop_override TestSamplers:
        slice_sampler_prioritized
    """,
    "reads or sets the trees of priorities by private names, or by places that they have there": """
        prb_alpha_change_retransforms_trees prb_alpha_zero_keeps_raw_max
        prioritized_sampler_load_state_dict_decouples_from_source
        prioritized_slice_sampler_load_state_dict_decouples_from_source TestSamplers: prb_ndim prb_update_max_priority
    """,
    "reads the private list of frames that are left in a round": """
        samplerwithoutrep samplerwithoutrep_load_state_dict_decouples_from_source
    """,
    "reads the private queue of prepared samples, its lock, or its part of a saved state": """
        replay_buffer_load_state_dict_waits_for_in_flight_samples replay_buffer_prefetch_autograd_roundtrip
        replay_buffer_prefetch_state_dict_capacity_mismatch replay_buffer_prefetch_state_dict_does_not_alias_queue
        replay_buffer_prefetch_state_dict_waits_for_in_flight_samples
    """,
    "calls a private method of a storage, or reads its private memory, counter or registry": """
        storage_mutation_revision_for_buffer_write_paths TestLazyMemmapStorageCleanup: auto_cleanup_default_behavior
        cleanup_preserves_user_data_by_default cleanup_registry TestLazyStorages: init init_tensorclass set
        TestStorages: _rand_given_ndim_recompile
    """,
    "counts calls of a method of TensorDict, or compiles private writing": """
        TestStorages: compilable_storage_set_fullgraph extend_lazystack_2d_storage extend_lazystack_direct_write
    """,
    "collects with env.rand_step as a policy, a method that steps the collector's environment": """
        TestCheckpointers: multi_env simple_env
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
                    yield f"{group}test_{word}", (kind, reason)


JUDGED = dict(_judged())
