"""The plugin kit passes our own packages, and has a sentence for each way to get a package wrong."""

import pytest

from forge_testing.package import PluginConformance

PLUGIN = """
    from forge_core.api import Component, hookimpl

    @hookimpl
    def forge_schedulers():
        yield Component(name="flat", summary="flat", factory="acme.flat:flat", config="acme.config:FlatConfig")
"""
CONFIG = '''
    import attrs

    @attrs.frozen(kw_only=True)
    class FlatConfig:
        """Flat."""

        height: float = 1.0
        """How high."""
        limit: float | None = None
        """Where it ends."""
'''
FACTORY = """
    def flat(config, /, *, total_steps):
        return lambda step: config.height
"""
PASS = """
    from forge_core.api import Conflict, Need, PassComponent, hookimpl

    @hookimpl
    def forge_parallel_passes():
        yield PassComponent(
            name="flat", summary="flat", factory="acme.flat:flat", config="acme.config:FlatConfig", phase="swap",
            needs=[Need("fsdp", when={"height": 2.0})], conflicts=[Conflict("run.device", "why", values=("cpu",))],
        )
"""
COMMANDS = """
    from forge_core.api import Command, hookimpl

    @hookimpl
    def forge_commands():
        yield Command(name="flatten", summary="flatten", run="acme.flat:flat")
"""
DOCTOR = """
    from forge_core.api import Check, hookimpl

    @hookimpl
    def forge_checks():
        yield Check(name="flat", summary="flat", run="acme.flat:flat")
"""
RANKS = COMMANDS.replace('run="acme.flat:flat"', 'run="acme.flat:flat", ranks=True')
FLATTEN = """
    import click

    @click.command
    @click.pass_obj
    def flat(obj):
        obj.start_ranks()
"""
METADATA = "Metadata-Version: 2.1\nName: acme\nVersion: 1.0\nRequires-Dist: forge-core>=0.1\n"


class TestOptim(PluginConformance):
    dist = "forge-plugins-optim"


class TestData(PluginConformance):
    dist = "forge-plugins-data"


class Acme(PluginConformance):
    dist = "acme"


@pytest.fixture
def acme(make_distribution):
    """Installs the plugin with some of its files replaced."""

    def install(**files):
        sources = {"plugin": PLUGIN, "config": CONFIG, "flat": FACTORY} | files
        entry_points = {"entry_points.txt": sources.pop("entry_points")} if "entry_points" in sources else {}
        site = make_distribution(
            "acme", files={f"acme/{name}.py": text for name, text in sources.items()} | entry_points
        )
        (site / "acme-1.0.dist-info" / "METADATA").write_text(METADATA)
        return site

    return install


CHECKS = sorted(name for name in vars(PluginConformance) if name.startswith("test_"))
FAULTS = [
    ({"plugin": DOCTOR, "flat": "flat = 3"}, "test_checks_are_functions", "acme.flat:flat must be a function, got 3"),
    ({"plugin": "import nowhere"}, "test_loads", "acme 1.0 is broken: ModuleNotFoundError"),
    ({"plugin": "import forge_core.api"}, "test_loads", "acme 1.0 registers nothing"),
    (
        {"entry_points": "[forge.v1]\nroadrunner = acme.plugin\n"},
        "test_announces_itself_under_its_own_name",
        "the entry point is called 'roadrunner'; call it 'acme'",
    ),
    (
        {"plugin": f"    import numpy\n{PLUGIN}"},
        "test_listing_it_imports_nothing_heavy",
        "importing acme.plugin imports numpy; every forge command",
    ),
    (
        {"config": f"    import numpy\n{CONFIG}"},
        "test_validating_it_imports_nothing_heavy",
        "reading what can be set imports numpy",
    ),
    (
        {"config": f"    print('flat')\n{CONFIG}"},
        "test_importing_it_prints_nothing",
        "importing acme.plugin, acme.config prints 'flat'; standard output belongs to the command",
    ),
    (
        {"config": "class FlatConfig: height = 1.0"},
        "test_configs_are_frozen_attrs_classes",
        "acme.config:FlatConfig must be an attrs class",
    ),
    (
        {"config": CONFIG.replace("frozen", "define")},
        "test_configs_are_frozen_attrs_classes",
        "acme.config:FlatConfig must be frozen",
    ),
    (
        {"config": CONFIG.replace("(kw_only=True)", "")},
        "test_configs_are_frozen_attrs_classes",
        "height, limit must be keyword-only",
    ),
    (
        {"config": CONFIG.replace("limit", "name")},
        "test_configs_leave_name_to_the_choice_of_component",
        "has a field called name, the key that chooses the component",
    ),
    *(
        (
            {"config": CONFIG.replace("height: float = 1.0", f"height: {annotation} = {default}")},
            "test_fields_have_types_that_a_job_can_say",
            f"FlatConfig.height has the type {foreign}, which cannot be read from TOML, or is not checked",
        )
        for annotation, default, foreign in (
            ("complex", "1j", "complex"),
            ("tuple[bytes, ...]", "()", "bytes"),
            ("dict[int, float] | None", "None", r"dict\[int, float\]"),
            ("__import__('typing').NamedTuple('Pair', [('a', int)])", "None", "Pair"),
            ("__import__('typing').TypedDict('Table', {'a': int})", "None", "Table"),
        )
    ),
    (
        {"config": CONFIG.replace("height: float = 1.0", "height = attrs.field(default=1.0)")},
        "test_fields_have_types_that_a_job_can_say",
        "FlatConfig.height has the type None",
    ),
    (
        {"config": CONFIG.replace("None = None", "None = 2.0")},
        "test_optional_fields_default_to_none",
        "FlatConfig.limit may be None and must therefore default to None",
    ),
    (
        {"config": CONFIG.replace("height: float = 1.0", "height: float = attrs.field(default=1.0, eq=id)")},
        "test_defaults_survive_a_resolved_job",
        "scheduler flat: its defaults written to TOML and read again are",
    ),
    (
        {"plugin": PASS.replace('"height"', '"heigth"')},
        "test_needs_and_conflicts_of_passes_are_about_keys_that_exist",
        "parallel_pass flat: it has no key 'heigth', which it declares something of",
    ),
    (
        {"plugin": PASS.replace("run.device", "train.device")},
        "test_needs_and_conflicts_of_passes_are_about_keys_that_exist",
        "it declares a conflict with 'train.device', which is no key of a job",
    ),
    (
        {"plugin": PASS.replace('phase="swap"', 'phase="checkpointing", compared=[{"height": "high"}]')},
        "test_settings_that_passes_offer_for_comparison_are_valid",
        "parallel_pass flat: compared has {'height': 'high'}: parallel_pass.height: expected a number",
    ),
    (
        # under another name: what is read from a module's source is remembered
        {"plugin": PLUGIN.replace("acme.config", "acme.terse"), "terse": CONFIG.replace('"""How high."""', "")},
        "test_every_field_is_documented",
        "FlatConfig.height has no docstring under it, nor a line under Args: of the class",
    ),
    (
        {"config": CONFIG.replace('"""Flat."""', "")},
        "test_every_field_is_documented",
        "acme.config:FlatConfig has no docstring",
    ),
    (
        {"flat": "    def flat(config, /, *, steps):\n        return lambda step: 1.0"},
        "test_factories_take_what_the_contract_gives",
        r"acme.flat:flat cannot be called as factory\(config, total_steps=…\)",
    ),
    (
        {"flat": "flat = 1"},
        "test_factories_take_what_the_contract_gives",
        "scheduler flat: the factory acme.flat:flat is not callable",
    ),
    (
        {"plugin": COMMANDS},
        "test_commands_are_click_commands",
        "acme.flat:flat must be a click.Command, got function",
    ),
    (
        {"plugin": RANKS, "flat": FLATTEN.replace("@click.pass_obj", "@click.option('--nproc')\n    @click.pass_obj")},
        "test_commands_on_ranks_start_them",
        "the command 'flatten' has ranks=True, which adds --nproc; leave out its own",
    ),
    (
        {"plugin": RANKS, "flat": FLATTEN.replace("obj.start_ranks()", "print(obj.ranks())")},
        "test_commands_on_ranks_start_them",
        r"acme.flat:flat never calls start_ranks\(\) of its invocation: --nproc would do nothing",
    ),
]


