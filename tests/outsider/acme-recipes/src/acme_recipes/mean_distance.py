from forge_plugins_interp.metrics.contract import RepresentationMetric
from forge_plugins_interp.metrics.matrices import checked


class MeanDistance(RepresentationMetric):
    """How far the means of two representations of one width are from each other."""

    is_distance = True

    def __init__(self, config, /): ...

    def compare(self, x, y):
        x, y = checked(x, y)
        return float((x.mean(0) - y.mean(0)).norm())
