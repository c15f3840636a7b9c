"""The software bill of materials of a release: what ours are, and what they need, as CycloneDX 1.6 in JSON.

    python release/bill_of_materials.py dist

Reads the wheels in the folder, and writes ``forge-<version>.cdx.json`` into it; the same bytes for the same wheels.
What others publish is named with the versions that ours accept, and not with one: an installer chooses it. What only an
extra brings is optional.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from email import message_from_bytes
from email.message import Message
from pathlib import Path
from uuid import NAMESPACE_OID, uuid5
from zipfile import ZipFile

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.model.license import LicenseExpression
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with the wheels")
    folder: Path = parser.parse_args(arguments).folder
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise SystemExit(f"{folder} has no wheels: `make dist` builds them")
    metadata = {wheel: read_metadata(wheel) for wheel in wheels}
    versions = sorted({message["Version"] for message in metadata.values()})
    if len(versions) > 1:
        raise SystemExit(f"{folder} has wheels of several releases: {', '.join(versions)}")
    file = folder / f"forge-{versions[0]}.cdx.json"
    file.write_text(bill(metadata, versions[0]) + "\n", encoding="utf-8")
    print(f"{len(json.loads(file.read_text())['components'])} components in {file}")


def read_metadata(wheel: Path) -> Message:
    """The ``METADATA`` of a wheel."""
    with ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_bytes(archive.read(name))


def bill(metadata: dict[Path, Message], version: str) -> str:
    """The bill of wheels, in JSON."""
    ours = {canonicalize_name(message["Name"]): component(wheel, message) for wheel, message in metadata.items()}
    needs = {name: requirements(message) for name, message in zip(ours, metadata.values(), strict=True)}
    every = [need for of_one in needs.values() for need in of_one]
    others = {name: foreign(name, every) for name in {canonicalize_name(need.name) for need in every} - set(ours)}
    release = Component(name="forge", version=version, type=ComponentType.FRAMEWORK, bom_ref=f"forge=={version}")
    digests = "".join(str(next(iter(one.hashes)).content) for one in ours.values())
    times = [archive.infolist()[0].date_time for archive in map(ZipFile, metadata)]
    made = BomMetaData(component=release, timestamp=datetime(*max(times), tzinfo=UTC))
    bom = Bom(components=[*ours.values(), *others.values()], metadata=made, serial_number=uuid5(NAMESPACE_OID, digests))
    known = {**ours, **others}
    bom.register_dependency(release, ours.values())
    for name, of_one in needs.items():
        needed = {canonicalize_name(need.name) for need in of_one if not need.marker}
        bom.register_dependency(known[name], [known[other] for other in sorted(needed)])
    return JsonV1Dot6(bom).output_as_string(indent=1)


def component(wheel: Path, message: Message) -> Component:
    """One of ours."""
    name, version = message["Name"], message["Version"]
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return Component(
        name=name,
        version=version,
        description=message["Summary"],
        licenses=[LicenseExpression(message["License-Expression"])],
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest)],
        purl=PackageURL("pypi", name=name, version=version),
        bom_ref=f"{name}=={version}",
    )


def requirements(message: Message) -> list[Requirement]:
    return [Requirement(line) for line in message.get_all("Requires-Dist") or ()]


def foreign(name: str, every: Iterable[Requirement]) -> Component:
    """What somebody else publishes, with all that ours say of its versions."""
    needs = [need for need in every if canonicalize_name(need.name) == name]
    asked = sorted({str(need.specifier) for need in needs} - {""})
    return Component(
        name=name,
        scope=ComponentScope.OPTIONAL if all(need.marker for need in needs) else ComponentScope.REQUIRED,
        purl=PackageURL("pypi", name=name),
        properties=[Property(name="forge:accepts", value=one) for one in asked],
        bom_ref=name,
    )


if __name__ == "__main__":
    main()