@pytest.mark.parametrize("check", CHECKS)
def test_a_plugin_that_keeps_the_rules_passes(acme, check):
    acme()

    getattr(Acme(), check)()


@pytest.mark.parametrize(
    "annotation",
    [
        "bool | int | str | None",
        "__import__('pathlib').Path | None",
        "__import__('typing').Literal['a', 1] | None",
        "tuple[tuple[int, float], ...] | None",
        "__import__('collections').abc.Mapping[str, list[set[str]]] | None",
        "__import__('typing').NewType('Seconds', float) | None",
        "__import__('typing').Annotated[int, 'seconds'] | None",
        "__import__('enum').Enum('Kind', 'A B') | None",
        "attrs.make_class('Inner', []) | None",
        "__import__('typing').Any",
    ],
)
def test_types_that_a_job_can_say_pass(acme, annotation):
    acme(config=CONFIG.replace("height: float = 1.0", f"height: {annotation} = None"))

    Acme().test_fields_have_types_that_a_job_can_say()


def test_a_pass_that_declares_what_there_is_passes(acme):
    acme(plugin=PASS)

    Acme().test_needs_and_conflicts_of_passes_are_about_keys_that_exist()


def test_settings_of_its_own_keys_can_be_compared(acme):
    acme(plugin=PASS.replace('phase="swap"', 'phase="checkpointing", compared=[{"height": 3.0}]'))

    Acme().test_settings_that_passes_offer_for_comparison_are_valid()


def test_only_what_trades_memory_can_be_compared(acme):
    acme(plugin=PASS.replace('phase="swap"', 'phase="swap", compared=[{"height": 3.0}]'))

    with pytest.raises(AssertionError, match="compared is for passes of the phase checkpointing"):
        Acme().test_loads()


def test_a_command_on_ranks_that_starts_them_passes(acme):
    acme(plugin=RANKS, flat=FLATTEN)

    Acme().test_commands_on_ranks_start_them()


@pytest.mark.parametrize(("files", "check", "sentence"), FAULTS)
def test_a_fault_is_found_and_told(acme, files, check, sentence):
    acme(**files)

    with pytest.raises(AssertionError, match=sentence):
        getattr(Acme(), check)()


def test_a_missing_dependency_is_found_and_told(acme):
    site = acme()
    (site / "acme-1.0.dist-info" / "METADATA").write_text(METADATA.replace("Requires-Dist: forge-core>=0.1\n", ""))

    with pytest.raises(AssertionError, match="acme does not depend on forge-core"):
        Acme().test_requires_the_core()


def test_a_plugin_that_is_not_installed_is_told():
    with pytest.raises(AssertionError, match=r"acme is not installed, or has no entry point .* pip install -e"):
        Acme().test_loads()


def test_every_check_has_a_fault_that_it_finds():
    assert {check for _, check, _ in FAULTS} | {"test_requires_the_core"} == set(CHECKS)
