"""What context parallelism is refused for. Its curves are in tests/parity."""

import pytest

from forge_core.errors import ConfigError
from forge_core.job import load_job
from forge_core.registry.discovery import discover


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["train.seq_len=30"], "train.seq_len = 30 does not divide into them; 28 or 32 does"),
        (["parallel.passes.fsdp=false"], "parallel.passes.context_parallel: it needs the pass 'fsdp'"),
        (["parallel.passes.context_parallel=false"], "switches off every installed pass that serves the axis 'cp'"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_built(tiny, overrides, sentence):
    with pytest.raises(ConfigError) as refused:
        load_job(tiny.config, ["parallel.cp=2", *overrides], catalog=discover(), world_size=2)

    assert sentence in str(refused.value)
