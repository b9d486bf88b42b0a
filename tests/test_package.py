"""The metadata of the package: links that work outside of the repository, and one version everywhere."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

import s3d_fast

ROOT = Path(__file__).parent.parent
ADDRESS = "https://host/owner/name"


@pytest.fixture(scope="module")
def described() -> dict[str, Any]:
    """Return the names of docs/long_description.py."""
    return runpy.run_path(str(ROOT / "docs" / "long_description.py"))


@pytest.mark.parametrize(
    ("text", "wanted", "without_address"),
    [
        ("[map](docs/design.md)", f"[map]({ADDRESS}/blob/v1.2/docs/design.md)", "map"),
        ("[one](docs/math.md#s)", f"[one]({ADDRESS}/blob/v1.2/docs/math.md#s)", "one"),
        ("![p](docs/figures/rbf.png)", f"![p]({ADDRESS}/raw/v1.2/docs/figures/rbf.png)", ""),
        ('<img src="README.md">', f'<img src="{ADDRESS}/raw/v1.2/README.md">', ""),
        ('<a href="LICENSE">MIT</a>', f'<a href="{ADDRESS}/blob/v1.2/LICENSE">MIT</a>', "MIT"),
        ("[here](#cite)", "[here](#cite)", "[here](#cite)"),
        ("[paper](https://arxiv.org/abs/1)", "[paper](https://arxiv.org/abs/1)", "[paper](https://arxiv.org/abs/1)"),
        ('spectra["a"](x)', 'spectra["a"](x)', 'spectra["a"](x)'),
    ],
)
def test_links_to_files_become_absolute(
    described: dict[str, Any], text: str, wanted: str, without_address: str
) -> None:
    assert described["absolute_links"](text, ADDRESS, "1.2") == wanted
    assert described["absolute_links"](text, "", "1.2") == without_address


@pytest.mark.parametrize("address", ["", ADDRESS])
def test_the_long_description_has_no_relative_link(described: dict[str, Any], address: str) -> None:
    text = described["absolute_links"]((ROOT / "README.md").read_text(), address, "1.2")
    targets = re.findall(r'\]\(([^()\s]+)\)|(?:href|src|srcset)="([^"]+)"', text)
    assert [target for pair in targets for target in pair if (ROOT / target.split("#")[0]).is_file()] == []
    assert (f"{ADDRESS}/blob/v1.2/docs/api.md" in text) == bool(address)


def test_a_release_must_agree_with_its_files() -> None:
    disagreements = runpy.run_path(str(ROOT / ".ci" / "release.py"))["disagreements"]
    found = disagreements("v0.0", "https://elsewhere")
    assert f"the tag is v0.0, and s3d_fast/base/version.py has the version {s3d_fast.__version__}" in found
    assert any("REPOSITORY in docs/long_description.py" in problem for problem in found)
    assert not any("CITATION.cff" in problem for problem in found)


def test_the_changelog_has_this_version() -> None:
    assert f"\n## {s3d_fast.__version__} (" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize(
    ("symbol", "is_runtime"),
    [
        ("_ZSt20__throw_length_errorPKc", True),
        ("_ZNKRSt7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv", True),
        ("_ZNSs4swapERSs", True),
        ("_Znwm", True),
        ("_ZdlPvm", True),
        ("_ZTVN10__cxxabiv120__si_class_type_infoE", True),
        ("_ZTTNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEE", True),
        ("_ZTIi", True),
        ("_ZN2at15get_num_threadsEv", False),
        ("_ZNK3c105Error4whatEv", False),
        ("_ZTIN3c105ErrorE", False),
        ("_ZN5torch7LibraryC1ENS0_4KindE", False),
        ("_ZNR5torch7Library4_defEv", False),
    ],
)
def test_symbols_of_torch_are_told_from_those_of_the_runtime(symbol: str, is_runtime: bool) -> None:
    runtime = runpy.run_path(str(ROOT / ".ci" / "symbols.py"))["RUNTIME"]
    assert bool(runtime.match(symbol)) == is_runtime
