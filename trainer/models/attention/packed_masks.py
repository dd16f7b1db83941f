"""transformers' search for packed rows in position ids, which this trainer does not need."""

from transformers import masking_utils


def no_search_for_packed_rows() -> None:
    """Switch the search off for this process: it waits for the GPU, and cu_seqlens name the documents of a row."""
    masking_utils.find_packed_sequence_indices = {}.get  # finds no tensor in {}, which means: no packed rows
