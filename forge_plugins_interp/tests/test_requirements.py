"""Each requirement of a package for interpretability, with the tests that hold it: the table is no longer than what is
there."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

HERE = Path(__file__).parent
OF_MOE = HERE.parents[1] / "forge_plugins_moe/tests/test_sites.py"

REQUIREMENTS = {
    "I-1 canonical names, aliases, a listing": {
        "test_commands": ("forge_sites_lists_every_site_once", "forge_sites_tells_of_modules_by_name"),
        "test_session": ("names_of_other_projects_are_understood", "a_module_by_name_is_a_site"),
    },
    "I-2 inputs, outputs and gradients, of several forwards": {
        "test_session": ("gradients_are_those_of_autograd", "several_forwards_are_kept_apart"),
    },
    "I-3 scores, pattern, z and results of heads": {
        "test_session": (
            "explicit_attention_is_that_of_the_kernel",
            "softmax_of_the_scores_is_the_pattern",
            "a_query_that_sees_no_key_has_zeros",
            "packed_documents_do_not_see_each_other",
        ),
        "test_explicit_attention": (
            "explicit_attention_gives_what_the_kernel_gives",
            "explicit_attention_gives_what_flex_attention_gives",
        ),
    },
    "I-4 interventions with selectors, that can be written down and leave nothing behind": {
        "test_session": (
            "the_identities_of_changes",
            "changes_of_one_site_are_made_in_their_order",
            "a_change_of_some_tokens_is_made_where_they_are",
            "a_change_of_some_steps_is_made_in_these_forwards",
            "nothing_is_left_behind_by_an_error",
        ),
        "test_interventions": ("what_at_does_not_name_stays", "a_change_survives_json"),
    },
    "I-5 no cost when nothing is looked at, and a word about compile": {
        "test_commands": ("a_compiled_model_runs_eagerly_while_it_is_observed",),
        "test_capture": ("training_is_not_changed",),
        "test_nothing_observed": ("a_step_runs_the_operations_that_it_runs_without_the_package",),
    },
    "I-6 stores: resumed, bounded, reduced, with an estimate": {
        "test_extraction": ("a_killed_extraction_goes_on", "what_is_kept", "a_full_disk_is_told_before_the_first_byte"),
    },
    "I-7 ids and metadata, no padding": {
        "test_extraction": ("stimuli_have_their_ids_and_no_padding", "positions_below_zero_are_padding"),
        "test_comparison": ("samples_are_joined_by_their_ids",),
    },
    "I-8 the same in every layout": {
        "test_layouts": ("values_gradients_and_changes_are_those_of_one_process",),
        "test_extraction": ("a_store_is_the_same_in_every_layout",),
    },
    "I-9 any signature: pictures, transformers, any module": {
        "test_wrapped": (
            "what_is_seen_of_a_model_of_transformers_is_what_it_says_itself",
            "a_model_of_pictures_and_text_is_extracted",
            "vectors_through_plain_layers_have_a_row_a_sample",
        ),
    },
    "I-10 CKA, CCA, SVCCA, PWCCA, Procrustes": {
        "test_metrics": (
            "cka_is_its_formula",
            "batches_estimate_the_whole",
            "canonical_correlations_are_those_of_the_eigenvalue_problem",
            "rotations_scales_and_translations_change_nothing",
        ),
    },
    "I-11 RSA": {
        "test_metrics": (
            "dissimilarities_are_those_of_scipy",
            "a_noise_ceiling_has_its_bounds",
            "permuted_labels_are_a_null",
        ),
    },
    "I-12 encoding": {
        "test_encoding": (
            "ridge_is_that_of_sklearn_with_leaving_one_out",
            "pls_is_that_of_sklearn",
            "no_group_is_in_training_and_test",
            "a_planted_map_is_found_and_shuffled_stimuli_are_not",
        ),
    },
    "I-13 probes with controls, by document": {
        "test_probes": (
            "a_probe_reads_what_is_there_and_not_what_is_not",
            "labels_that_are_read_take_few_bits",
            "few_documents_and_one_class_are_refused",
        ),
    },
    "I-14 lenses and patching": {
        "test_lenses": (
            "the_lens_of_the_last_layer_is_what_the_model_predicts",
            "contributions_add_up_to_the_logit",
            "patching_everything_of_a_layer_brings_everything_back",
            "a_path_is_patched_as_its_definition_says",
        ),
        "test_tuned_lens": ("gradients_are_those_of_the_formula", "layers_predict_more_of_what_the_model_predicts"),
    },
    "I-15 autoencoders and transcoders, and files of other tools": {
        "test_autoencoders": ("the_planted_directions_are_found", "files_of_other_tools_hold_the_same_function"),
        "test_splice": ("a_transcoder_that_computes_the_layer_recovers_all",),
    },
    "I-16 formats": {
        "test_store_export": ("an_assembly_is_that_of_brain_score", "other_formats_hold_the_values"),
        "test_recordings": ("every_format_holds_the_same_recordings", "spikes_of_an_nwb_file_become_rates"),
    },
    "I-17 pictures": {
        "test_commands": ("forge_attention_draws",),
        "test_lens_commands": (
            "forge_lens_prints_and_draws",
            "forge_patch_prints_and_draws",
            "forge_patch_of_paths_prints_and_draws",
        ),
        "test_features": ("the_report_of_an_autoencoder_has_cards_of_latents",),
    },
    "I-18 routing and experts": {
        "moe": ("each_output_is_that_of_its_expert_alone", "outputs_by_their_weights_sum_to_that_of_the_layer")
    },
    "I-19 over checkpoints": {
        "test_checkpoint_sweep": ("checkpoints_of_a_run_become_stores_that_can_be_compared",),
        "test_representations": ("layers_are_compared_with_the_first_evaluation",),
    },
    "I-20 sampled features, crossnobis, banded ridge": {
        "test_sampled_features": ("a_sample_of_neurons_estimates_the_whole_population",),
        "test_metrics": ("crossnobis_distances_are_the_formula_and_unbiased",),
        "test_banded_ridge": ("the_search_is_that_of_himalaya",),
    },
}


@pytest.mark.parametrize("requirement", REQUIREMENTS)
def test_a_requirement_has_its_tests(requirement):
    for name, wanted in REQUIREMENTS[requirement].items():
        path = OF_MOE if name == "moe" else HERE / f"{name}.py"
        there = {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}
        assert {f"test_{one}" for one in wanted} <= there, path
