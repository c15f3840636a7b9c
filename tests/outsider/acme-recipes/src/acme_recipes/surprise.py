from forge_core.contracts.evaluation import Evaluation
from forge_core.contracts.loss import IGNORED


class Surprise(Evaluation):
    """The fraction of held-out targets that the model gives less than a stated probability."""

    def __init__(self, config, /, *, open_data, **_):
        self._source, self._below = open_data(None, "data"), config.below

    def run(self, context):
        rare = count = 0
        for batch in context.batches(self._source):
            logits = context.predict(batch)
            if logits is not None:
                valid = batch["targets"] != IGNORED
                chosen = batch["targets"].clamp(min=0)[..., None]
                given = logits.float().softmax(-1).gather(-1, chosen)[..., 0]
                rare += ((given < self._below) & valid).sum()
                count += valid.sum()
        sums = context.sum_over_ranks({"rare": rare, "count": count})
        return {"rare": sums["rare"] / sums["count"], "targets": sums["count"]}
