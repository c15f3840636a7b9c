import attrs

from forge_plugins_interp.interventions import Intervention


@attrs.frozen(kw_only=True, eq=False)
class Reversal(Intervention):
    """The features in the other order."""

    kind = "acme-recipes:reversal"

    def changed(self, value, name):
        return value.flip(-1)
