"""The parametrization kit passes ours, and has a sentence for each way to break the contract."""

import itertools

import pytest

from forge_core.contracts.parametrization import ModelFactors, Parametrization, RateFactors
from forge_core.errors import ConfigError
from forge_testing.parametrization import ParametrizationConformance


class TestStandard(ParametrizationConformance):
    component = "forge-plugins-optim:standard"


class TestMup(ParametrizationConformance):
    component = "forge-plugins-optim:mup"
    config = {"base": {"dim": 64}}


class TestCompleteP(ParametrizationConformance):
    component = "forge-plugins-optim:complete_p"
    config = {"base": {"dim": 64, "n_layers": 2}}


class Plain(Parametrization):
    def model(self, size, base):
        return ModelFactors()

    def initial_scale(self, parameter):
        return 1.0

    def rates(self, parameter, update_size):
        return RateFactors()


class HalvesLogits(Plain):
    def model(self, size, base):
        return ModelFactors(output=0.5)


class HalvesValues(Plain):
    def initial_scale(self, parameter):
        return 0.5


class Freezes(Plain):
    def rates(self, parameter, update_size):
        return RateFactors(lr=0.0 if parameter.size.dim > 64 else 1.0)


class Unbounded(Plain):
    def initial_scale(self, parameter):
        return 1.0 if parameter.size.dim == 64 else float("inf")


class KnowsNoAdam(Plain):
    def rates(self, parameter, update_size):
        if update_size == "element":
            raise ConfigError("no rule")
        return RateFactors()


class Counts(Plain):
    calls = itertools.count(1)

    def initial_scale(self, parameter):
        return float(next(self.calls))


FAULTS = [
    (HalvesLogits, "test_changes_nothing_at_the_size_of_the_base", "a model of the base's size is changed"),
    (HalvesValues, "test_changes_nothing_at_the_size_of_the_base", "embed.weight begins 0.5 times as large"),
    (Freezes, "test_every_factor_is_positive_and_finite", "lr of embed.weight, 2 times as wide.* must be above 0"),
    (Unbounded, "test_every_factor_is_positive_and_finite", "the initial scale of embed.weight.* is inf"),
    (KnowsNoAdam, "test_has_a_rule_for_updates_of_elements", "embed.weight has no rule for AdamW"),
    (Counts, "test_depends_on_what_it_is_given_only", "nothing of a parametrization is saved"),
]


@pytest.mark.parametrize(("parametrization", "check", "sentence"), FAULTS)
def test_a_fault_is_found_and_told(parametrization, check, sentence):
    class Case(ParametrizationConformance):
        def make(self):
            return parametrization()

    with pytest.raises(AssertionError, match=sentence):
        getattr(Case(), check)()


def test_every_check_has_a_fault_that_it_finds():
    checks = {name for name in vars(ParametrizationConformance) if name.startswith("test_")}

    assert {check for _, check, _ in FAULTS} == checks
