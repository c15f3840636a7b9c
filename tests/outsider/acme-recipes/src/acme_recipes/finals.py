from forge_plugins_monitor.report.section import ReportSection
from forge_plugins_monitor.report.table import comparison


class Finals(ReportSection):
    """The last step and loss of each run."""

    title = "How they ended"
    place = 15.0

    def __init__(self, config, /): ...

    def render(self, runs):
        curves = [run.curve("loss") for run in runs]
        return comparison(
            runs, {"step": [f"{one.steps[-1:]}" for one in curves], "loss": [f"{one.last}" for one in curves]}
        )
