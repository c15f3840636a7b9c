"""Old objects are searched for garbage again once no thread reads or writes a description any more."""

import gc

from forge_core.checkpoint.garbage_collection import young_objects_alone


def test_a_read_that_begins_while_a_save_is_written_and_ends_after_it_leaves_the_search_on():
    thresholds = gc.get_threshold()
    save, read = young_objects_alone(), young_objects_alone()

    save.__enter__()
    read.__enter__()
    assert gc.get_threshold()[2] > 1000 * thresholds[2]
    save.__exit__(None, None, None)
    read.__exit__(None, None, None)

    found = gc.get_threshold()
    gc.set_threshold(*thresholds)
    assert found == thresholds
